"""Metrics over a data set, by hand."""

import math

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from test_bad_input import raises
from topklass.functional import topk_accuracy
from topklass.metrics import AverageKAccuracy, SetCoverage, SetSize, TopKAccuracy

C = 6
nan, inf = math.nan, math.inf

every_average = pytest.mark.parametrize("average", ["micro", "macro", "weighted", "none", None])
METRICS = {
    "top-k, one k": lambda: TopKAccuracy(C, 2),
    "top-k, micro": lambda: TopKAccuracy(C, (1, 3)),
    "top-k, macro": lambda: TopKAccuracy(C, (1, 3), "macro"),
    "top-k, none": lambda: TopKAccuracy(C, (1, 3), None),
    "average-K, one K": lambda: AverageKAccuracy(2),
    "average-K": lambda: AverageKAccuracy((1, 3)),
    "coverage": lambda: SetCoverage(C),
    "coverage, macro": lambda: SetCoverage(C, "macro"),
    "size": SetSize,
}
every_metric = pytest.mark.parametrize("name", METRICS)


def problem(name: str, samples: int = 60) -> tuple[Tensor, Tensor]:
    """Logits with ties, or sets, and targets some of which are ignored."""
    generator = torch.Generator().manual_seed(samples)
    logits = torch.randn(samples, C, generator=generator).mul(2).round()
    target = torch.randint(C, (samples,), generator=generator)
    target[::7] = -100
    return logits > 0 if name.startswith(("coverage", "size")) else logits, target


def same(actual: Tensor | dict[str, Tensor], expected: Tensor | dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def value(metric: Metric, *batches: tuple[Tensor, Tensor]) -> Tensor | dict[str, Tensor]:
    for batch in batches:
        metric.update(*batch)
    return metric.compute()


# Values


@every_average
@pytest.mark.parametrize("shape", [(C,), (50, C), (10, C, 5)], ids=str)
def test_topk_accuracy_is_that_of_the_function(shape, average):
    input = torch.randint(4, shape).float()
    target = torch.randint(C, shape[:0] if len(shape) == 1 else shape[:1] + shape[2:])
    several = value(TopKAccuracy(C, (1, 4, C), average), (input, target))
    expected = topk_accuracy(input, target, (1, 4, C), average=average)
    same(several, {"top1": expected[0], "top4": expected[1], "top6": expected[2]})
    same(value(TopKAccuracy(C, 4, average), (input, target)), expected[1])


def pooled(log_p: Tensor, target: Tensor, k: int) -> float:
    """Average-K accuracy by sorting the scores of all samples."""
    threshold = log_p.flatten().sort(descending=True).values[k * len(log_p) - 1]
    reached = log_p.gather(1, target[:, None]) >= threshold
    return reached.double().mean().item()


def rounded(log_p: Tensor) -> Tensor:
    """Logarithms cut to 14 binary digits, in numbers."""
    mantissa, exponent = torch.frexp(-log_p.double())
    return -torch.ldexp((mantissa * 2**14).floor() / 2**14, exponent)


@pytest.mark.parametrize(
    ("classes", "scale"), [(2, 0.1), (2, 30.0), (5, 0.0), (5, 3.0), (300, 0.1), (300, 3.0)]
)
def test_average_k_by_sorting(classes, scale):
    logits, target = scale * torch.randn(400, classes), torch.randint(classes, (400,))
    target[::2] = logits[::2].argmax(1)
    ks = sorted({1, 2, (classes + 1) // 2, classes - 1, classes})
    result = value(AverageKAccuracy(ks), *zip(logits.split(77), target.split(77), strict=True))
    log_p = logits.log_softmax(1)
    for k in ks:
        assert result[f"average{k}"].item() == pytest.approx(pooled(rounded(log_p), target, k))
        assert abs(result[f"average{k}"].item() - pooled(log_p, target, k)) < 1.5 / 400


def test_average_k_known_values():
    """The ambiguous sample has three labels, the certain one a single one: two on average."""
    logits = torch.tensor([[9.0, 1.0, 0.0, 0.0], [2.1, 2.0, 1.9, -3.0]])
    for target, expected in (([0, 2], 1.0), ([0, 3], 0.5), ([1, 0], 0.5), ([1, 3], 0.0)):
        assert value(AverageKAccuracy(2), (logits, torch.tensor(target))) == expected


def test_average_k_is_better_than_top_k_where_ambiguity_varies():
    logits = torch.randn(500, 20) * torch.linspace(0, 10, 500)[:, None]
    target = logits.softmax(1).multinomial(1).squeeze(1)
    for k in (1, 3, 10):
        average, top = (
            value(AverageKAccuracy(k), (logits, target)),
            topk_accuracy(logits, target, k),
        )
        assert average >= top if k == 1 else average > top


def test_average_k_of_sure_samples():
    """Probabilities that float32 rounds to one, and others far below its smallest number."""
    logits = 1000.0 * torch.eye(C)
    logits[:, -1] -= 1.0
    assert value(AverageKAccuracy(1), (logits, torch.arange(C))) == 1
    assert value(AverageKAccuracy(1), (logits, (torch.arange(C) + 1) % C)) == 0
    assert value(AverageKAccuracy(C), (logits, (torch.arange(C) + 1) % C)) == 1


@pytest.mark.parametrize("bad", [nan, inf])
def test_average_k_without_a_softmax(bad):
    logits, target = torch.zeros(4, C), torch.tensor([0, 1, 2, 3])
    logits[1, 4] = bad
    assert value(AverageKAccuracy(C), (logits, target)) == 0.75


def test_average_k_of_absent_labels():
    logits, target = torch.zeros(4, C), torch.tensor([0, 1, 2, 3])
    logits[:, 3] = -inf
    assert value(AverageKAccuracy(C), (logits, target)) == 0.75
    logits[2] = -inf
    assert value(AverageKAccuracy(C), (logits, target)) == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_average_k_in_other_precisions(dtype):
    logits, target = torch.randn(2000, 50).to(dtype), torch.randint(50, (2000,))
    result = value(AverageKAccuracy((1, 9)), (logits, target))
    log_p = logits.double().log_softmax(1)
    for k in (1, 9):
        assert abs(result[f"average{k}"].item() - pooled(log_p, target, k)) < 1.5 / 2000


@every_average
def test_coverage_by_hand(average):
    sets, target = problem("coverage")
    sets, target = sets[target != C - 1], target[target != C - 1]
    kept = [(s, y) for s, y in zip(sets.tolist(), target.tolist(), strict=True) if y != -100]
    of_class = [[s[y] for s, y in kept if y == c] for c in range(C)]
    result = value(SetCoverage(C, average), (sets, target))
    means = [sum(hits) / len(hits) if hits else nan for hits in of_class]
    expected = {
        "micro": sum(map(sum, of_class)) / sum(map(len, of_class)),
        "macro": sum(means[:-1]) / (C - 1),
        "none": means,
    }
    expected |= {"weighted": expected["micro"], None: means}
    torch.testing.assert_close(result, torch.tensor(expected[average]), equal_nan=True)


def test_size_by_hand():
    sets, target = problem("size")
    kept = [sum(s) for s, y in zip(sets.tolist(), target.tolist(), strict=True) if y != -100]
    assert value(SetSize(), (sets, target)).item() == pytest.approx(sum(kept) / len(kept))


def test_one_set():
    for label, covered in ((1, 1), (2, 0)):
        sets, target = torch.tensor([True, True, False]), torch.tensor(label)
        assert value(SetCoverage(3), (sets, target)) == covered
        assert value(SetSize(), (sets, target)) == 2


# Where the classes are


@pytest.mark.parametrize(
    "make",
    [
        lambda dim: TopKAccuracy(C, (1, 3), dim=dim),
        lambda dim: TopKAccuracy(C, 2, "macro", dim=dim),
        lambda dim: AverageKAccuracy((1, 3), dim=dim),
        lambda dim: SetCoverage(C, dim=dim),
        lambda dim: SetSize(dim=dim),
    ],
    ids=["top-k", "macro", "average-K", "coverage", "size"],
)
def test_dim(make):
    """Sequences as long as there are classes: only ``dim`` tells them apart."""
    logits, target = torch.randn(5, C, C), torch.randint(C, (5, C))
    target[0] = -100
    sets = isinstance(make(1), SetCoverage | SetSize)
    last = logits > 0 if sets else logits
    expected = value(make(1), (last.flatten(0, 1), target.flatten()))
    same(value(make(-1), (last, target)), expected)
    same(value(make(2), (last, target)), expected)
    same(value(make(1), (last.movedim(-1, 1), target)), expected)
    same(value(make(0), (last.movedim(-1, 0), target)), expected)
    same(value(make(-1), (last[1, 2], target[1, 2])), value(make(1), (last[1, 2], target[1, 2])))
    with raises(IndexError, "dim=3", "from -3 to 2"):
        make(3).update(last, target)


def test_default_dimensions():
    """Logits as in cross-entropy; masks as sets return them, classes last."""
    assert TopKAccuracy(C).dim == AverageKAccuracy().dim == 1
    assert SetCoverage(C).dim == SetSize().dim == -1


def test_collection_of_metrics_with_different_dimensions():
    """Equal counts in the first batch; states must not be shared."""
    collection = MetricCollection({"1": TopKAccuracy(2, 1), "2": TopKAccuracy(2, 1, dim=-1)})
    logits, target = torch.zeros(1, 2, 2), torch.tensor([[0, 1]])
    collection.update(logits, target)
    logits[0] = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    collection.update(logits, target)
    assert collection.compute() == {"1": 0.75, "2": 1.0}


# Predicted labels


@every_average
@pytest.mark.parametrize("shape", [(), (50,), (10, 5)], ids=str)
def test_predicted_labels(shape, average):
    target, labels = torch.randint(C - 1, (2, *shape))
    logits = torch.nn.functional.one_hot(labels, C).float()
    if shape:
        target.view(-1)[::3] = -100
    expected = topk_accuracy(logits, target, 1, average, dim=-1)
    same(value(TopKAccuracy(C, 1, average), (labels, target)), expected)
    same(value(TopKAccuracy(C, 1, average), (labels.int(), target)), expected)
    several = value(TopKAccuracy(C, (1,), average), (labels, target))
    same(several, {"top1": expected})


def test_predicted_labels_that_are_no_classes_are_wrong():
    target = torch.tensor([0, 1, C - 1, -100])
    assert value(TopKAccuracy(C, 1), (torch.tensor([-1, 1, C, -100]), target)) == 1 / 3


def test_bad_predicted_labels():
    labels, target = torch.tensor([0, 1]), torch.tensor([0, 1])
    with raises(ValueError, "target's shape (2,)", "(2, 1)"):
        TopKAccuracy(C, 1).update(labels[:, None], target)
    with raises(RuntimeError, "class indices", "torch.float32"):
        TopKAccuracy(C, 1).update(labels, target.float())
    with raises(TypeError, "target", "list"):
        TopKAccuracy(C, 1).update(labels, [0, 1])
    with raises(IndexError, "from 0 to 5", "got 6"):
        TopKAccuracy(C, 1).update(labels, target + 5)
    with raises(ValueError, "pass num_classes"):
        topk_accuracy(labels, target, 1)
    with raises(NotImplementedError, "floating-point", "torch.int64"):
        AverageKAccuracy(1).update(labels, target)
