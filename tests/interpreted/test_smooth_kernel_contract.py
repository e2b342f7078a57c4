"""The kernels of the smooth loss: options, layouts, derivatives, and who computes."""

import pytest
import torch
from smooth_cases import SPLIT, SPLIT_K, check, problem, run, slow
from torch import Tensor

import topklass
from topklass.functional import smooth_topk_loss

# Options


@pytest.mark.parametrize(
    ("reduction", "weighted", "margin"),
    [
        ("mean", False, 0.0),
        ("mean", True, "per class"),
        ("sum", False, "tensor"),
        ("sum", True, 0.7),
        ("none", False, "per class"),
        ("none", True, 0.7),
    ],
)
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


@pytest.mark.parametrize(("n", "k"), [(100, 5), slow(SPLIT, SPLIT_K)])
@pytest.mark.parametrize("tau", [1e-4, 100.0])
def test_temperatures(tau, n, k):
    check(*problem(2, n), k, tau)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(7, 1), slow(100, 5), slow(1030, 11), slow(70, 40)])
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
    with topklass.use_backend("kernel"), torch.autocast("cpu", dtype=torch.bfloat16):
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
@pytest.mark.parametrize(("rows", "n"), [(3, 40), slow(2, 1031)])
def test_layouts_of_the_logits(layout, rows, n):
    check(layouts(rows, n)[layout], torch.randint(n, (rows,)))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("strided", torch.int32),
        ("expanded", torch.int64),
        ("column", torch.uint8),
        ("misaligned", torch.int64),
    ],
)
def test_layouts_of_the_target(layout, dtype):
    labels = torch.randint(33, (10,), dtype=dtype)
    target = {
        "strided": labels[::2],
        "expanded": labels[:1].expand(5),
        "column": labels.view(5, 2)[:, 1],
        "misaligned": labels[1:6],
    }
    check(problem(5, 33)[0], target[layout], reduction="none")


@pytest.mark.parametrize("shape", [(7,), (2, 7, 3), (2, 7, 3, 2)])
@pytest.mark.parametrize("reduction", [slow("mean"), "none"])
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
    with topklass.use_backend(backend):
        loss = smooth_topk_loss(leaf, target, 3, 0.7, **options)
        (gradient,) = torch.autograd.grad(loss, leaf, outgoing, create_graph=True)
        second = torch.autograd.grad(gradient.square().sum(), (leaf, outgoing))
    return [loss, gradient, *second]


@pytest.mark.parametrize(
    ("reduction", "dtype"),
    [("mean", torch.float32), ("none", torch.float32), slow("sum", torch.bfloat16)],
)
def test_second_derivatives(reduction, dtype):
    results = (derivatives(backend, reduction, dtype) for backend in ("kernel", "reference"))
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == expected.dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours, expected, rtol=8 * eps, atol=8 * eps)


def test_batched_gradients():
    scores, target = problem(3, 9)
    leaf, outgoing = scores.requires_grad_(), torch.randn(4, 3)
    with topklass.use_backend("kernel"):
        loss = smooth_topk_loss(leaf, target, 3, reduction="none")
    (batch,) = torch.autograd.grad(loss, leaf, outgoing, is_grads_batched=True, retain_graph=True)
    for gradient, vector in zip(batch, outgoing, strict=True):
        torch.testing.assert_close(gradient, torch.autograd.grad(loss, leaf, vector, True)[0])


def test_backward_twice():
    scores, target = problem(3, 9)
    leaf = scores.requires_grad_()
    with topklass.use_backend("kernel"):
        loss = smooth_topk_loss(leaf, target, 3)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf, torch.tensor(2.0))
    torch.testing.assert_close(second, 2 * first)


def test_without_gradient():
    scores, target = problem(3, 9)
    expected, _ = run(scores, target, 3)
    with topklass.use_backend("kernel"):
        assert torch.equal(smooth_topk_loss(scores, target, 3), expected)
        with torch.no_grad():
            assert torch.equal(smooth_topk_loss(scores.requires_grad_(), target, 3), expected)
        with torch.inference_mode():
            assert torch.equal(smooth_topk_loss(scores, target, 3), expected)


def test_module():
    scores, target = problem(3, 9)
    module = topklass.SmoothTopKLoss(3, margin=torch.rand(9), weight=torch.rand(9))
    with topklass.use_backend("kernel"):
        loss = module(scores, target)
    torch.testing.assert_close(loss, module(scores, target))


# Who computes


def test_kernels_compute_only_where_they_are_demanded(monkeypatch):
    calls = []

    def recorded(scores: Tensor, *_: object) -> tuple[Tensor, tuple[()]]:
        calls.append(scores)
        return scores.sum(), ()

    monkeypatch.setattr("topklass.kernels.smooth.forward", recorded)
    scores, target = problem(2, 9)
    for backend, expected in (("auto", 0), ("reference", 0), ("kernel", 1)):
        with topklass.use_backend(backend):
            smooth_topk_loss(scores, target, 3)
        assert len(calls) == expected


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func.hessian
def test_torch_func_is_refused_and_otherwise_served():
    scores, target = problem(2, 9)

    def loss(x: Tensor) -> Tensor:
        return smooth_topk_loss(x, target, 3)

    for transformed in (torch.func.grad(loss), torch.func.hessian(loss)):
        with topklass.use_backend("kernel"), pytest.raises(RuntimeError, match="transformed"):
            transformed(scores)
    torch.testing.assert_close(torch.func.grad(loss)(scores), run(scores, target, 3)[1])
