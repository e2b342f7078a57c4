"""The kernels of label smoothing and class probabilities: float64's numbers."""

import math

import pytest
import torch
from smooth_cases import slow

import topklass
from test_every_label import LISTS, ROWS, check, hard_scores, targets_of, value_and_gradient
from topklass.functional import smooth_topk_loss, topk_cross_entropy
from topklass.kernels.every_label.launch import plan_of_lists

INF = math.inf
MIXTURE = (topk_cross_entropy, {"k": {1: 0.2, 5: 0.8}})
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of leaders' u


@pytest.fixture(autouse=True)
def kernels():
    with topklass.use_backend("kernel"):
        yield


def test_short_lists():
    """Labels among the leaders and in the tail, ties, weights, a row that is ignored."""
    scores, target = torch.randn(4, 6).round(), torch.tensor([0, 5, 2, -100])
    options = {"weight": torch.rand(6), "label_smoothing": 0.3, "reduction": "sum"}
    check(topk_cross_entropy, scores, target, k={1: 0.2, 2: 0.8}, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weighted", "some zero"])
@pytest.mark.parametrize(
    ("loss", "parameters", "more"),
    [(*case, (0, 1, 2, 30)[i % 4]) for i, case in enumerate(LISTS)],
)
def test_hard_rows(loss, parameters, more, kind):
    k = parameters["k"]
    longest = k if isinstance(k, int) else max(k)
    scores = hard_scores(longest + 1 + more, longest)[::ROWS]
    target, options = targets_of(scores)[kind]
    check(loss, scores, target, reduction="none", **parameters, **options)


@pytest.mark.slow
def test_rows_in_pieces():
    """Few long rows; every piece has leaders, and ties with the least of them."""
    n = next(n for n in range(2052, 10**5, 2048) if pieces(3, n) > 1)
    scores = 3 * torch.randn(3, n)
    scores[1] = torch.where(torch.arange(n) % 700 == 0, 1.0, 0.0)
    scores[2] = scores[0].sort().values
    target = torch.tensor([5, 700, n - 2])
    check(*MIXTURE[:1], scores, target, reduction="none", label_smoothing=0.1, **MIXTURE[1])


def pieces(rows: int, n: int) -> int:
    return plan_of_lists(rows, n, 1, (1, 5), (0.2, 0.8), False, "none").states.parts


@pytest.mark.parametrize(
    ("reduction", "kind"),
    [("mean", "probabilities"), slow("none", "smoothed"), slow("mean", "weighted")],
)
def test_margins_of_classes_and_reductions(reduction, kind):
    scores, margin = 3 * torch.randn(2, 50), torch.rand(50)
    target, options = targets_of(scores)[kind]
    check(smooth_topk_loss, scores, target, k=2, margin=margin, reduction=reduction, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "present"), [(MIXTURE, 3), (MIXTURE, 8), (LISTS[0], 2), (LISTS[1], 3), (LISTS[1], 12)]
)
def test_absent_classes(case, present):
    loss, parameters = case
    scores = 3 * torch.randn(3, 20)
    scores[:, present:] = -INF
    chances = torch.softmax(scores, 1)
    value, _ = check(loss, scores, chances, reduction="none", **parameters)
    assert value.isfinite().all()
    options = {"label_smoothing": 0.1, "reduction": "none", **parameters}
    value, gradient = check(loss, scores, torch.tensor([0, 1, 19]), **options)
    assert value.tolist() == [INF] * 3
    assert not gradient[:, present:].any()


@pytest.mark.slow
@pytest.mark.parametrize("nan", [math.nan, -math.nan])
@pytest.mark.parametrize("kind", ["smoothed", "some zero"])
def test_rows_with_nan(nan, kind):
    loss, parameters = MIXTURE
    scores = torch.randn(3, 20)
    scores[1, 3] = nan
    target, options = targets_of(scores)[kind]
    options = {"reduction": "none", **parameters, **options}
    value, gradient = check(loss, scores, target, equal_nan=True, **options)
    assert value.isnan().tolist() == [False, True, False]
    assert gradient[1].isnan().all()


@pytest.mark.slow
def test_labels_that_are_no_classes():
    scores, target = torch.randn(2, 9), torch.tensor([9, 0])
    options = {"reduction": "none", "label_smoothing": 0.1}
    value, gradient = value_and_gradient(smooth_topk_loss, scores, target, k=2, **options)
    assert value.isnan().tolist() == [True, False]
    assert gradient.isnan().any(1).tolist() == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_other_layouts(dtype):
    scores, target = (3 * torch.randn(9, 4)).to(dtype).t(), torch.arange(4)
    options = {"label_smoothing": 0.1, **MIXTURE[1]}
    half, slope = value_and_gradient(topk_cross_entropy, scores, target, **options)
    single, expected = value_and_gradient(topk_cross_entropy, scores.float(), target, **options)
    assert torch.equal(half, single.to(dtype))
    assert torch.equal(slope, expected.to(dtype))


@pytest.mark.slow
def test_second_derivatives():
    scores, target = torch.randn(2, 6), torch.tensor([0, 4])
    for given in (target, torch.softmax(scores, 1)):

        def smoothed(x: torch.Tensor, given: torch.Tensor = given) -> torch.Tensor:
            return topk_cross_entropy(x, given, {1: 0.2, 3: 0.8}, label_smoothing=0.1)

        hessian = torch.autograd.functional.hessian(smoothed, scores)
        with topklass.use_backend("reference"):
            expected = torch.autograd.functional.hessian(smoothed, scores)
        torch.testing.assert_close(hessian, expected)
