"""On a CUDA device: the kernel of the expected k-th largest score under noise."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import topklass
from cuda_cases import NEEDS_GPU
from synchronisation import no_synchronisation
from topklass import expected_topk
from topklass.functional import noised_topk_loss

pytestmark = NEEDS_GPU
ROWS: dict[str, Callable[..., Tensor]] = {
    "random": torch.randn,
    "spread": lambda *shape, **options: 5 * torch.randn(*shape, **options),
    "zeros": torch.zeros,
    "two levels": lambda *shape, **options: torch.randint(2, shape, **options) * 4.0,
}
ERROR = 2e-5


def value_and_gradient(function: Callable[[Tensor], Tensor], scores: Tensor):
    leaf = scores.detach().requires_grad_()
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    return value.detach(), gradient


@pytest.mark.parametrize("epsilon", [0.05, 1.0])
@pytest.mark.parametrize("k", [1, 6, 11, 32])
@pytest.mark.parametrize("shape", [(3000, 100), (33, 1001), (4, 33_000)], ids=str)
@pytest.mark.parametrize("kind", ROWS)
def test_error(kind, shape, k, epsilon):
    """Against float64; of rows that programs take one after another, too."""
    scores = ROWS[kind](*shape, device="cuda")

    def operator(s: Tensor) -> Tensor:
        return expected_topk(s, k, epsilon)

    with topklass.use_backend("kernel"):
        value, gradient = value_and_gradient(operator, scores)
    few = slice(None, None, max(1, shape[0] // 16))
    exact, shares = value_and_gradient(operator, scores[few].double())
    torch.testing.assert_close(
        value[few].double(), exact, rtol=1e-6, atol=ERROR * epsilon, check_stride=False
    )
    torch.testing.assert_close(gradient[few].double(), shares, rtol=0, atol=ERROR)
    sums = gradient.sum(1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=ERROR)


def test_largest_problem():
    """More rows than programs, more classes than memory for all of their coefficients."""
    scores = 0.1 * torch.randn(600, 100_000, device="cuda")
    with topklass.use_backend("kernel"):
        value, gradient = value_and_gradient(lambda s: expected_topk(s, 6, 1.0), scores)
    exact = expected_topk(scores[:2].double(), 6, 1.0)
    torch.testing.assert_close(value[:2].double(), exact, rtol=0, atol=ERROR)
    torch.testing.assert_close(gradient.sum(1), torch.ones_like(value), rtol=0, atol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(3000, 100), (33, 1001), (4, 33_000)], ids=str)
@pytest.mark.parametrize("epsilon", [0.2, 1.0])
def test_loss(shape, epsilon, reduction):
    """Against the reference, with all options."""
    rows, classes = shape
    logits = 3 * torch.randn(shape, device="cuda")
    target = torch.randint(classes, (rows,), device="cuda")
    target[::7] = -100
    options = {
        "weight": torch.rand(classes, device="cuda"),
        "margin": torch.rand(classes, device="cuda"),
        "reduction": reduction,
    }
    results = []
    for backend, scores in (("kernel", logits), ("reference", logits.double())):
        with topklass.use_backend(backend):
            results.append(
                value_and_gradient(
                    lambda s: noised_topk_loss(s, target, 5, epsilon, None, scale=2.0, **options),
                    scores,
                )
            )
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-5, atol=4 * ERROR)


def loss(reduction: str = "mean") -> Callable[[Tensor], Tensor]:
    target = torch.arange(64, device="cuda")
    criterion = topklass.NoisedTopKLoss(5, samples=None, reduction=reduction)
    return lambda logits: criterion(2 * logits, target)


def test_nothing_waits_for_the_device():
    function, scores = loss(), torch.randn(64, 300, device="cuda")
    value_and_gradient(function, scores)
    with no_synchronisation():
        value_and_gradient(function, scores)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cuda_graph(reduction):
    function, scores = loss(reduction), torch.randn(64, 300, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            value_and_gradient(function, scores)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = value_and_gradient(function, scores)
    for _ in range(3):
        scores.copy_(torch.randn_like(scores))
        graph.replay()
        for ours, eager in zip(captured, value_and_gradient(function, scores), strict=True):
            assert torch.equal(ours, eager)


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile(reduction):
    function, scores = loss(reduction), torch.randn(64, 300, device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for ours, eager in zip(
        value_and_gradient(compiled, scores), value_and_gradient(function, scores), strict=True
    ):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "function",
    [
        lambda s: expected_topk(s, 6),
        lambda s: noised_topk_loss(s, torch.arange(3000, device="cuda") % 100, 5, samples=None),
    ],
    ids=["operator", "loss"],
)
def test_same_result_every_time(function):
    scores = torch.randn(3000, 100, device="cuda")
    first = value_and_gradient(function, scores)
    again = value_and_gradient(function, scores)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
