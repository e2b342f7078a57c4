"""Several processes of a run: who has ended is named, and torchrun leaves our options alone."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from test_cli import npz, settings  # noqa: F401 a fixture
from test_train_engine import assert_same_weights
from topklass.cli import FILE_ONLY
from topklass.train.processes import (
    Processes,
    disconnect,
    ending_with_launcher,
    naming_ended_ranks,
    runs,
    warn_of_few_cores,
)
from topklass.train.recipe import Recipe
from topklass.train.trainer import fit

needs_fsdp_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="needs PyTorch 2.7"
)
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs processes of POSIX")


@posix
def test_processes_that_have_ended():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = Processes()
    known.ids = [os.getpid(), child.pid]
    assert runs(child.pid)
    child.kill()
    assert known.ended() == [1]  # the parent has not looked yet
    child.communicate()
    assert known.ended() == [1]
    assert not runs(child.pid)


@posix
@pytest.mark.parametrize(("training", "status"), [(True, 2), (False, 0)])
def test_a_rank_ends_with_the_process_that_started_it(monkeypatch, capfd, training, status):
    """While it trains, for example waits for that process; it may go on with other work."""
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TOPKLASS_LAUNCHER", str(launcher.pid))
    monkeypatch.setattr("topklass.train.processes.GRACE", 0.5)
    child = os.fork()
    if child == 0:
        with ending_with_launcher():
            time.sleep(30 if training else 0)
        time.sleep(2)
        os._exit(0)
    launcher.kill()
    launcher.communicate()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    message = "Error: the process that started rank 1 has ended; continue with --resume\n"
    assert (message in capfd.readouterr().err) == training


@posix
def test_a_first_rank_ends_by_itself(monkeypatch):
    """Also one whose environment is that of a process that has ended."""
    monkeypatch.setenv("TOPKLASS_LAUNCHER", "1")
    with ending_with_launcher():
        assert os.environ["TOPKLASS_LAUNCHER"] == str(os.getpid())


@posix
def test_ctrl_c_while_a_rank_waits_for_another():
    """PyTorch waits, and no handler of Python runs."""
    reader, writer = os.pipe()

    def wait_for_another() -> None:
        os.write(writer, b"ready")
        patience = timedelta(seconds=5)
        torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=patience)

    child = os.fork()
    if child == 0:
        try:
            fit(SimpleNamespace(world_size=2, global_rank=0, callbacks=(), fit=wait_for_another))
        finally:
            os._exit(1)
    os.read(reader, 5)
    os.kill(child, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT
    for end in (reader, writer):
        os.close(end)


def trainer(processes: int, *callbacks: Processes) -> SimpleNamespace:
    return SimpleNamespace(world_size=processes, global_rank=0, callbacks=callbacks)


def test_lost_connections_are_named(monkeypatch):
    known = Processes()
    monkeypatch.setattr(known, "ended", lambda: [1, 3])
    expected = "rank 1, 3 of 4 has ended, so rank 0 stops; continue with --resume"
    with pytest.raises(ChildProcessError, match=expected), naming_ended_ranks(trainer(4, known)):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection reset by peer")
    with pytest.raises(ChildProcessError, match="another rank"), naming_ended_ranks(trainer(2)):
        raise torch.distributed.DistNetworkError("timed out")
    with pytest.raises(RuntimeError, match="out of memory"), naming_ended_ranks(trainer(2)):
        raise RuntimeError("out of memory")


def test_a_rank_leaves_the_others():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    for _ in range(2):  # the second has nothing to leave
        disconnect()
        assert not torch.distributed.is_initialized()


def test_few_cores(monkeypatch):
    monkeypatch.setattr("topklass.train.processes.core_count", lambda: 2)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    with pytest.warns(UserWarning, match="4 processes share 2 cores.*--devices 2"):
        warn_of_few_cores(SimpleNamespace(strategy=strategy, num_devices=4))
    warn_of_few_cores(SimpleNamespace(strategy=strategy, num_devices=2))


def test_torchrun_leaves_our_options_alone():
    """It takes beginnings of its own options, also behind the name of the program."""
    from torch.distributed.run import get_args_parser

    names = [each.name.replace("_", "-") for each in fields(Recipe) if each.name not in FILE_ONLY]
    names += ["recipe", "folder", "resume", "find-tau", "find-epsilon", "option"]
    ours = ["train", *(f"--{name}" for name in names)]
    found = get_args_parser().parse_args(["--nproc-per-node", "2", "-m", "topklass", *ours])
    assert found.training_script == "topklass"
    assert found.training_script_args == ours


def signalled(command: list[str], folder: Path, number: int) -> subprocess.Popen[str]:
    """A run of two processes, the second of which gets a signal after the first checkpoint."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (folder / "checkpoints" / "last.ckpt").exists() and time.monotonic() < until:
        time.sleep(0.05)
    listed = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "topklass"], capture_output=True, text=True
    )
    os.kill(int(listed.stdout.split()[0]), number)
    return process


@pytest.mark.slow
@posix
def test_a_termination_signal_to_one_rank(npz, tmp_path):  # noqa: F811 a fixture
    """Is one to all: the exit status of the command says so, whichever process it starts."""
    options = [
        *settings(npz),
        "--devices",
        "2",
        "--epochs",
        "200",
        "--folder",
        str(tmp_path / "run"),
    ]
    command = [sys.executable, "-m", "topklass", "train", *options]
    process = signalled(command, tmp_path / "run", signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "continue with --resume" in said


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    "options",
    [
        "--strategy ddp",
        "--strategy ddp --shard-classes",
        pytest.param("--strategy fsdp --shard-classes", marks=needs_fsdp_on_cpu),
    ],
)
def test_a_rank_that_is_killed(npz, options, tmp_path):  # noqa: F811 a fixture
    """The other says so in a sentence, and the run can be continued to the same weights."""
    arguments = [*settings(npz), "--devices", "2", "--epochs", "15", *options.split()]
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def command(*more: str) -> list[str]:
        return [sys.executable, "-m", "topklass", "train", *more]

    first = command(*arguments, "--folder", str(whole))
    subprocess.run(first, check=True, capture_output=True)
    process = signalled(command(*arguments, "--folder", str(killed)), killed, signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert "Error: rank 1 of 2 has ended, so rank 0 stops; continue with --resume\n" in error
    assert "Traceback" not in error
    assert process.returncode == 2
    subprocess.run(command("--resume", "--folder", str(killed)), check=True, capture_output=True)
    assert_same_weights(whole, killed)
