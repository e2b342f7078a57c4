"""What the tests on a CUDA device share: problems, losses, errors and CUDA graphs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import topklass
import topklass.functional as TF

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROUNDING = 1.2e-7
"""Of the result to float32, twice."""
TINY = 1e-36
SHAPES = ((256, 100), (64, 1000), (8, 33_000), (2, 1_000_000))
KERNEL_LOSSES = [
    *map(topklass.SmoothTopKLoss, (5, 20, 50)),
    topklass.NoisedTopKLoss(5),
    topklass.TopKCrossEntropyLoss({1: 0.2, 5: 0.8}, label_smoothing=0.1),
]


def name(value: object) -> str:
    """What a parameter is called in the name of a test."""
    if not isinstance(value, nn.Module):
        return str(value)
    k = value.k if isinstance(value.k, int) else "mixture"
    return f"{type(value).__name__}-{k}"


each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_loss = pytest.mark.parametrize("criterion", KERNEL_LOSSES, ids=name)
each_traced_loss = pytest.mark.parametrize(
    "criterion", [*KERNEL_LOSSES, topklass.NoisedTopKLoss(5, samples=None)], ids=name
)


def again(criterion: nn.Module, **options: object) -> nn.Module:
    """The same loss with other options."""
    options["label_smoothing"] = criterion.label_smoothing
    if isinstance(criterion, topklass.NoisedTopKLoss):
        options["samples"] = criterion.samples
    return type(criterion)(criterion.k, **options)


def without_noise(criterion: nn.Module, **options: object) -> nn.Module:
    """The same loss with other options, and the same result in every call."""
    if isinstance(criterion, topklass.NoisedTopKLoss) and criterion.samples is not None:
        options["epsilon"] = 0.0
    return again(criterion, **options)


def problem(rows: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    logits = (3 * torch.randn(rows, n, device="cuda")).to(dtype).requires_grad_()
    return logits, torch.randint(n, (rows,), device="cuda")


def value_and_gradient(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Tensor]:
    value = function(*inputs)
    (gradient,) = torch.autograd.grad(value, inputs[0], torch.ones_like(value))
    return value.detach(), gradient


def smooth(
    logits: Tensor, target: Tensor | topklass.SparseTarget, k: int, tau: float, backend: str
) -> tuple[Tensor, Tensor]:
    with topklass.use_backend(backend):
        return value_and_gradient(
            lambda *inputs: TF.smooth_topk_loss(*inputs, k, tau, reduction="none"),
            logits.detach().requires_grad_(),
            target,
        )


def largest_errors(ours: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> Tensor:
    """Relative errors of loss and gradient, the largest of all rows."""
    (loss, gradient), (exact_loss, exact_gradient) = ours, exact
    losses = (loss - exact_loss).abs() / (exact_loss + TINY)
    gradients = (gradient - exact_gradient).norm(dim=1) / (exact_gradient.norm(dim=1) + TINY)
    return torch.stack([losses.max(), gradients.max()])


def scores_of(kind: str, shape: tuple[int, int], k: int) -> tuple[Tensor, Tensor]:
    """Easy scores, and those that break algorithms; and labels."""
    scores, target = problem(*shape)
    scores = scores.detach()
    if kind == "zero":
        scores = torch.zeros_like(scores)
    elif kind == "ties":  # k ties and the rest just below
        scores = -1e-3 * (torch.rand_like(scores).argsort(1) >= k).float()
    elif kind == "shifted":
        scores = scores + 1000
    return scores, target


each_kind = pytest.mark.parametrize("logits", ["random", "zero", "ties", "shifted"])


def check_error(shape: tuple[int, int], k: int, kind: str) -> None:
    """The error of the smooth loss is at most twice that of the reference."""
    scores, target = scores_of(kind, shape, k)
    for tau in (1.0, 0.01):
        exact = smooth(scores.double(), target, k, tau, "reference")
        kernel, reference = (
            largest_errors(smooth(scores, target, k, tau, backend), exact)
            for backend in ("kernel", "reference")
        )
        assert (kernel <= 2 * reference + ROUNDING).all(), (kernel, reference)


def check_determinism(shape: tuple[int, int], k: int) -> None:
    """The smooth loss gives the same bits every time."""
    scores, target = problem(*shape)
    criterion = topklass.SmoothTopKLoss(k)
    first = value_and_gradient(criterion, scores, target)
    for _ in range(3):
        again = value_and_gradient(criterion, scores, target)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def capture(criterion, logits, target):
    """A CUDA graph of forward and backward pass, and the tensors that it fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            value_and_gradient(criterion, logits, target)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = value_and_gradient(criterion, logits, target)
    return graph, captured
