"""Classes split over ranks, in two, three and four processes: see ``sharded_cases.py``."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import sharded_cases

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="PyTorch is built without torch.distributed"
)


def rank_of(rank: int, ranks: int, folder: str) -> None:
    """Run all cases; the first error ends all processes, with its traceback."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    for case in (*sharded_cases.LOSSES, *sharded_cases.OTHERS):
        torch.manual_seed(0)
        import time

        t = time.time()
        case()
        if rank == 0:
            print(case.__name__, round(time.time() - t, 2), flush=True)
    sharded_cases.LAST()


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_slice_of_the_classes_gives_what_all_classes_give(ranks, tmp_path):
    torch.multiprocessing.start_processes(
        rank_of, (ranks, str(tmp_path)), ranks, start_method="forkserver"
    )
