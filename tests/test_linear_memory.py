"""Precision and memory of a layer and its loss in one."""

import pytest
import torch
from benchmarks.memory import peak_on_cpu

from linear_cases import CLASSES, LOSSES, ROWS, Layer, differentiate, fused, in_rows, layer, plain
from topklass._checks import Options
from topklass.functional import _chunks, _linear_function
from topklass.functional.smooth import SmoothHinge

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@every_loss
def test_precision(loss, dtype, monkeypatch):
    """In the precision of the parameters, as the layer and the loss one after the other."""
    in_rows(monkeypatch, 3)
    of = layer(rows=20, dtype=dtype)
    value, *gradients = differentiate(fused(loss, of), of)
    assert value.dtype == dtype
    assert all(gradient.dtype == dtype for gradient in gradients)
    expected = differentiate(plain(loss, of), of)
    few = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close((value, *gradients), expected, rtol=few, atol=few / 20)


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
@every_reduction
@pytest.mark.parametrize("rows", [3, 100])
def test_autocast(input_dtype, reduction, rows, monkeypatch):
    """The weight's gradient is in float32, and not rounded to the precision of the product."""
    in_rows(monkeypatch, rows)
    of = layer(dtype=torch.float32)
    of = of._replace(input=of.input.detach().to(input_dtype).requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        value = fused(LOSSES["smooth"], of, reduction=reduction)
        expected = plain(LOSSES["smooth"], of, reduction=reduction)
    assert value.dtype == expected.dtype == torch.float32
    actual, wanted = differentiate(value, of), differentiate(expected, of)
    assert [t.dtype for t in actual] == [t.dtype for t in wanted]
    assert not torch.equal(actual[2], actual[2].bfloat16().float())
    scale = max(1.0, wanted[1].abs().max().item())
    torch.testing.assert_close(actual, wanted, rtol=0.02, atol=0.01 * scale)


def test_autocast_leaves_float64():
    of = layer()
    with torch.autocast("cpu", torch.bfloat16):
        value, expected = fused(LOSSES["smooth"], of), plain(LOSSES["smooth"], of)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("room", "error"), [(2**20, 0.005), (1, 0.05)], ids=["float32", "rounded"])
def test_many_chunks_in_half_precision(room, error, monkeypatch):
    """The weight's gradient is added up in float32 if it fits, else rounded for each chunk."""
    in_rows(monkeypatch, 4)
    of = layer(rows=512, dtype=torch.bfloat16)
    _, _, gradient, _ = differentiate(fused(LOSSES["smooth"], of, chunk_bytes=room), of)
    wide = Layer(*(t.detach().double().requires_grad_() for t in of[:3]), of.target)
    _, _, expected, _ = differentiate(plain(LOSSES["smooth"], wide), wide)
    off = (gradient.double() - expected).norm() / expected.norm()
    assert error / 100 < off < error


def test_small_gradients_in_float16(monkeypatch):
    """A scaled loss saves gradients that float16 could not hold before they are scaled."""
    in_rows(monkeypatch, 16)
    of = layer(rows=64, classes=2000, dtype=torch.float16, bias=False)
    with torch.no_grad():
        of.weight.mul_(0.01)
    value = fused(LOSSES["smooth"], of).float() * 2**14
    _, _, gradient = differentiate(value, of)
    wide = Layer(*(t.detach().double().requires_grad_() for t in of[:2]), None, of.target)
    _, _, expected = differentiate(plain(LOSSES["smooth"], wide) * 2**14, wide)
    torch.testing.assert_close(gradient.double(), expected, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("by_classes", [False, True])
def test_large_sums_in_float16(by_classes, monkeypatch):
    """Sums over rows that float16 cannot hold before they are divided by the number of rows."""
    monkeypatch.setattr(_linear_function, "fewer_bytes", lambda *_: by_classes)
    of = layer(rows=8192, features=4, dtype=torch.float16)
    with torch.no_grad():
        of.input.add_(20)
        of.weight.mul_(0.01)
        of.target.fill_(0)
    wide = Layer(*(t.detach().double().requires_grad_() for t in of[:3]), of.target)
    _, _, *found = differentiate(fused(LOSSES["cross-entropy"], of), of)
    _, _, *expected = differentiate(plain(LOSSES["cross-entropy"], wide), wide)
    for given, wanted in zip(found, expected, strict=True):
        assert (given.double() - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_classes_without_samples_in_float16(autocast, monkeypatch):
    """Their gradient is a sum of thousands of small probabilities."""
    in_rows(monkeypatch, 256)
    dtype = torch.float32 if autocast else torch.float16
    of = layer(rows=1024, classes=70_000, features=2, dtype=dtype, bias=False)
    with torch.no_grad():
        of.weight.mul_(0.01)  # probabilities are about equal, and so are their rounding errors
        of.input.add_(2)
        of.target.remainder_(100)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        value = fused(LOSSES["cross-entropy"], of, chunk_bytes=1)
    _, _, gradient = differentiate(value.float() * 2**10, of)
    wide = Layer(*(t.detach().double().requires_grad_() for t in of[:2]), None, of.target)
    _, _, expected = differentiate(plain(LOSSES["cross-entropy"], wide) * 2**10, wide)
    off = (gradient.double() - expected)[100:].norm() / expected[100:].norm()
    assert off < 0.01


# Memory


@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", ["smooth", "mixture", "smoothed"])
def test_memory(loss, reduction):
    """A chunk's room and the gradients bound what is taken; the logits alone would be more."""
    of = layer(rows=200, classes=2000, features=8, dtype=torch.float32)
    room = 2**19
    options = {"chunk_bytes": room, "reduction": reduction}
    if loss == "smoothed":
        loss, options = "smooth", options | {"label_smoothing": 0.1}
    logits = 200 * 2000 * 4

    def step() -> None:
        fused(LOSSES[loss], of, **options).sum().backward()

    gradients = sum(t.nbytes for t in of[:3])
    taken = peak_on_cpu(step) - gradients
    weight_in_float32 = 2000 * 8 * 4  # copies of small things
    assert taken < room + 4 * weight_in_float32 < logits


def test_rows_of_a_chunk():
    def rows(count: int, chunk_bytes: int, loss: str = "smooth") -> int:
        of = layer(rows=count, classes=1000, dtype=torch.float32)
        parameters = LOSSES[loss].parameters
        found = []
        original = _chunks.chunk_rows
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                _linear_function,
                "chunk_rows",
                lambda *given: found.append(original(*given)) or found[-1],
            )
            LOSSES[loss].fused(
                of.input, of.weight, of.target, **parameters, chunk_bytes=chunk_bytes
            )
        return found[0]

    each = 1000 * (2 * 4 + 4 * 4)
    assert rows(10, 1) == 1
    assert rows(10, 3 * each) == 3
    assert rows(10, 9 * each) == 5
    assert rows(10, 100 * each) == 10
    assert rows(1000, 300 * each) == 256
    assert rows(10, 8 * each, "mixture") == 2


def test_default_room():
    assert _chunks.default_bytes(torch.empty(2, 2)) == 2**29
    many = torch.empty(1, dtype=torch.bfloat16)
    assert _chunks.default_bytes(many.expand(2 * 10**9, 1)) == 7 * 2**28
    assert _chunks.default_bytes(many.expand(128_256, 4096)) == 7 * 128_256 * 1024


@pytest.mark.parametrize(
    ("target", "dtype", "room"),
    [
        ("smoothed", torch.float64, 1728),
        ("probabilities", torch.float64, 1728),
        ("smoothed", torch.float32, 9 * 5 * 4),
        ("probabilities", torch.float32, 9 * 9 * 4),
    ],
)
def test_a_row_that_does_not_fit(target, dtype, room):
    of = layer(dtype=dtype)
    smoothing = 0.1 if target == "smoothed" else 0.0
    if target == "probabilities":
        of = of._replace(target=torch.full((ROWS, CLASSES), 1 / CLASSES, dtype=dtype))
    message = rf"{room} bytes for one row of 9 classes.*chunk_bytes=100"
    with pytest.raises(RuntimeError, match=message):
        fused(LOSSES["smooth"], of, label_smoothing=smoothing, chunk_bytes=100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_memory_of_one_long_row(weighted, dtype):
    """What is charged for label smoothing and class probabilities is what they take."""
    loss, classes = SmoothHinge(5, 1.0, 1.0), 2**18
    options = Options(reduction="none", label_smoothing=0.1)
    scores, target = torch.randn(1, classes).to(dtype), torch.tensor([[3]])
    if weighted:
        target = torch.full((1, classes), 1 / classes)
    taken = peak_on_cpu(lambda: loss.losses_and_gradient(scores, target, options, torch.ones(1)))
    charged = loss.gradient_bytes(scores, target, options) - scores.element_size()
    assert 0.8 * charged < taken / classes < 1.02 * charged
