"""The kernels of the smooth loss: extended precision's and the reference's numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import topkit
from oracle import smooth_loss
from test_accuracy import rows as hard_rows
from topkit.functional import smooth_topk_loss
from topkit.kernels.rows import plan
from topkit.reference.limits import LARGEST_K_IN_FLOAT32

TINY = 1e-36  # gradients below it are denormal numbers of float32, or 0
ROUNDING = 1.2e-7  # of the result to float32, twice


def split(k: int) -> int:
    """So many classes that a few rows are divided into pieces."""
    return next(n for n in range(2052, 10**6, 2048) if plan(5, n, k).parts > 1)


SPLIT, SPLIT_K = min((split(k), k) for k in (3, 11, 20))
each_size = pytest.mark.parametrize(("n", "k"), [(8, 3), (1030, 3), (SPLIT, SPLIT_K)])


def run(
    input: Tensor,
    target: Tensor,
    k: int = 5,
    tau: float = 1.0,
    backend: str = "kernel",
    outgoing: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Loss and gradient; the logits keep their layout, and must keep their values."""
    leaf, before = input.detach().requires_grad_(), input.clone()
    with topkit.use_backend(backend):
        loss = smooth_topk_loss(leaf, target, k, tau, **options)
        loss.backward(torch.ones_like(loss) if outgoing is None else outgoing)
    torch.testing.assert_close(input, before, rtol=0, atol=0, equal_nan=True)
    return loss.detach(), leaf.grad


def check(input: Tensor, target: Tensor, k: int = 5, *arguments: object, **options: object) -> None:
    """Kernel and reference agree, to a few roundings of the largest value.

    Both take the powers of small k in float32, whose rounding Newton's identities amplify.
    """
    (loss, gradient), (expected, expected_gradient) = (
        run(input, target, k, *arguments, backend=backend, **options)
        for backend in ("kernel", "reference")
    )
    amplified = 2**k / (k + 1) * torch.finfo(torch.float32).eps if k <= LARGEST_K_IN_FLOAT32 else 0
    tolerance = 2 * torch.finfo(input.dtype).eps + amplified
    assert loss.dtype == expected.dtype
    assert loss.shape == expected.shape
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=1e-30, equal_nan=True)
    assert gradient.dtype == expected_gradient.dtype
    largest = expected_gradient.nan_to_num().abs().max().item()
    torch.testing.assert_close(
        gradient, expected_gradient, rtol=tolerance, atol=tolerance * largest, equal_nan=True
    )


def problem(rows: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (3 * torch.randn(rows, n)).to(dtype), torch.randint(n, (rows,))


# Precision


def errors(scores: np.ndarray, labels: np.ndarray, k: int, tau: float, backend: str) -> np.ndarray:
    """Relative errors (2, R) of losses and gradients."""
    options = {"backend": backend, "reduction": "none"}
    loss, gradient = run(torch.tensor(scores), torch.tensor(labels), k, tau, **options)
    exact = [smooth_loss(row, label, k, tau) for row, label in zip(scores, labels, strict=True)]
    return np.array(
        [
            (
                abs(ours - value) / (value + TINY),
                np.linalg.norm(slope - row) / (np.linalg.norm(row) + TINY),
            )
            for ours, slope, (value, row) in zip(loss.numpy(), gradient.numpy(), exact, strict=True)
        ]
    ).T


def assert_within_budget(scores: np.ndarray, labels: np.ndarray, k: int, tau: float) -> None:
    scores = scores.astype(np.float32)
    kernel, reference = (
        errors(scores, labels, k, tau, backend).max(1) for backend in ("kernel", "reference")
    )
    assert (kernel <= 2 * reference + ROUNDING).all(), (kernel, reference)


@pytest.mark.parametrize(
    ("n", "k", "taus"),
    [
        (2, 1, (100.0, 1.0, 1e-2, 1e-4)),
        (7, 1, (1.0, 1e-3)),
        (3, 2, (10.0, 0.1, 1e-4)),
        (33, 3, (100.0, 1.0, 1e-2)),
        (6, 5, (1.0, 1e-4)),
        (100, 5, (100.0, 1.0, 0.01, 1e-4)),
        (9, 8, (1.0, 0.01)),
        (100, 10, (100.0, 1.0, 1e-3)),
        (12, 11, (1.0, 1e-3)),
        (100, 11, (10.0, 0.1)),
        (21, 20, (1.0,)),
        (100, 20, (1e-2,)),
        (33, 32, (0.1,)),
        (100, 32, (1.0,)),
        (1024, 5, (1.0, 0.01)),
        (1025, 10, (1.0,)),
        (2500, 1, (1.0, 1e-3)),
    ],
)
def test_error_is_at_most_twice_that_of_the_reference(n, k, taus):
    rng = np.random.default_rng(n * 1000 + k)
    scores = np.array(list(hard_rows(n, k, rng)))
    labels = rng.integers(n, size=len(scores))
    for tau in taus:
        assert_within_budget(scores, labels, k, tau)


@pytest.mark.parametrize(("k", "tau"), [(1, 1.0), (10, 0.1), (20, 1.0)])
def test_error_of_rows_in_pieces(k, tau):
    n, rng = split(k), np.random.default_rng(k)
    ascending = np.sort(3 * rng.standard_normal(n))  # the last piece has all the heads
    ties = np.where(np.arange(n) % 700 == 0, 1.0, 0.0)  # every piece has some
    scores, labels = np.array([ascending, ties]), np.array([n - 2, 700])
    assert_within_budget(scores, labels, k, tau)


@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 5000, 32), (2, 5000, 10), (3, 1000, 20), (5, 100, 5), (2, 33, 32)]
)
def test_logits_of_an_untrained_network(rows, n, k):
    """All zero: the largest polynomials there are."""
    assert_within_budget(np.zeros((rows, n)), np.arange(rows), k, 1.0)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 10, 11, 20, 32])
@pytest.mark.parametrize("n", [33, 1025])
def test_every_k(k, n):
    check(*problem(2, n), k)


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("n", [4, 7, 33, 100])
def test_every_shape(rows, n):
    """Tiles of several rows, rows of several tiles, none of them full."""
    check(*problem(rows, n), 3, reduction="none", outgoing=torch.randn(rows))


def test_shift_invariance():
    scores, target = torch.randn(3, 100).mul(8).round() / 8, torch.randint(100, (3,))
    loss, gradient = run(scores, target)
    shifted_loss, shifted_gradient = run(scores + 1024, target)  # exact in float32
    assert torch.equal(shifted_loss, loss)
    assert torch.equal(shifted_gradient, gradient)


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_any_call(data):
    """Random logits and options: what the reference says."""
    n, count = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 3))
    score = st.floats(-50, 50, width=32) | st.sampled_from([0.0, -0.0, 1.0, -math.inf])
    drawn = data.draw(st.lists(score, min_size=n * count, max_size=n * count))
    scores = torch.tensor(drawn).reshape(count, n)
    ignored = data.draw(st.sampled_from([-100, 0]))
    labels = st.integers(0, n - 1) | st.just(ignored)
    target = torch.tensor(data.draw(st.lists(labels, min_size=count, max_size=count)))
    label_scores = scores[range(count), target.clamp(min=0)]
    scores[range(count), target.clamp(min=0)] = label_scores.clamp(min=-50)  # labels are present
    numbers = st.lists(st.floats(0.125, 3, width=32), min_size=n, max_size=n).map(torch.tensor)
    reduction = data.draw(st.sampled_from(["mean", "sum", "none"]))
    outgoing = torch.tensor(data.draw(st.floats(-4, 4, width=32)))
    check(
        scores,
        target,
        k=data.draw(st.integers(1, n - 1)),
        tau=data.draw(st.floats(1e-4, 1e2)),
        margin=data.draw(st.floats(0, 5) | numbers),
        weight=data.draw(st.none() | numbers),
        ignore_index=ignored,
        reduction=reduction,
        outgoing=outgoing.expand(count) if reduction == "none" else outgoing,
    )


# Absent classes, NaN, ignored targets


@each_size
def test_fewer_than_k_rivals_present(n, k):
    """Nothing can push the label off the list."""
    scores = torch.full((2, n), -math.inf)
    present = torch.linspace(1, n - 1, k).long()  # the label and k − 1 rivals
    scores[:, present] = torch.randn(2, k)
    loss, gradient = run(scores, present[:2], k, reduction="none")
    assert torch.equal(loss, torch.zeros(2))
    assert torch.equal(gradient, torch.zeros(2, n))


@each_size
def test_an_absent_label(n, k):
    scores, target = problem(2, n)
    scores[0, target[0]] = -math.inf
    loss, _ = run(scores, target, k, reduction="none")
    assert loss[0] == math.inf
    assert loss[1].isfinite()
    check(scores, target, k, reduction="none")


@pytest.mark.parametrize("n", [8, 1030])
def test_masked_classes(n):
    scores, target = problem(3, n)
    masked = torch.rand(3, n) < 0.4
    masked[range(3), target] = False
    scores[masked] = -math.inf
    check(scores, target, 2)
    _, gradient = run(scores, target, 2)
    assert (gradient[masked] == 0).all()


@pytest.mark.parametrize(
    ("n", "k", "where"),
    [
        *((8, 3, where) for where in ("label", "rival", "last", "negative")),
        (1030, 3, "last"),
        (1030, 3, "negative"),
        (SPLIT, SPLIT_K, "last"),
    ],
)
def test_nan_stays_in_its_row(n, k, where):
    scores, target = problem(3, n)
    target[1] = 2
    column = {"label": 2, "rival": 0, "last": n - 1, "negative": 1}[where]
    scores[1, column] = math.copysign(math.nan, -1.0 if where == "negative" else 1.0)
    loss, gradient = run(scores, target, k, reduction="none")
    assert loss.isnan().tolist() == [False, True, False]
    assert gradient[1].isnan().any()
    good = torch.tensor([0, 2])
    alone, gradient_alone = run(scores[good], target[good], k, reduction="none")
    torch.testing.assert_close(loss[good], alone)
    torch.testing.assert_close(gradient[good], gradient_alone)
    assert run(scores, target, k)[0].isnan()


@pytest.mark.parametrize(
    ("reduction", "n", "k"),
    [("mean", 8, 3), ("sum", 1030, 3), ("none", 1030, 3), ("mean", SPLIT, SPLIT_K)],
)
def test_ignored_targets(reduction, n, k):
    """No loss and no gradient, whatever their logits."""
    scores, target = problem(4, n)
    scores[0, 1] = math.nan
    scores[2] = -math.inf
    target[[0, 2, 3]] = torch.tensor([-100, -100, 5])
    options = {"reduction": reduction}
    loss, gradient = run(scores, target, k, **options)
    expected, expected_gradient = run(scores, target, k, backend="reference", **options)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient[[1, 3]], expected_gradient[[1, 3]])
    assert torch.equal(gradient[[0, 2]], torch.zeros(2, n))
    check(scores[1:], target[1:], k, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_class(reduction):
    scores = problem(4, 9)[0]
    check(scores, torch.tensor([5, 0, 8, 5]), 3, ignore_index=5, reduction=reduction)


def test_ignored_targets_whatever_the_outgoing_gradient():
    scores, target = problem(3, 8)
    target[1] = -100
    outgoing = torch.tensor([1.0, math.inf, 2.0])
    check(scores, target, 3, reduction="none", outgoing=outgoing)
    _, gradient = run(scores, target, 3, reduction="none", outgoing=outgoing)
    assert torch.equal(gradient[1], torch.zeros(8))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_targets_ignored(reduction):
    """As with cross-entropy the mean is NaN, and the gradient 0."""
    scores, target = problem(3, 8)[0], torch.full((3,), -100)
    check(scores, target, 3, reduction=reduction)
    loss, gradient = run(scores, target, 3, reduction=reduction)
    assert loss.isnan() if reduction == "mean" else loss == 0
    assert torch.equal(gradient, torch.zeros(3, 8))


# Options


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("margin", [0.0, 0.7, "per class", "tensor"])
def test_options(reduction, weighted, margin):
    scores, target = problem(5, 33)
    target[3] = -100
    weight = torch.rand(33) if weighted else None
    if margin == "per class":
        margin = torch.rand(33)
    elif margin == "tensor":
        margin = torch.tensor(0.3)
    outgoing = torch.randn(5) if reduction == "none" else torch.tensor(-2.5)
    options = {"margin": margin, "weight": weight, "reduction": reduction}
    check(scores, target, **options, outgoing=outgoing)


@pytest.mark.parametrize("weight", ["strided", "float64", "bfloat16"])
def test_layouts_and_dtypes_of_weight_and_margin(weight):
    scores, target = problem(5, 33)
    tensors = {
        "strided": torch.rand(33, 2)[:, 0],
        "float64": torch.rand(33).double(),
        "bfloat16": torch.rand(33).bfloat16(),
    }
    check(scores, target, weight=tensors[weight], margin=tensors[weight])


def test_weights_of_zero():
    scores, target = problem(4, 8)
    weight = (torch.arange(8) != target[0]).float()
    check(scores, target, 2, weight=weight)
    check(scores, target, 2, weight=weight, reduction="none")


@pytest.mark.parametrize("tau", [1e-4, 1.0, 100.0])
def test_temperatures(tau):
    check(*problem(3, 100), 5, tau)
    check(*problem(1, SPLIT), SPLIT_K, tau)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(7, 1), (100, 5), (1030, 11)])
def test_half_precision_is_computed_in_float32(dtype, n, k):
    """The same numbers as for the logits in float32, rounded once."""
    scores, target = problem(2, n, dtype)
    loss, gradient = run(scores, target, k, reduction="none")
    single, single_gradient = run(scores.float(), target, k, reduction="none")
    assert torch.equal(loss, single.to(dtype))
    assert torch.equal(gradient, single_gradient.to(dtype))
    check(scores, target, k)


def test_autocast():
    scores, target = problem(2, 33, torch.bfloat16)
    leaf = scores.requires_grad_()
    with topkit.use_backend("kernel"), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = smooth_topk_loss(leaf, target)
    loss.backward()
    assert loss.dtype == torch.float32
    assert leaf.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("outgoing", ["random", "expanded", "strided", "zero"])
def test_outgoing_gradients(outgoing):
    gradients = {
        "random": torch.randn(5),
        "expanded": torch.tensor(-1.5).expand(5),
        "strided": torch.randn(5, 3)[:, 1],
        "zero": torch.zeros(5),
    }
    check(*problem(5, 100), reduction="none", outgoing=gradients[outgoing])


# Layouts


def layouts(rows: int, n: int) -> dict[str, Tensor]:
    """Logits that lie in memory in all ways."""
    buffer = torch.randn(rows * 2, n + 3)
    return {
        "transposed": torch.randn(n, rows).T,
        "every other row": torch.randn(2 * rows, n)[::2],
        "every other class": torch.randn(rows, 2 * n)[:, ::2],
        "misaligned": torch.randn(rows * n + 1)[1:].view(rows, n),
        "wide rows": buffer[:rows, 2 : n + 2],
        "one row for all": torch.randn(1, n).expand(rows, n),
        "one number for all": torch.randn(1, 1).expand(rows, n),
        "flipped": torch.randn(rows, n).flip(1),
    }


@pytest.mark.parametrize("layout", layouts(1, 6))
@pytest.mark.parametrize(("rows", "n"), [(3, 100), (2, 1031)])
def test_layouts_of_the_logits(layout, rows, n):
    check(layouts(rows, n)[layout], torch.randint(n, (rows,)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("layout", ["strided", "expanded", "column", "misaligned"])
def test_layouts_of_the_target(layout, dtype):
    labels = torch.randint(33, (10,), dtype=dtype)
    target = {
        "strided": labels[::2],
        "expanded": labels[:1].expand(5),
        "column": labels.view(5, 2)[:, 1],
        "misaligned": labels[1:6],
    }
    check(problem(5, 33)[0], target[layout], reduction="none")


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 7, 3), (2, 7, 3, 2)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_shapes_of_the_input(shape, reduction):
    input = torch.randn(shape)
    expected = shape[:1] * (len(shape) > 1) + shape[2:]
    target = torch.randint(7, expected)
    if target.dim():
        target.view(-1)[0] = -100
    outgoing = torch.randn(expected if reduction == "none" else ())
    check(input, target, 2, reduction=reduction, outgoing=outgoing)
    if len(shape) == 4:
        channels_last = input.to(memory_format=torch.channels_last)
        check(channels_last, target, 2, reduction=reduction, outgoing=outgoing)
        check(input, target.transpose(1, 2).contiguous().transpose(1, 2), 2, reduction=reduction)


# Derivatives


def derivatives(backend: str, reduction: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Loss, gradient, and the derivatives of a function of the gradient."""
    torch.manual_seed(0)
    scores, target = problem(3, 9, dtype)
    target[1] = -100
    leaf, outgoing = scores.requires_grad_(), torch.rand(3 if reduction == "none" else ())
    outgoing = outgoing.to(dtype).requires_grad_()
    options = {"reduction": reduction, "weight": torch.rand(9), "margin": torch.rand(9)}
    with topkit.use_backend(backend):
        loss = smooth_topk_loss(leaf, target, 3, 0.7, **options)
        (gradient,) = torch.autograd.grad(loss, leaf, outgoing, create_graph=True)
        second = torch.autograd.grad(gradient.square().sum(), (leaf, outgoing))
    return [loss, gradient, *second]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives(reduction, dtype):
    results = (derivatives(backend, reduction, dtype) for backend in ("kernel", "reference"))
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == expected.dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours, expected, rtol=8 * eps, atol=8 * eps)


def test_batched_gradients():
    scores, target = problem(3, 9)
    leaf, outgoing = scores.requires_grad_(), torch.randn(4, 3)
    with topkit.use_backend("kernel"):
        loss = smooth_topk_loss(leaf, target, 3, reduction="none")
    (batch,) = torch.autograd.grad(loss, leaf, outgoing, is_grads_batched=True, retain_graph=True)
    for gradient, vector in zip(batch, outgoing, strict=True):
        torch.testing.assert_close(gradient, torch.autograd.grad(loss, leaf, vector, True)[0])


def test_backward_twice():
    scores, target = problem(3, 9)
    leaf = scores.requires_grad_()
    with topkit.use_backend("kernel"):
        loss = smooth_topk_loss(leaf, target, 3)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf, torch.tensor(2.0))
    torch.testing.assert_close(second, 2 * first)


def test_without_gradient():
    scores, target = problem(3, 9)
    expected, _ = run(scores, target, 3)
    with topkit.use_backend("kernel"):
        assert torch.equal(smooth_topk_loss(scores, target, 3), expected)
        with torch.no_grad():
            assert torch.equal(smooth_topk_loss(scores.requires_grad_(), target, 3), expected)
        with torch.inference_mode():
            assert torch.equal(smooth_topk_loss(scores, target, 3), expected)


def test_module():
    scores, target = problem(3, 9)
    module = topkit.SmoothTopKLoss(3, margin=torch.rand(9), weight=torch.rand(9))
    with topkit.use_backend("kernel"):
        loss = module(scores, target)
    torch.testing.assert_close(loss, module(scores, target))


# Who computes


def test_kernels_compute_only_where_they_are_demanded(monkeypatch):
    calls = []

    def recorded(scores: Tensor, *_: object) -> Tensor:
        calls.append(scores)
        return scores.sum()

    monkeypatch.setattr("topkit.kernels.smooth.smooth_loss", recorded)
    scores, target = problem(2, 9)
    for backend, expected in (("auto", 0), ("reference", 0), ("kernel", 1)):
        with topkit.use_backend(backend):
            smooth_topk_loss(scores, target, 3)
        assert len(calls) == expected


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func.hessian
def test_torch_func_is_refused_and_otherwise_served():
    scores, target = problem(2, 9)

    def loss(x: Tensor) -> Tensor:
        return smooth_topk_loss(x, target, 3)

    for transformed in (torch.func.grad(loss), torch.func.hessian(loss)):
        with topkit.use_backend("kernel"), pytest.raises(RuntimeError, match="vmap"):
            transformed(scores)
    torch.testing.assert_close(torch.func.grad(loss)(scores), run(scores, target, 3)[1])
