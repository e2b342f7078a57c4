"""Classes split over two processes that share a GPU, by kernels: see ``sharded_cases.py``."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from cuda_cases import NEEDS_GPU

pytestmark = NEEDS_GPU


def check(rank: int, ranks: int, folder: str) -> None:
    """Run the cases of losses, accuracy and predictions on the GPU; gloo has CUDA tensors, too."""
    import sharded_cases as cases

    store, timeout = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", store, timeout, rank=rank, world_size=ranks)
    torch.set_default_device("cuda")
    for case in cases.CASES:
        if case is not cases.drawn_noise:  # has a generator on the CPU
            torch.manual_seed(0)
            case()
    logits, target = cases.problem(torch.float32)
    target[3] = cases.CLASSES
    target[5] += rank
    loss = cases.sharded_smooth_topk_loss(logits[:, cases.own()], target, reduction="none")
    wrong = (3, 5) if ranks > 1 else (3,)  # no class, and another on each rank
    assert loss.isnan().tolist() == [row in wrong for row in range(cases.ROWS)]
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_slice_of_the_classes_gives_what_all_classes_give(ranks, tmp_path):
    torch.multiprocessing.spawn(check, (ranks, str(tmp_path)), nprocs=ranks)


def check_nccl(rank: int, folder: str) -> None:
    """One rank, so that NCCL carries the messages; those about the call go through gloo."""
    import sharded_cases as cases

    store = f"file://{folder}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", store, rank=rank, world_size=1)
    torch.set_default_device("cuda")
    cases.smooth_losses()
    dist.destroy_process_group()
    dist.init_process_group("nccl", f"{store}2", rank=rank, world_size=1)
    cases.smooth_losses()
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
def test_nccl(tmp_path):
    torch.multiprocessing.spawn(check_nccl, (str(tmp_path),), nprocs=1)
