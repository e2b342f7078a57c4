"""Classes split over ranks, in two, three and four processes.

See ``sharded_cases.py``, ``sharded_messages.py`` and ``mesh_cases.py`` for what is checked.
"""

import re
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import get_context, start_processes

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="PyTorch is built without torch.distributed"
)
# Imported once for all processes.
get_context("forkserver").set_forkserver_preload(
    ["topklass.distributed", "torch.distributed.tensor"]
)


def check(rank: int, ranks: int, folder: str) -> None:
    """Run all cases; the first error ends all processes, with its traceback."""
    import mesh_cases
    import sharded_cases
    import sharded_messages

    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", store, timeout, rank=rank, world_size=ranks)
    for case in (*sharded_cases.CASES, *sharded_messages.CASES, *mesh_cases.CASES):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "DTensor random operators")  # of PyTorch 2.6
            case()
    sharded_messages.LAST()


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_a_slice_of_the_classes_gives_what_all_classes_give(ranks, tmp_path):
    start_processes(check, (ranks, str(tmp_path)), ranks, start_method="forkserver")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_example(ranks):
    options = ["--classes", "3000", "--features", "32", "--steps", "20", "--rate", "200"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    shown = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", "examples/sharded_head.py", *options],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    ).stdout
    own = f"ClassShards(0 to {3000 // ranks - 1} of 3000 classes"
    assert f"3,000 classes, {ranks} processes: {own}" in shown
    accuracy = re.search(r"top-1 (.*), top-5 (.*)", shown)
    assert float(accuracy[1]) > 0.9
    assert float(accuracy[2]) > float(accuracy[1])
