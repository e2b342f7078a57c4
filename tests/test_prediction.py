"""Lists of k labels against enumeration, sorted scores, and values worked out by hand."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from test_bad_input import raises
from topklass import predict_topk, topk_marginals
from topklass.prediction import among_first, largest, stable_order

INF = math.inf
METHODS = ["marginals", "softmax"]

every_method = pytest.mark.parametrize("method", METHODS)
every_temperature = pytest.mark.parametrize("temperature", [0.01, 1.0, 5.0])
few_examples = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def crops_of_scores(draw):
    """Some crops of one image, (M, C) in float64; few distinct values, so that there are ties."""
    crops, classes = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    value = st.one_of(st.floats(-20, 20, width=32), st.integers(-3, 3).map(float))
    row = st.lists(value, min_size=classes, max_size=classes)
    rows = draw(st.lists(row, min_size=crops, max_size=crops))
    return torch.tensor(rows, dtype=torch.float64)


def chance_of_membership(scores: list[float], k: int, temperature: float) -> list[float]:
    """Probability of each class to be in a random k-subset, over all subsets (equation 63)."""
    largest = max(scores)
    subsets = list(combinations(range(len(scores)), k))
    weights = [math.exp(sum(scores[i] - largest for i in s) / temperature) for s in subsets]
    total = math.fsum(weights)
    return [
        math.fsum(w for w, s in zip(weights, subsets, strict=True) if i in s) / total
        for i in range(len(scores))
    ]


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# What is predicted


@few_examples
@given(crops_of_scores(), st.sampled_from([1.0, 3.0]))
def test_by_enumeration(logits, temperature):
    for k in range(1, logits.shape[1] + 1):
        rows = [chance_of_membership(row.tolist(), k, temperature) for row in logits]
        expected = torch.tensor(rows, dtype=torch.float64).mean(0)
        found = predict_topk(logits, k, crop_dim=0, temperature=temperature)
        close(found.probabilities, expected.sort(descending=True).values[:k])
        close(expected[found.labels], found.probabilities)
        assert len(set(found.labels.tolist())) == k


@few_examples
@given(crops_of_scores())
def test_softmax_by_hand(logits):
    expected = torch.stack([row.exp() / row.exp().sum() for row in logits]).mean(0)
    for k in range(1, logits.shape[1] + 1):
        found = predict_topk(logits, k, crop_dim=0, method="softmax")
        close(found.probabilities, expected.sort(descending=True).values[:k])
        close(expected[found.labels], found.probabilities)


def test_averages_that_differ():
    """Weights 100, 10, 1 and 3, 1, 2: three subsets of two labels, on paper."""
    logits = torch.tensor([[100.0, 10.0, 1.0], [3.0, 1.0, 2.0]], dtype=torch.float64).log()
    found = predict_topk(logits, 2, crop_dim=0)
    assert found.labels.tolist() == [0, 1]
    first, second = (1100 / 1110 + 9 / 11) / 2, (1010 / 1110 + 5 / 11) / 2
    assert found.probabilities.tolist() == pytest.approx([first, second])
    found = predict_topk(logits, 2, crop_dim=0, method="softmax")
    assert found.labels.tolist() == [0, 2]
    first, second = (100 / 111 + 3 / 6) / 2, (1 / 111 + 2 / 6) / 2
    assert found.probabilities.tolist() == pytest.approx([first, second])


@pytest.mark.parametrize(
    ("k", "spread", "method", "temperature"),
    [
        (1, 1.0, "marginals", 0.01),
        (3, 1e-6, "marginals", 5.0),
        (3, 300.0, "softmax", 0.01),
        (13, 300.0, "marginals", 1.0),
        (13, 1.0, "softmax", 5.0),
        (29, 1e-6, "softmax", 1.0),
        (30, 1.0, "marginals", 1.0),
        (30, 300.0, "marginals", 5.0),
    ],
)
def test_one_crop_is_sorted_scores(k, spread, method, temperature):
    logits = spread * torch.randn(5, 30)
    options = {"method": method, "temperature": temperature}
    found = predict_topk(logits, k, **options)
    assert torch.equal(found.labels, logits.topk(k).indices)
    assert (found.probabilities.diff(dim=-1) <= 1e-6).all()
    again = predict_topk(logits.unsqueeze(1), k, crop_dim=1, **options)
    close(again.probabilities, found.probabilities, 1e-6)


def test_temperature_of_the_smooth_loss():
    """With T = kτ crops are weighed as the loss weighs subsets, and the list may change."""
    logits, k, tau = 6 * torch.randn(200, 4, 12, dtype=torch.float64), 3, 0.5
    at_loss = predict_topk(logits, k, crop_dim=1, temperature=k * tau)
    close(at_loss.probabilities, predict_topk(logits / (k * tau), k, crop_dim=1).probabilities)
    as_printed = predict_topk(logits, k, crop_dim=1)
    sets = [at_loss.labels.sort(-1).values, as_printed.labels.sort(-1).values]
    assert (sets[0] != sets[1]).any()


def test_temperature_far_from_zero():
    """An offset of all scores changes nothing, though it leaves few digits for differences."""
    logits = torch.randint(-8, 8, (6, 3, 10)) / 8
    expected = predict_topk(logits, 3, crop_dim=1, temperature=0.3)
    shifted = predict_topk(logits + 4096, 3, crop_dim=1, temperature=0.3)
    close(shifted.probabilities, expected.probabilities, 1e-6)


# Shapes and precision


@every_method
def test_where_crops_are(method):
    logits = torch.randn(4, 3, 5, 9)
    expected = predict_topk(logits, 2, crop_dim=1, method=method)
    assert expected.labels.shape == expected.probabilities.shape == (4, 5, 2)
    for moved, crops in ((logits, -3), (logits.movedim(1, 0), 0), (logits.movedim(1, 2), -2)):
        found = predict_topk(moved, 2, crop_dim=crops, method=method)
        assert torch.equal(found.labels, expected.labels)
        close(found.probabilities, expected.probabilities, 1e-6)
    one = predict_topk(logits[2, :, 3], 2, crop_dim=0, method=method)
    assert torch.equal(one.labels, expected.labels[2, 3])


@every_method
def test_where_classes_are(method):
    """The list is where the classes were, also if T == C."""
    logits = torch.randn(5, 3, 5, 4).round()  # samples, crops, classes, positions
    expected = predict_topk(logits.movedim(2, -1), 2, crop_dim=1, method=method)
    for source, crop_dim, dim in ((1, 1, 2), (1, -3, -2), (2, 2, 1), (3, 3, 1), (3, -1, -3)):
        moved = logits.movedim(1, source)
        found = predict_topk(moved, 2, dim=dim, crop_dim=crop_dim, method=method)
        assert found.labels.shape == (5, 2, 4)
        assert torch.equal(found.labels, expected.labels.movedim(-1, 1))
        assert torch.equal(found.probabilities, expected.probabilities.movedim(-1, 1))
    alone = predict_topk(logits, 2, dim=2, method=method)
    last = predict_topk(logits.movedim(2, -1), 2, method=method)
    assert torch.equal(alone.labels, last.labels.movedim(-1, 2))


@few_examples
@given(crops_of_scores(), st.booleans())
def test_order_without_a_stable_sort(keys, absent):
    """Two keys, then the index: as two stable sorts put them."""
    keys = keys.round().clamp(-2, 2)
    if absent:
        keys = keys.masked_fill(keys == -2, -INF)
    order = torch.arange(keys.shape[1])
    for key in keys.flip(0):
        order = order[key[order].argsort(descending=True, stable=True)]
    for k in range(1, keys.shape[1] + 1):
        assert torch.equal(largest(k, *keys), order[:k])
        assert among_first(k, *keys).nonzero().squeeze(1).tolist() == sorted(order[:k].tolist())
    assert torch.equal(stable_order(keys), keys.argsort(dim=-1, descending=True, stable=True))


@every_method
@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7), (0, 2, 7)], ids=str)
def test_no_samples(shape, method):
    found = predict_topk(torch.randn(shape), 3, method=method)
    assert found.labels.shape == found.probabilities.shape == (*shape[:-1], 3)
    found = predict_topk(torch.randn(0, 2, 7), 3, crop_dim=1, method=method)
    assert found.labels.shape == (0, 3)


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, method):
    """As in float32: probabilities near 1 would be lost in half precision."""
    logits = (4 * torch.randn(5, 3, 20)).to(dtype)
    found = predict_topk(logits, 4, crop_dim=1, method=method)
    expected = predict_topk(logits.float(), 4, crop_dim=1, method=method)
    assert found.probabilities.dtype == torch.float32
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.probabilities, expected.probabilities)


# Ties, absent classes, NaN


@every_method
@pytest.mark.parametrize("crops", [None, 0])
def test_ties_in_the_order_of_indices(method, crops):
    logits = torch.zeros(2, 40)
    logits[:, [30, 31]] = 1.0
    for k in (5, 29):
        found = predict_topk(logits, k, crop_dim=crops, method=method)
        assert found.labels.reshape(-1, k)[-1].tolist() == [30, 31, *range(k - 2)]


def test_sure_labels_in_the_order_of_their_scores():
    """Probabilities that round to 1 are tied, but the first guess is still the first."""
    logits = torch.tensor([[30.0, 50.0, 40.0, 0.0, 1.0], [45.0, 44.0, 30.0, 1.0, 0.0]])
    found = predict_topk(logits, 3, crop_dim=0)
    assert found.probabilities.tolist() == [1.0, 1.0, 1.0]
    assert found.labels.tolist() == [1, 0, 2]


def test_softmax_far_below_float32():
    logits = torch.tensor([[0.0, 400.0, -200.0, -100.0], [0.0, 400.0, -200.0, -100.0]])
    assert predict_topk(logits, 3, crop_dim=0, method="softmax").labels.tolist() == [1, 0, 3]


@every_method
@every_temperature
def test_absent_classes(method, temperature):
    logits = torch.randn(3, 4, 6)
    logits[..., [0, 2]] = -INF
    for k in range(1, 7):
        found = predict_topk(logits, k, crop_dim=1, method=method, temperature=temperature)
        without = predict_topk(
            logits[..., [1, 3, 4, 5]], min(k, 4), crop_dim=1, method=method, temperature=temperature
        )
        assert torch.equal(found.labels[:, :4], torch.tensor([1, 3, 4, 5])[without.labels])
        close(found.probabilities[:, :4], without.probabilities, 1e-6)
        assert (found.probabilities[:, 4:] == 0).all()


@every_method
def test_absent_in_one_crop(method):
    """Its probability there is 0, and counts in the average."""
    logits = torch.tensor([[2.0, -INF, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    found = predict_topk(logits, 3, crop_dim=0, method=method)
    whole = topk_marginals(logits, 3) if method == "marginals" else logits.softmax(-1)
    close(found.probabilities, whole.mean(0)[found.labels])


@every_method
@every_temperature
def test_no_class_present(method, temperature):
    logits = torch.full((2, 3, 4), -INF)
    found = predict_topk(logits, 2, crop_dim=1, method=method, temperature=temperature)
    assert (found.probabilities == 0).all()


@every_method
def test_nan_stays_in_its_row(method):
    logits = torch.randn(3, 2, 6)
    expected = predict_topk(logits[1:], 2, crop_dim=1, method=method)
    logits[0, 1, 3] = math.nan
    found = predict_topk(logits, 2, crop_dim=1, method=method)
    assert found.probabilities[0].isnan().all()
    assert torch.equal(found.labels[1:], expected.labels)
    assert torch.equal(found.probabilities[1:], expected.probabilities)


# What PyTorch does to functions


@every_method
def test_leaves_logits_alone(method):
    logits = torch.randn(3, 2, 6)
    predict_topk(logits, 2, crop_dim=1, method=method, temperature=2.0)
    assert logits._version == 0


@every_method
def test_gradient_mode(method):
    logits = torch.randn(3, 2, 6, requires_grad=True)
    found = predict_topk(logits, 2, crop_dim=1, method=method)
    (gradient,) = torch.autograd.grad(found.probabilities[:, 0].sum(), logits)
    assert gradient.isfinite().all()
    assert (gradient != 0).any()
    with torch.no_grad():
        assert not predict_topk(logits, 2, crop_dim=1, method=method).probabilities.requires_grad


@every_method
@pytest.mark.parametrize("k", [2, 30])
def test_reads_no_values_off_the_cpu(k, method):
    """Tensors on "meta" have no values: whatever would wait for a device raises."""
    logits = torch.randn(3, 2, k + 4, device="meta")
    found = predict_topk(logits, k, crop_dim=1, method=method, temperature=2.0)
    assert found.labels.shape == (3, k)


@pytest.mark.slow
@every_method
def test_compile(method):
    def predict(logits):
        return predict_topk(logits, 3, crop_dim=1, method=method, temperature=2.0)

    logits = 4 * torch.randn(4, 3, 20)
    torch._dynamo.reset()
    found, expected = torch.compile(predict, fullgraph=True)(logits), predict(logits)
    assert torch.equal(found.labels, expected.labels)
    torch.testing.assert_close(found.probabilities, expected.probabilities)


# Bad input


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_out_of_range(k):
    with raises(ValueError, f"k={k}", "from 1 to 4"):
        predict_topk(torch.randn(3, 4), k)


def test_logits_are_scores():
    with raises(TypeError, "logits", "floating-point", "torch.int64"):
        predict_topk(torch.tensor([1, 2]), 1)
    with raises(ValueError, "logits", "at least one class", "()"):
        predict_topk(torch.tensor(1.0), 1)


def test_unknown_method():
    with raises(ValueError, "method", "marginals, softmax", "'mean'"):
        predict_topk(torch.randn(3, 4), 1, method="mean")


@pytest.mark.parametrize(("crop_dim", "dim"), [(2, -1), (-1, 2), (1, 1), (-2, 1)])
def test_crops_are_not_classes(crop_dim, dim):
    with raises(ValueError, "dimension of the classes", f"crop_dim={crop_dim}", f"dim={dim}"):
        predict_topk(torch.randn(2, 3, 4), 1, crop_dim=crop_dim, dim=dim)


def test_dimensions_out_of_range():
    """As in PyTorch, an IndexError."""
    for crop_dim in (3, -4):
        with raises(IndexError, "from -3 to 2", f"crop_dim={crop_dim}"):
            predict_topk(torch.randn(2, 3, 4), 1, crop_dim=crop_dim)
    for dim in (3, -4):
        with raises(IndexError, "-3", "2", str(dim)):
            predict_topk(torch.randn(2, 3, 4), 1, dim=dim)


@pytest.mark.parametrize("crop_dim", [1.0, "1", True])
def test_crop_dim_is_a_dimension(crop_dim):
    with raises(TypeError, "crop_dim", repr(crop_dim)):
        predict_topk(torch.randn(2, 3, 4), 1, crop_dim=crop_dim)


def test_no_crops():
    with raises(ValueError, "at least one crop", "crop_dim=1"):
        predict_topk(torch.randn(2, 0, 4), 1, crop_dim=1)


@pytest.mark.parametrize(
    ("temperature", "error"),
    [(0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError), (1e-40, ValueError),
     ("1", TypeError), (None, TypeError)],
)  # fmt: skip
def test_temperature_is_positive(temperature, error):
    with raises(error, "temperature", str(temperature)):
        predict_topk(torch.randn(3, 4), 1, temperature=temperature)


def test_ties_of_sure_crops_go_by_the_softmax():
    """Two crops that are sure of lists of five, without a common label: ten labels at one half."""
    logits = torch.zeros(2, 20)
    logits[0, 10:15], logits[1, [2, 3, 15, 16, 17]] = 40.0, 40.0
    logits[0, 13:15] += 5
    found = predict_topk(logits, 5, crop_dim=0)
    assert found.labels.tolist() == [13, 14, 2, 3, 15]
    assert found.probabilities.tolist() == pytest.approx([0.5] * 5)
