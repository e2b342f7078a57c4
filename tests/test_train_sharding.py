"""Fully sharded data parallel: the weights of plain data parallel, in whole checkpoints."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing import get_context, start_processes

import topklass
from image_folders import write_folder
from test_train_details import epochs
from test_train_engine import assert_same_weights, weights
from topklass.train import Recipe, sharding
from topklass.train.divided import divide_like, divide_parameters, join_when_saved, local
from topklass.train.module import SGD
from topklass.train.processes import disconnect
from topklass.train.sharded_head import ShardedHead
from topklass.train.sharding import Sharded, divide_network, strategy

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard
needs_fsdp_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="needs PyTorch 2.7"
)
get_context("forkserver").set_forkserver_preload(["topklass.train.sharding"])
SCRIPT = """
import os, sys, warnings; warnings.simplefilter("ignore")
from pathlib import Path
import pytest, torch
import test_train_engine as t
from topklass.train import sharding
from topklass.train.processes import disconnect

sharding.PIECE = 1000  # several pieces
folder = Path(sys.argv[1])
changes = {"devices": 2, "ema": 0.5}
plain, sharded = (t.RECIPE.with_changes({**changes, "strategy": s}) for s in ("ddp", "fsdp"))
t.train(plain, folder / "ddp", dataset=t.toy())
t.train(sharded, folder / "fsdp", dataset=t.toy())
with pytest.MonkeyPatch.context() as patched:
    if os.environ["RANK"] == "1":  # the others follow
        t.stop_at(patched, 8, None)
    with pytest.raises(t.Interrupted):
        t.train(sharded, folder / "part", dataset=t.toy())
last = folder / "part" / "checkpoints" / "last.ckpt"
assert t.load_checkpoint(last)["global_step"] == 8
torch.distributed.barrier()
last.write_bytes(b"broken")
torch.distributed.barrier()
t.train(sharded, folder / "part", dataset=t.toy(), resume=True)
with pytest.MonkeyPatch.context() as patched:
    t.stop_at(patched, 8, None)
    with pytest.raises(t.Interrupted):
        t.train(plain, folder / "ddp-part", dataset=t.toy())
t.train(plain, folder / "ddp-part", dataset=t.toy(), resume=True)
disconnect()
"""


def test_names():
    assert isinstance(strategy(Recipe(strategy="fsdp")), Sharded)
    assert strategy(Recipe(strategy="ddp")) == "ddp"


def test_an_old_version_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cpu, "Stream", object)
    monkeypatch.setattr(Sharded, "root_device", torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"fsdp on the CPU needs PyTorch 2\.7 .* take strategy ddp"
    ):
        Sharded(network=True, classes=False).setup_environment()


class Reader(nn.Module):
    """Reads the weight of its part without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.part.weight


class Wide(nn.Module):
    """A list of layers, and parts whose weights another part reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.attention = nn.MultiheadAttention(4, 1)
        self.layers = nn.ModuleList([Reader(), Reader(), nn.Linear(4, 4)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.attention(rows, rows, rows)[0] * self.scale
        for layer in self.layers:
            rows = layer(rows)
        return rows


def connect(rank: int, ranks: int, folder: str) -> DeviceMesh:
    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", store, timeout, rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


@needs_fsdp_on_cpu
def test_pieces(tmp_path, monkeypatch):
    """Parts with enough parameters, as far as their forward is called; the rest in one."""
    monkeypatch.setattr("topklass.train.sharding.PIECE", 20)
    mesh, network, rows = connect(0, 1, str(tmp_path)), Wide(), torch.randn(3, 4)
    expected = network(rows)
    try:
        divide_network(network, mesh)
        pieces = [name for name, part in network.named_modules() if isinstance(part, FSDPModule)]
        assert pieces == ["", "attention", "layers.0", "layers.1"]
        assert all(isinstance(parameter, DTensor) for parameter in network.parameters())
        torch.testing.assert_close(network(rows), expected)
    finally:
        disconnect()


def test_a_step_takes_ordinary_tensors_and_dtensors_apart(tmp_path, monkeypatch):
    module, calls = sys.modules["torch.optim.sgd"], []
    real = module.sgd

    def noted(parameters: list[torch.Tensor], *rest: object, **options: bool) -> None:
        calls.append(([isinstance(p, DTensor) for p in parameters], options["foreach"]))
        real(parameters, *rest, **options)

    monkeypatch.setattr(module, "sgd", noted)
    mesh, network, expected = connect(0, 1, str(tmp_path)), small_network(), small_network()
    try:
        divide_parameters(network, ["0.weight", "4.bias"], mesh)
        options = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
        for each, kind in ((network, SGD), (expected, torch.optim.SGD)):
            optimizer = kind(each.parameters(), **options)
            for parameter in each.parameters():
                parameter.grad = torch.ones_like(parameter)
            assert optimizer.step(lambda: 3.0) == 3.0
            assert len(optimizer.param_groups) == 1
        assert calls[:2] == [([False] * 6, False), ([True] * 2, True)]
        for mine, theirs in zip(network.parameters(), expected.parameters(), strict=True):
            assert torch.equal(local(mine), theirs)
    finally:
        disconnect()


def small_network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 7)
    return nn.Sequential(*layers).double()


def check(rank: int, ranks: int, folder: str) -> None:
    """Gradient, average and state of a network in pieces with a split last layer."""
    mesh = connect(rank, ranks, folder)
    sharding.PIECE = 10
    whole, divided, average = (small_network() for _ in range(3))
    for network in (whole, divided):
        network[1].eval()  # the batch of a process has other statistics than the whole one
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    head = ShardedHead(divided, 7, mesh)
    last = divided[4].weight
    divide_network(divided, mesh)
    assert divided[4].weight is last
    assert not isinstance(divided[4], FSDPModule)
    images, labels = torch.randn(6, 4, dtype=torch.float64), torch.randint(7, (6,))
    optimizers = [
        SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        for network in (whole, divided)
    ]
    criterion = topklass.SmoothTopKLoss(2)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = criterion(whole(images), labels)
        output = divided(images[3 * rank : 3 * rank + 3])
        loss = head.loss(criterion, output, head.targets(labels[3 * rank : 3 * rank + 3]))
        torch.testing.assert_close(loss, expected)
        expected.backward(), loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    for mine, theirs in zip(divided.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.detach())
        momentum, expected = (
            each.state[weight]["momentum_buffer"]
            for each, weight in zip(optimizers, (theirs, mine), strict=True)
        )
        torch.testing.assert_close(expected.full_tensor(), momentum)

    divide_like(average, divided)
    for network in (average, divided):
        join_when_saved(network)
    saved, trained = average.state_dict(), divided.state_dict()
    if rank == 0:
        assert all(torch.equal(saved[name], value) for name, value in state.items())
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(trained[name], value)
    disconnect()


@needs_fsdp_on_cpu
def test_a_network_in_pieces_with_a_split_head(tmp_path):
    start_processes(check, (2, str(tmp_path)), 2, start_method="forkserver")


@pytest.mark.slow
@needs_fsdp_on_cpu
def test_the_command(tmp_path):
    """Two processes that Lightning starts, on files that workers read, not as many for each."""
    folder = write_folder(tmp_path / "toy", train=4, others=2)
    for label in range(5):  # of 7 pictures one process has two batches of 3, the other one
        (folder / "val" / f"class {label}" / "0.png").unlink()
    arguments = f"--data {folder} --folder {tmp_path / 'run'} --crop 12 --k 2 --epochs 2".split()
    more = ["--batch-size", "6", "--workers", "1", "--strategy", "fsdp", "--devices", "2"]
    more += ["--loss", "smooth"]
    done = subprocess.run(
        [sys.executable, "-m", "topklass.cli", "train", *arguments, *more],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert "sync_dist" not in done.stderr.decode()
    assert done.stdout.decode().count("on the scale of cross-entropy") == 1
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["test"]["micro"]["6"] == 1.0


@pytest.mark.slow
@needs_fsdp_on_cpu
def test_two_processes(tmp_path):
    """The same weights as without pieces, also when continued after a broken checkpoint."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert (tmp_path / "fsdp" / "result.json").exists()
    assert_same_weights(tmp_path / "fsdp", tmp_path / "part")
    for whole, part in (("fsdp", "part"), ("ddp", "ddp-part")):
        for one, other in zip(epochs(tmp_path / whole), epochs(tmp_path / part), strict=True):
            for name in one:
                assert other[name] == pytest.approx(one[name], abs=1e-6), (whole, name)
    plain = weights(tmp_path / "ddp")
    assert plain.keys() == weights(tmp_path / "fsdp").keys()
    for name, value in weights(tmp_path / "fsdp").items():
        torch.testing.assert_close(value, plain[name], atol=1e-4, rtol=1e-4, msg=name)
