"""On a CUDA device: the CPU's results, and no waiting for the device."""

from collections.abc import Iterator

import pytest
import torch

import topkit
from losses_table import LOSSES, Loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CLASSES = 300


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def run(loss: Loss, device: str, dtype: torch.dtype, kind: str, k: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    input = (3 * torch.randn(40, CLASSES, generator=generator)).to(device, dtype).requires_grad_()
    target = torch.randint(CLASSES, (40,), generator=generator)
    if kind == "probabilities":
        target = torch.rand(40, CLASSES, generator=generator)
    else:
        target[::7] = -100
    arguments = loss.arguments(CLASSES, k, per_class=True) | loss.fixed(input.shape)
    arguments = {n: to(v, device) for n, v in arguments.items()}
    weight = torch.linspace(0.5, 2, CLASSES, device=device)
    value = loss.function(input, target.to(device), weight=weight, **arguments)
    value.backward()
    return [value.detach().cpu().float(), input.grad.cpu().float()]


def to(value: object, device: str) -> object:
    return value.to(device, torch.float32) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("k", [1, 5, 20, 40])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_same_as_cpu(loss, dtype, kind, k):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    results = zip(run(loss, "cuda", dtype, kind, k), run(loss, "cpu", dtype, kind, k), strict=True)
    values, gradients = results
    # Half precision has ties, which devices may break differently: the gradient of a hinge moves.
    compared = [values, gradients] if loss.smooth or dtype == torch.float32 else [values]
    for ours, reference in compared:
        scale = reference.abs().max()
        torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance * scale.item())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("k", [5, 20, 40])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_no_synchronisation(loss, k, label_smoothing, no_synchronisation):
    input = torch.randn(40, CLASSES, device="cuda", requires_grad=True)
    target = torch.randint(CLASSES, (40,), device="cuda")
    arguments = loss.arguments(CLASSES, k)
    loss.function(input, target, **arguments, label_smoothing=label_smoothing).backward()


@pytest.mark.parametrize("operator", [topkit.log_esp, topkit.topk_marginals, topkit.noised_topk])
@pytest.mark.parametrize("k", [5, 40])
def test_operators_without_synchronisation(operator, k, no_synchronisation):
    scores = torch.randn(8, CLASSES, device="cuda", requires_grad=True)
    operator(scores, k).sum().backward()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_autocast(loss):
    input = torch.randn(8, CLASSES, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(CLASSES, (8,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        value = loss.function(input, target, **loss.arguments(CLASSES))
    assert value.dtype == torch.float32
    value.backward()
    assert input.grad.dtype == torch.bfloat16


def test_a_module_moves_with_its_tensors():
    module = topkit.SmoothTopKLoss(margin=[1.0] * CLASSES, weight=torch.ones(CLASSES)).cuda()
    target = torch.randint(CLASSES, (8,), device="cuda")
    assert module(torch.randn(8, CLASSES, device="cuda"), target).is_cuda
