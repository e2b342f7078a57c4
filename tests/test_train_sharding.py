"""Fully sharded data parallel: the weights of plain data parallel, in whole checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from image_folders import write_folder
from test_train_details import epochs
from test_train_engine import assert_same_weights, weights
from topklass.train import Recipe
from topklass.train.sharding import Sharded, strategy

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard
SCRIPT = """
import os, sys, warnings; warnings.simplefilter("ignore")
from pathlib import Path
import pytest, torch
import test_train_engine as t
from topklass.train import sharding
from topklass.train.processes import disconnect

sharding.PIECE = 1000  # several pieces
folder = Path(sys.argv[1])
plain, sharded = (t.RECIPE.with_changes({"devices": 2, "strategy": s}) for s in ("ddp", "fsdp"))
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


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
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
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
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
            for name in ("train/loss", "train/top1", "train/top2"):
                assert other[name] == pytest.approx(one[name], abs=1e-6)
    plain = weights(tmp_path / "ddp")
    assert plain.keys() == weights(tmp_path / "fsdp").keys()
    for name, value in weights(tmp_path / "fsdp").items():
        torch.testing.assert_close(value, plain[name], atol=1e-4, rtol=1e-4, msg=name)
