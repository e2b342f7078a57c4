"""On a CUDA device: a layer and its loss in one, by kernels, in chunks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import topklass
from cuda_cases import NEEDS_GPU
from linear_cases import LOSSES, Layer, Loss, differentiate, fused, layer, plain
from synchronisation import no_synchronisation
from topklass.functional import (
    _linear_function,
    linear_predict_topk,
    linear_smooth_topk_loss,
    linear_topk_cross_entropy,
)

pytestmark = NEEDS_GPU
CASES = LOSSES | {
    "k = 20": LOSSES["smooth"]._replace(parameters={"k": 20}),
    "long list": LOSSES["smooth"]._replace(parameters={"k": 40}),
}
ERROR = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float16: 0.006}


def wide(of: Layer) -> Layer:
    """The same numbers in float64."""
    leaves = (None if t is None else t.detach().double().requires_grad_() for t in of[:3])
    return Layer(*leaves, of.target)


def check(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], error: float) -> None:
    """Relative distance of value and gradients."""
    for one, other in zip(actual, expected, strict=True):
        off = (one.double() - other).norm() / other.norm()
        assert off < error, off


@pytest.mark.parametrize("loss", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("rows", "classes", "chunk"), [(50, 333, 3), (300, 5000, 128), (7, 40_000, 100)], ids=str
)
def test_error(loss, dtype, reduction, rows, classes, chunk, monkeypatch):
    """Against float64, with all options, in chunks and in one."""
    monkeypatch.setattr(_linear_function, "chunk_rows", lambda *_: chunk)
    of = layer(rows, classes, 64, dtype, device="cuda")
    with torch.no_grad():
        of.weight.mul_(0.3)
    of.target[::5] = -100
    options = {
        "reduction": reduction,
        "weight": torch.rand(classes, device="cuda"),
        "margin": torch.rand(classes, device="cuda"),
    }
    exact = wide(of)
    expected = differentiate(plain(loss, exact, **options), exact)
    for by_class in (False, True):
        if by_class and (loss.parameters["k"] == 40 or dtype == torch.float64):
            continue
        monkeypatch.setattr(_linear_function, "fewer_bytes", lambda *_, by_class=by_class: by_class)
        room = rows * (classes // 3) * dtype.itemsize
        actual = differentiate(fused(loss, of, **options, chunk_bytes=room), of)
        check(actual, expected, ERROR[dtype])


@pytest.mark.parametrize("loss", CASES.values(), ids=CASES)
def test_by_kernels(loss):
    """Where kernels serve the loss of logits, they serve it in one with the layer."""
    of = layer(100, 1000, 64, torch.bfloat16, device="cuda")
    with topklass.use_backend("kernel"):
        value = fused(loss, of, chunk_bytes=2**16)
    expected = plain(loss, of)
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("chunk", [64, 10_000])
def test_autocast(chunk, monkeypatch):
    """Parameters in float32 get gradients that are added up, and kept, in float32."""
    monkeypatch.setattr(_linear_function, "chunk_rows", lambda *_: chunk)
    of = layer(1000, 2000, 64, torch.float32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        value = fused(LOSSES["smooth"], of)
        separate = plain(LOSSES["smooth"], of)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, separate, rtol=1e-4, atol=0)
    actual, rounded = differentiate(value, of), differentiate(separate, of)
    assert all(t.dtype == torch.float32 for t in actual)
    exact = wide(of)
    expected = differentiate(plain(LOSSES["smooth"], exact), exact)
    check(actual, expected, 0.02)
    ours, theirs = ((t[2].double() - expected[2]).norm() for t in (actual, rounded))
    assert ours < 1.02 * theirs


@pytest.mark.parametrize("loss", ["smooth", "mixture"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory(loss, reduction, dtype):
    """No more than a chunk beyond inputs and gradients, which the logits alone would exceed."""
    of = layer(1024, 200_000, 64, dtype, bias=False, device="cuda")
    room = 2**26

    def step() -> None:
        of.input.grad = of.weight.grad = None
        fused(LOSSES[loss], of, chunk_bytes=room, reduction=reduction).sum().backward()

    step()
    of.input.grad = of.weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    taken = torch.cuda.max_memory_allocated() - before - of.input.nbytes - of.weight.nbytes
    in_float32 = of.weight.numel() * 4 if dtype != torch.float32 else 0
    sums = in_float32 if in_float32 <= room else 0
    of_slice = 2**24
    assert taken < 1.1 * room + sums + of_slice < 1024 * 200_000 * of.input.element_size()


@pytest.mark.parametrize("loss", ["smooth", "mixture"])
@pytest.mark.parametrize("options", ["", "weight", "none"])
def test_no_synchronisation(loss, options):
    of = layer(64, 3000, 32, torch.bfloat16, device="cuda")
    given = {
        "": {},
        "weight": {"weight": torch.rand(3000, device="cuda")},
        "none": {"reduction": "none"},
    }[options]

    def step() -> None:
        value = fused(LOSSES[loss], of, chunk_bytes=2**17, **given)
        value.backward(torch.ones_like(value))

    step()
    with no_synchronisation():
        step()


def test_ten_million_classes():
    torch.manual_seed(0)
    input = torch.randn(70, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(10_000_000, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(10_000_000, (70,), device="cuda")
    value = linear_smooth_topk_loss(input, weight, target, chunk_bytes=2**29)
    value.backward()
    for rows in (slice(0, 2), slice(68, 70)):
        some = input.detach()[rows].double().requires_grad_()
        logits = F.linear(some, weight.detach().double())
        expected = topklass.functional.smooth_topk_loss(logits, target[rows], reduction="sum") / 70
        (gradient,) = torch.autograd.grad(expected, some)
        check((input.grad[rows],), (gradient,), 0.02)
    losses = linear_smooth_topk_loss(input, weight, target, reduction="none").detach()
    torch.testing.assert_close(losses.float().mean(), value.float(), rtol=0.01, atol=0)
    labels, scores = linear_predict_topk(input, weight, 5)
    logits = F.linear(input[:3].detach(), weight.detach())  # may round otherwise
    torch.testing.assert_close(scores[:3], logits.topk(5).values)
    torch.testing.assert_close(scores[:3], logits.gather(1, labels[:3]))


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_prediction(dtype):
    """Ties in the order of classes, in any number of chunks."""
    input = torch.randint(-2, 3, (300, 4), device="cuda").to(dtype)
    weight = torch.randint(-2, 3, (7000, 4), device="cuda").to(dtype)
    logits = F.linear(input, weight)
    wanted = logits.argsort(dim=1, descending=True, stable=True)[:, :5]
    for chunk_bytes in (2**19, None):
        labels, scores = linear_predict_topk(input, weight, 5, chunk_bytes=chunk_bytes)
        assert torch.equal(labels, wanted)
        assert torch.equal(scores, logits.gather(1, wanted))


@pytest.mark.parametrize("loss", ["smooth", "mixture"])
def test_label_smoothing_and_probabilities(loss):
    of = layer(40, 500, 16, torch.float32, device="cuda")
    exact = wide(of)
    actual = differentiate(fused(LOSSES[loss], of, label_smoothing=0.1, chunk_bytes=2**20), of)
    check(actual, differentiate(plain(LOSSES[loss], exact, label_smoothing=0.1), exact), 1e-4)
    chances = torch.rand(40, 500, device="cuda").softmax(1)
    of = of._replace(target=chances)
    exact = wide(of)._replace(target=chances.double())
    actual = differentiate(fused(LOSSES[loss], of, chunk_bytes=2**20), of)
    check(actual, differentiate(plain(LOSSES[loss], exact), exact), 1e-4)


def test_a_label_that_is_no_class():
    of = layer(20, 300, 16, torch.float32, device="cuda")
    of.target[3] = 300
    losses = fused(LOSSES["smooth"], of, reduction="none")
    assert losses.isnan().nonzero().flatten().tolist() == [3]
    assert fused(LOSSES["smooth"], of).isnan()


def test_scaled_loss_in_float16():
    """The gradient of a mean is not lost before a scaler enlarges it."""
    of = layer(2048, 3000, 64, torch.float16, bias=False, device="cuda")
    with torch.no_grad():
        of.weight.mul_(0.01)
    value = fused(LOSSES["smooth"], of, chunk_bytes=2**21).float() * 2**14
    exact = wide(of)
    expected = plain(LOSSES["smooth"], exact) * 2**14
    check(differentiate(value, of), differentiate(expected, exact), 0.006)


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_compiled():
    of = layer(100, 1000, 64, torch.float32, device="cuda")

    def step(loss: Loss, input: Tensor) -> Tensor:
        return fused(loss, of._replace(input=input.sin()))

    value = torch.compile(step)(LOSSES["smooth"], of.input)
    expected = plain(LOSSES["smooth"], of._replace(input=of.input.sin()))
    torch.testing.assert_close(
        differentiate(value, of), differentiate(expected, of), rtol=1e-4, atol=1e-6
    )


def test_cuda_graph():
    """Captured and replayed: nothing depends on the host."""
    of = layer(64, 1000, 32, torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            of.input.grad = of.weight.grad = of.bias.grad = None
            fused(LOSSES["smooth"], of, chunk_bytes=2**16).backward()
    torch.cuda.current_stream().wait_stream(stream)
    of.input.grad = of.weight.grad = of.bias.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = fused(LOSSES["smooth"], of, chunk_bytes=2**16)
        value.backward()
    with torch.no_grad():
        of.input.copy_(torch.randn_like(of.input))
    graph.replay()
    captured = value.detach().clone(), of.input.grad.clone(), of.weight.grad.clone()
    del value  # and the graph, whose leaves belong to the other stream
    of.input.grad = of.weight.grad = None
    fresh = fused(LOSSES["smooth"], of, chunk_bytes=2**16)
    fresh.backward()
    torch.testing.assert_close(captured, (fresh.detach(), of.input.grad, of.weight.grad))


@pytest.mark.parametrize("name", ["margin", "weight"])
def test_tensors_on_another_device(name):
    of = layer(10, 30, 8, torch.float32, device="cuda")
    with pytest.raises(RuntimeError, match=f"{name} is on cpu"):
        linear_topk_cross_entropy(of.input, of.weight, of.target, 3, **{name: torch.ones(30)})
