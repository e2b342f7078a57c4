"""On a CUDA device: every loss gives the CPU's results, and waits for nothing."""

import pytest
import torch
from torch import Tensor

import topklass
from cuda_cases import NEEDS_GPU
from losses_table import LOSSES, Loss
from synchronisation import no_synchronisation

pytestmark = NEEDS_GPU
CLASSES = 300


def run(loss: Loss, device: str, dtype: torch.dtype, kind: str, k: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    input = (3 * torch.randn(40, CLASSES, generator=generator)).to(device, dtype).requires_grad_()
    target = torch.randint(CLASSES, (40,), generator=generator)
    if kind == "probabilities":
        target = torch.rand(40, CLASSES, generator=generator)
    elif kind == "few":
        few = torch.randint(CLASSES, (40, 3), generator=generator)
        shares = torch.rand(40, 3, generator=generator)
        target = topklass.SparseTarget(few.to(device), shares.to(device))
    else:
        target[::7] = -100
    arguments = loss.arguments(CLASSES, k, per_class=True) | loss.fixed(input.shape)
    arguments = {n: to(v, device) for n, v in arguments.items()}
    weight = torch.linspace(0.5, 2, CLASSES, device=device)
    target = target.to(device) if isinstance(target, Tensor) else target
    smoothing = 0.1 if kind == "smoothed" else 0.0
    value = loss.function(input, target, weight=weight, label_smoothing=smoothing, **arguments)
    value.backward()
    return [value.detach().cpu().float(), input.grad.cpu().float()]


def to(value: object, device: str) -> object:
    return value.to(device, torch.float32) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("k", [1, 5, 20, 40])
@pytest.mark.parametrize("kind", ["indices", "smoothed", "probabilities", "few"])
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
def test_no_synchronisation(loss, k, label_smoothing):
    """But for the first call, which makes what later ones share."""
    input = torch.randn(40, CLASSES, device="cuda", requires_grad=True)
    target = torch.randint(CLASSES, (40,), device="cuda")
    few = topklass.SparseTarget(target.unsqueeze(1).expand(40, 2), torch.rand(40, 2, device="cuda"))
    arguments = loss.arguments(CLASSES, k)

    def run() -> None:
        for given in (target, few):
            loss.function(input, given, **arguments, label_smoothing=label_smoothing).backward()

    run()
    with no_synchronisation():
        run()


@pytest.mark.parametrize(
    "operator", [topklass.log_esp, topklass.topk_marginals, topklass.noised_topk]
)
@pytest.mark.parametrize("k", [5, 40])
@no_synchronisation()
def test_operators_without_synchronisation(operator, k):
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
    module = topklass.SmoothTopKLoss(margin=[1.0] * CLASSES, weight=torch.ones(CLASSES)).cuda()
    target = torch.randint(CLASSES, (8,), device="cuda")
    assert module(torch.randn(8, CLASSES, device="cuda"), target).is_cuda
