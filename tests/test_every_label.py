"""Label smoothing and class probabilities in float32: the analytic gradient, block by block.

Float64 goes through plain operations, which ``test_accuracy.py`` proves.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from topklass import use_backend
from topklass._lists import Lists
from topklass.functional import smooth_topk_loss, topk_cross_entropy
from topklass.reference import every_label, every_label_blocks, fused

LOSS, GRADIENT = 1e-6, 5e-6  # as in test_accuracy.py
INF, ROWS = math.inf, 5
LISTS = [
    (smooth_topk_loss, {"k": 1}),
    (smooth_topk_loss, {"k": 5}),
    (smooth_topk_loss, {"k": 5, "tau": 0.01}),
    (smooth_topk_loss, {"k": 6, "tau": 10.0}),
    (smooth_topk_loss, {"k": 7, "tau": 10.0}),
    (smooth_topk_loss, {"k": 10, "tau": 10.0}),
    (topk_cross_entropy, {"k": 4, "margin": 0.5}),
    (topk_cross_entropy, {"k": {1: 0.2, 5: 0.8}}),
    (topk_cross_entropy, {"k": {10: 0.1, 3: 0.9}, "temperature": 2.0}),
]
LONG_LISTS = [
    (smooth_topk_loss, {"k": 11}),
    (smooth_topk_loss, {"k": 20, "tau": 0.01}),
    (topk_cross_entropy, {"k": {1: 0.2, 20: 0.8}}),
    (topk_cross_entropy, {"k": 32, "temperature": 1e4}),
]
LONGER_LISTS = [
    (topk_cross_entropy, {"k": 12, "temperature": 1e-4}),
    (smooth_topk_loss, {"k": 32}),
    (topk_cross_entropy, {"k": {3: 0.9, 50: 0.1}, "temperature": 2.0}),
    (smooth_topk_loss, {"k": 50, "tau": 10.0}),
    (topk_cross_entropy, {"k": 100}),
]


def hard_scores(classes: int, k: int) -> Tensor:
    """Easy scores, and those that break algorithms, some rows of each."""
    place, noise = torch.arange(classes), torch.randn(ROWS, classes)
    kinds = [
        3 * noise,
        1e4 * noise,
        torch.where(place == 2, 200.0, 0.1 * noise),
        torch.zeros(ROWS, classes),
        torch.where(place < k, 0.0, -1e-3).expand(ROWS, -1),
        torch.where(place < k + 2, 0.0, -2e3).expand(ROWS, -1),
        torch.where(place < k + 4, 0.0, -2e3).expand(ROWS, -1),
        torch.where(place < 2 * k, 0.0, -1e-3).expand(ROWS, -1),
    ]
    return torch.cat(kinds)


def targets_of(scores: Tensor) -> dict[str, tuple[Tensor, dict[str, object]]]:
    """Targets with their options; labels among the leaders and in the tail."""
    rows, classes = scores.shape
    labels, weight = torch.arange(rows) * 3 % classes, torch.rand(classes) + 0.5
    chances = torch.softmax(2 * torch.randn(scores.shape), 1)
    few = chances.masked_fill(torch.rand(scores.shape) < 0.7, 0.0)
    return {
        "smoothed": (labels, {"label_smoothing": 0.1}),
        "all smooth": (labels, {"label_smoothing": 1.0, "weight": weight}),
        "weighted": (labels, {"label_smoothing": 0.3, "weight": weight, "ignore_index": 0}),
        "probabilities": (chances, {}),
        "some zero": (few, {"weight": weight, "label_smoothing": 0.0}),
    }


def value_and_gradient(
    loss: Callable[..., Tensor], scores: Tensor, target: Tensor, **options: object
) -> tuple[Tensor, Tensor]:
    leaf = scores.clone().requires_grad_()
    wide = {
        name: value.to(scores.dtype) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    target = target.to(scores.dtype) if target.is_floating_point() else target
    value = loss(leaf, target, **wide)
    outgoing = torch.linspace(-1, 2.1, value.numel(), dtype=value.dtype).reshape(value.shape)
    (gradient,) = torch.autograd.grad(value, leaf, outgoing)
    return value.detach(), gradient


def check(
    loss: Callable[..., Tensor],
    scores: Tensor,
    target: Tensor,
    equal_nan: bool = False,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Float32 against float64, row by row."""
    value, gradient = value_and_gradient(loss, scores, target, **options)
    with use_backend("reference"):
        exact, slope = value_and_gradient(loss, scores.double(), target, **options)
    assert value.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=LOSS, atol=1e-30, equal_nan=equal_nan)
    scale = slope.nan_to_num().norm(dim=1).clamp(min=1e-3)  # uniform chances on ties: nearly 0
    off = (gradient - slope).div(scale.unsqueeze(1))
    expected = torch.zeros_like(off).masked_fill(slope.isnan(), math.nan)
    torch.testing.assert_close(off, expected, rtol=0, atol=GRADIENT, equal_nan=equal_nan)
    return value, gradient


@pytest.mark.parametrize(
    ("loss", "parameters"),
    [*LISTS, *LONG_LISTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONGER_LISTS)],
)
def test_against_float64(loss, parameters):
    """Also if all classes but one are in the list, and if few or many are no leaders."""
    k = parameters["k"]
    longest = k if isinstance(k, int) else max(k)
    for classes in (longest + 1, longest + 2, max(40, 2 * longest + 3)):
        scores = hard_scores(classes, longest)
        for target, options in targets_of(scores).values():
            check(loss, scores, target, reduction="none", **parameters, **options)


@pytest.mark.slow
def test_longest_list():
    scores = hard_scores(600, 256)[::ROWS]
    target, options = targets_of(scores)["weighted"]
    check(topk_cross_entropy, scores, target, reduction="none", k=256, **options)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("kind", ["smoothed", "weighted", "probabilities"])
def test_margins_of_classes_reductions_and_blocks(kind, reduction, monkeypatch):
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", 100)  # two blocks of two rows, and one of one
    monkeypatch.setattr(every_label, "CONSTANTS_ELEMENTS", 80)  # two blocks together, then one
    scores, margin = 3 * torch.randn(ROWS, 50), torch.rand(50)
    scores[:2] *= 1e4  # fewer powers matter than in the second block
    target, options = targets_of(scores)[kind]
    check(smooth_topk_loss, scores, target, k=3, margin=margin, reduction=reduction, **options)


@pytest.mark.parametrize(("loss", "parameters"), LISTS[:2] + LISTS[-2:-1] + LONG_LISTS[2:3])
@pytest.mark.parametrize("present", [2, 6, 30])
def test_absent_classes(loss, parameters, present):
    """A loss of +inf where they count, none where they do not, and no gradient."""
    scores = 3 * torch.randn(ROWS, 40)
    scores[:, present:] = -INF
    for target, options in targets_of(scores).values():
        _, gradient = check(loss, scores, target, reduction="none", **parameters, **options)
        assert not gradient[:, present:].any()
    chances = torch.softmax(scores, 1)
    value, _ = check(loss, scores, chances, reduction="none", **parameters)
    assert value.isfinite().all()


@pytest.mark.parametrize(("loss", "parameters"), LISTS[1:2] + LISTS[-2:-1] + LONG_LISTS[2:3])
def test_rows_with_nan_and_no_rows(loss, parameters):
    scores = torch.randn(ROWS, 40)
    scores[1, 3] = math.nan
    for target, options in targets_of(scores).values():
        options = {"reduction": "none", **parameters, **options}
        value, gradient = check(loss, scores, target, equal_nan=True, **options)
        if not options.get("ignore_index"):
            assert value.isnan().tolist() == [False, True, False, False, False]
            assert gradient[1].isnan().all()
    for target in (torch.zeros(0, dtype=torch.long), torch.zeros(0, 40)):
        options = {"reduction": "sum", "label_smoothing": 0.1, **parameters}
        value, gradient = value_and_gradient(loss, torch.zeros(0, 40), target, **options)
        assert value == 0
        assert gradient.shape == (0, 40)


def test_long_rows_and_half_precision():
    """Rows that are searched chunk by chunk, and scores in bfloat16."""
    scores, target = (3 * torch.randn(2, 4000)).bfloat16(), torch.tensor([3, 3999])
    options = {"k": {1: 0.2, 5: 0.8}, "label_smoothing": 0.1}
    check(topk_cross_entropy, scores.float(), target, **options)
    half, slope = value_and_gradient(topk_cross_entropy, scores, target, **options)
    single, expected = value_and_gradient(topk_cross_entropy, scores.float(), target, **options)
    assert torch.equal(half, single.bfloat16())
    assert torch.equal(slope, expected.bfloat16())


@pytest.mark.parametrize("k", [5, 10, 20])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_terms_that_are_left_out(scale, k):
    """Powers of the tail that are not computed are negligible, and where classes are alike many."""
    lists = Lists((k,), (1.0,), 1.0, 1.0, 0.0)
    scores = scale * torch.randn(ROWS, 300)
    block = every_label.read(scores, 1.0, lists, torch.empty(0))
    u, count = block.u.double(), block.sums.shape[1]
    powers = torch.arange(1, k + 1).view(-1, 1, 1)
    row = every_label.read_rows(block.top.double().t(), (u**powers).sum(2), lists)
    assert (row.h[count:].sum(0) * u.amax(1) ** count).max() < every_label_blocks.NEGLIGIBLE
    few = every_label.read_rows(block.top.double().t(), block.sums.t(), lists)
    torch.testing.assert_close(few.log_first, row.log_first, rtol=0, atol=2e-7)
    assert count < k if scale < 10 and k > 5 else count <= k


def test_higher_derivatives():
    scores, target = torch.randn(2, 6), torch.tensor([0, 4])

    def smoothed(x: Tensor) -> Tensor:
        return topk_cross_entropy(x, target, {1: 0.2, 3: 0.8}, label_smoothing=0.1)

    hessian = torch.autograd.functional.hessian(smoothed, scores)
    exact = torch.autograd.functional.hessian(smoothed, scores.double())
    torch.testing.assert_close(hessian.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("probabilities", [False, True])
def test_target_changed_before_backward(probabilities, create_graph):
    scores, target = torch.randn(2, 6, requires_grad=True), torch.tensor([0, 4])
    target = torch.eye(6)[target] if probabilities else target
    options = {} if probabilities else {"label_smoothing": 0.1}
    value = topk_cross_entropy(scores, target, 3, **options)
    target.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, scores, create_graph=create_graph)


def test_who_is_served(monkeypatch):
    """Longer lists, float64 and mixtures with margins take plain operations."""
    monkeypatch.setattr(every_label, "read", lambda *_: pytest.fail("read"))
    scores, target = torch.randn(2, 300), torch.tensor([0, 4])
    topk_cross_entropy(scores, target, 257, label_smoothing=0.1)
    topk_cross_entropy(scores.double(), target, 5, label_smoothing=0.1)
    topk_cross_entropy(scores, target, {1: 1, 5: 1}, margin=0.1, label_smoothing=0.1)
    with pytest.raises(pytest.fail.Exception):
        topk_cross_entropy(scores, target, {1: 1, 5: 1}, label_smoothing=0.1)
