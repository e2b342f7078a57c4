"""Chunks of classes give what chunks of rows give."""

import math

import pytest
import torch
from benchmarks.memory import peak_on_cpu

from contract_cases import all_pairs
from linear_cases import CLASSES, LOSSES, MARGINS, ROWS, differentiate, fused, layer, plain
from topklass._checks import Options
from topklass.functional import _class_chunks, _linear_function, linear_smooth_topk_loss
from topklass.functional._chunks import Problem
from topklass.functional.smooth import SmoothHinge
from topklass.functional.topk_cross_entropy import ListMixture

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
SMOOTH = LOSSES["smooth"]
OPTIONS = {
    "": {},
    "weight": {"weight": torch.linspace(0, 2, CLASSES, dtype=torch.float64)},
    "margins": {"margin": MARGINS},
    "ignored": {"ignore_index": 2},
}


@pytest.fixture(autouse=True)
def by_class(monkeypatch):
    monkeypatch.setattr(_linear_function, "fewer_bytes", lambda *_: True)


def chunk_of(classes: int, rows: int = ROWS, size: int = 8) -> int:
    """The memory of a chunk with so many classes."""
    return classes * rows * size


def exact(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("loss", "reduction", "options", "classes"),
    all_pairs(LOSSES, ["mean", "sum", "none"], OPTIONS, [1, 2, 4, 100]),
)
def test_value_and_gradients(loss, reduction, options, classes):
    loss, of = LOSSES[loss], layer(bias=classes != 1)
    options = OPTIONS[options] | {"reduction": reduction}
    of.target[:3] = torch.tensor([2, 1, options.get("ignore_index", -100)])
    found = fused(loss, of, **options, chunk_bytes=chunk_of(classes))
    exact(differentiate(found, of), differentiate(plain(loss, of, **options), of))
    with torch.no_grad():
        exact(fused(loss, of, **options, chunk_bytes=chunk_of(classes)), found.detach())


@every_loss
@pytest.mark.parametrize("left", ["input", "weight", "bias"])
def test_one_gradient(loss, left):
    of = layer()
    for name in ("input", "weight", "bias"):
        getattr(of, name).requires_grad_(name == left)
    found = differentiate(fused(loss, of, chunk_bytes=chunk_of(2)), of)
    exact(found, differentiate(plain(loss, of), of))


@every_loss
def test_absent_classes_and_ties(loss):
    of = layer()
    with torch.no_grad():
        of.bias[[0, 4, 5]] = -math.inf
        of.weight[2], of.bias[2] = of.weight[7], of.bias[7]
    of.target[:] = torch.tensor([1, 2, 3, 7, 8, 2, 1])
    found = differentiate(fused(loss, of, chunk_bytes=chunk_of(2)), of)
    exact(found, differentiate(plain(loss, of), of))
    assert all(each.isfinite().all() for each in found)


@every_loss
def test_a_spoilt_row(loss):
    """Loss and gradient of the row are NaN, and nothing else of the input."""
    of = layer(bias=False)
    with torch.no_grad():
        of.input[3, 0] = math.nan
    losses = fused(loss, of, reduction="none", chunk_bytes=chunk_of(2))
    assert losses.isnan().nonzero().tolist() == [[3]]
    (slope,) = torch.autograd.grad(losses.sum(), of.input)
    assert slope.isnan().any(1).nonzero().tolist() == [[3]]
    assert slope[3].isnan().all()


def test_no_rows():
    of = layer(rows=0)
    exact(
        differentiate(fused(SMOOTH, of, reduction="sum", chunk_bytes=9), of),
        differentiate(plain(SMOOTH, of, reduction="sum"), of),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """The gradient of the weight is rounded once, whatever the number of chunks."""
    of = layer(rows=64, classes=500, features=16, dtype=torch.float64, bias=False)
    with torch.no_grad():
        half = of._replace(
            input=of.input.to(dtype).requires_grad_(), weight=of.weight.to(dtype).requires_grad_()
        )
        of.input.copy_(half.input)
        of.weight.copy_(half.weight)
    found = differentiate(fused(SMOOTH, half, chunk_bytes=chunk_of(50, 64, 2)), half)
    wanted = differentiate(plain(SMOOTH, of), of)
    for given, value in zip(found, wanted, strict=True):
        error = (given.double() - value).norm() / value.norm()
        assert error < 4 * torch.finfo(dtype).eps


def test_autocast():
    of = layer(rows=64, classes=500, features=16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = fused(SMOOTH, of, chunk_bytes=chunk_of(50, 64, 2))
    wanted = plain(SMOOTH, of)
    for given, value in zip(differentiate(found, of), differentiate(wanted, of), strict=True):
        assert given.dtype == torch.float32
        assert (given - value).norm() / value.norm() < 0.02


def problem(loss, rows: int, dtype=torch.bfloat16, **options: float) -> Problem:
    targets = torch.zeros(rows, 1, dtype=torch.long)
    return Problem(loss, targets, Options(**options), None, 1.0, dtype, 2**30)


def test_when(monkeypatch):
    """Many classes, of which few rows fit into a chunk; few features; on a GPU."""
    choose = _class_chunks.fewer_bytes
    loss = SmoothHinge(5, 1.0, 1.0)
    few, many = torch.empty(1024, 256), 10**7
    assert not choose(few, many, problem(loss, 1024), 80)  # on a CPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert choose(few, many, problem(loss, 1024), 80)
    assert choose(few, many, problem(ListMixture((1, 5), (0.5, 0.5), 5.0, 0.0), 1024), 80)
    assert not choose(few, many, problem(loss, 1024), 512)
    assert choose(few, 10**6, problem(loss, 1024), 80)
    assert not choose(few, 10**6, problem(loss, 1024), 128)  # little to save
    assert not choose(torch.empty(8192, 4096), many, problem(loss, 8192), 2816)
    assert not choose(torch.empty(8192, 512), many, problem(loss, 8192), 512)
    assert not choose(few, many, problem(loss, 1024, label_smoothing=0.1), 80)
    assert not choose(few, many, problem(SmoothHinge(33, 1.0, 1.0), 1024), 80)
    soft = problem(loss, 1024)._replace(targets=torch.zeros(1024, 10))
    assert not choose(few, many, soft, 80)


@pytest.mark.parametrize("k", [5, 32])
def test_memory(k):
    """That of a chunk, and O(k) numbers of a row, whatever the number of chunks."""
    rows, classes, room = 256, 20_000, 2**20
    of = layer(rows=rows, classes=classes, features=4, dtype=torch.float32, bias=False)

    def step() -> None:
        linear_smooth_topk_loss(of.input, of.weight, of.target, k, chunk_bytes=room).backward()

    taken = peak_on_cpu(step) - of.input.nbytes - of.weight.nbytes
    state = 8 * rows * k * k  # of the losses of rows from their states, and their derivatives
    assert taken < 4 * room + 4 * state < rows * classes * 4
