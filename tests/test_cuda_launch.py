"""On a CUDA device: how kernels are launched. Streams, CUDA graphs, memory, autocast."""

from collections.abc import Callable

import pytest
import torch

import topklass
from cuda_cases import (
    NEEDS_GPU,
    SHAPES,
    again,
    capture,
    each_loss,
    problem,
    value_and_gradient,
    without_noise,
)
from synchronisation import no_synchronisation

pytestmark = NEEDS_GPU


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@no_synchronisation()
def test_kernels_do_not_synchronise(criterion, reduction, shape):
    logits, target = problem(*shape)
    criterion = again(criterion, reduction=reduction)
    with topklass.use_backend("kernel"):
        value_and_gradient(criterion, logits, target)


@each_loss
def test_cuda_graph(criterion):
    logits, target = problem(64, 1000)
    criterion = without_noise(criterion)
    graph, captured = capture(criterion, logits, target)
    for _ in range(3):
        with torch.no_grad():
            logits.copy_(3 * torch.randn_like(logits))
            target.copy_(torch.randint_like(target, 1000))
        graph.replay()
        expected = value_and_gradient(criterion, logits, target)
        for ours, eager in zip(captured, expected, strict=True):
            assert torch.equal(ours, eager)


def test_a_cuda_graph_draws_new_noise():
    criterion = topklass.NoisedTopKLoss(5, epsilon=1.0, reduction="none")
    logits, target = problem(64, 1000)
    graph, (loss, _) = capture(criterion, logits, target)
    graph.replay()
    first = loss.clone()
    graph.replay()
    assert not torch.equal(loss, first)


@each_loss
def test_streams(criterion):
    """Work waits for what its own stream has to do before, and for nothing else."""
    logits, target = problem(64, 1000)
    criterion = without_noise(criterion)
    expected = value_and_gradient(criterion, logits, target)
    late = torch.zeros_like(logits)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
        late.data.copy_(logits.data)
        ours = value_and_gradient(criterion, late.requires_grad_(), target)
    torch.cuda.current_stream().wait_stream(side)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_under_autocast(criterion, dtype):
    criterion = without_noise(criterion)
    logits, target = problem(64, 1000, dtype)
    with torch.autocast("cuda", dtype=dtype), topklass.use_backend("kernel"):
        loss, gradient = value_and_gradient(criterion, logits, target)
    expected, _ = value_and_gradient(criterion, logits.float(), target)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss, expected)


@each_loss
def test_memory(criterion):
    """One gradient tensor with the gradient, none without."""
    logits, target = problem(2048, 32_000)
    size = logits.numel() * logits.element_size()

    def peak(function: Callable[[], object]) -> float:
        function()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / size

    assert peak(lambda: value_and_gradient(criterion, logits, target)) < 1.1
    with torch.no_grad():
        assert peak(lambda: criterion(logits, target)) < 0.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@each_loss
def test_tensors_of_another_device(criterion):
    criterion = without_noise(criterion)
    logits, target = problem(64, 1000)
    here = value_and_gradient(criterion, logits, target)
    there = value_and_gradient(
        criterion, logits.detach().to("cuda:1").requires_grad_(), target.to("cuda:1")
    )
    assert torch.cuda.current_device() == 0
    for a, b in zip(here, there, strict=True):
        assert b.device.index == 1
        assert torch.equal(a, b.to("cuda:0"))
