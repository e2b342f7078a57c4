"""The smooth top-k loss of several positives: derivatives, transformations, precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from contract_cases import value_and_gradient
from multilabel_cases import (
    MASK,
    C,
    as_target,
    every_kind,
    scores_of,
)
from topklass import MultiLabelSmoothTopKLoss
from topklass.functional import multilabel_smooth_topk_loss
from topklass.reference import row_blocks

# PyTorch's own forward mode still uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


# Derivatives and transformations


@pytest.mark.parametrize(("kind", "k"), [("indices", 1), ("bool", 2), ("float", 4), ("indices", 4)])
def test_derivatives(kind, k):
    scores = scores_of(4, C).requires_grad_()
    weight = torch.rand(C, dtype=torch.float64)
    target = as_target(kind)

    def loss(x: Tensor) -> Tensor:
        return multilabel_smooth_topk_loss(x, target, k, 0.6, weight=weight, reduction="none")

    assert gradcheck(loss, scores, check_forward_ad=True)
    assert gradgradcheck(loss, scores)
    torch.testing.assert_close(
        torch.func.jacrev(loss)(scores.detach()),
        torch.autograd.functional.jacobian(loss, scores.detach()),
    )


@pytest.mark.slow
@every_kind
def test_derivatives_of_large_k(kind):
    scores = scores_of(2, 16).requires_grad_()
    mask = F.one_hot(torch.tensor([0, 1]), 16) + F.one_hot(torch.tensor([5, 7]), 16)
    target = {"indices": torch.tensor([[0, 5], [1, 7]]), "bool": mask.bool(), "float": mask.float()}
    assert gradcheck(lambda x: multilabel_smooth_topk_loss(x, target[kind], 13), scores)


@every_kind
def test_margin_and_weight_that_are_learnt(kind):
    scores, target = scores_of(4, C), as_target(kind)
    margin = torch.rand(C, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(C, dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda m, w: multilabel_smooth_topk_loss(scores, target, 2, 1.0, m, weight=w),
        (margin, weight),
    )
    module = MultiLabelSmoothTopKLoss(2, margin=torch.nn.Parameter(margin.detach()))
    module(scores, target).backward()
    assert module.margin.grad.abs().sum() > 0


@every_kind
def test_vmap(kind):
    scores, target = scores_of(4, C), as_target(kind)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return multilabel_smooth_topk_loss(x, y, 2, reduction="sum")

    actual = torch.vmap(torch.func.grad(loss))(scores, target)
    torch.testing.assert_close(actual, torch.func.grad(loss)(scores, target))


@every_kind
def test_blocks_of_rows(kind, monkeypatch):
    """The graph of a large mask is built again block by block."""
    scores, target = scores_of(4, C), as_target(kind)
    options = {"weight": torch.rand(C, dtype=torch.float64), "reduction": "none"}
    expected = value_and_gradient(multilabel_smooth_topk_loss, scores, target, 2, **options)
    monkeypatch.setitem(row_blocks.GRAPH_ELEMENTS, "cpu", 16 * C)
    actual = value_and_gradient(multilabel_smooth_topk_loss, scores, target, 2, **options)
    torch.testing.assert_close(actual, expected)
    margin = torch.ones(C, dtype=torch.float64, requires_grad=True)
    multilabel_smooth_topk_loss(scores.requires_grad_(), target, 2, margin=margin).backward()
    assert (margin.grad > 0).tolist() == MASK.any(0).tolist()


@pytest.mark.filterwarnings("ignore")  # the compiler warns, differently in every version
@pytest.mark.parametrize(
    "kind", ["indices", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bool", "float"))]
)
def test_compile(kind):
    """One graph, with the values and gradients of eager mode."""
    module = MultiLabelSmoothTopKLoss(2, margin=torch.rand(C), weight=torch.rand(C))
    scores = scores_of(4, C, dtype=torch.float32).requires_grad_()
    torch._dynamo.reset()
    value = torch.compile(module, fullgraph=True, backend="aot_eager")(scores, as_target(kind))
    expected = module(scores, as_target(kind))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(
        torch.autograd.grad(value, scores), torch.autograd.grad(expected, scores)
    )


@every_kind
@pytest.mark.parametrize("k", [2, 33])
def test_reads_no_values_off_the_cpu(kind, k):
    scores = torch.empty(3, 40, device="meta", requires_grad=True)
    dtypes = {"indices": torch.long, "bool": torch.bool, "float": torch.float32}
    shape = (3, 5) if kind == "indices" else (3, 40)
    target = torch.empty(shape, dtype=dtypes[kind], device="meta")
    MultiLabelSmoothTopKLoss(k, weight=torch.ones(40)).to("meta")(scores, target).backward()
    assert scores.grad.shape == (3, 40)


# Precision


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_computes_in_float32(kind, dtype):
    scores = scores_of(4, C, dtype=dtype)
    value, gradient = value_and_gradient(
        multilabel_smooth_topk_loss, scores, as_target(kind), 2, reduction="none"
    )
    exact, exact_gradient = value_and_gradient(
        multilabel_smooth_topk_loss, scores.float(), as_target(kind), 2, reduction="none"
    )
    assert value.dtype == gradient.dtype == dtype
    assert torch.equal(value, exact.to(dtype))
    torch.testing.assert_close(gradient, exact_gradient.to(dtype))


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_autocast(kind, dtype):
    scores = scores_of(4, C, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradient = value_and_gradient(
            multilabel_smooth_topk_loss, scores, as_target(kind), 2
        )
    wide = torch.promote_types(dtype, torch.float32)
    assert value.dtype == wide
    assert gradient.dtype == dtype
    torch.testing.assert_close(
        value, multilabel_smooth_topk_loss(scores.to(wide), as_target(kind), 2)
    )
