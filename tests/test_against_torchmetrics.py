"""Each line of docs/metrics.md: where accuracy equals torchmetrics, and where it differs."""

import math

import pytest
import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.functional.classification import multiclass_accuracy

from test_bad_input import raises
from topklass.functional import topk_accuracy
from topklass.metrics import TopKAccuracy

C = 10
NAN, INF = math.nan, math.inf

every_average = pytest.mark.parametrize("average", ["micro", "macro", "weighted", "none", None])


def problem(*shape: int) -> tuple[Tensor, Tensor]:
    """Logits without ties, and targets with all classes."""
    logits, target = torch.randn(300, C, *shape), torch.randint(C, (300, *shape))
    assert target.unique().numel() == C
    assert all(row.unique().numel() == C for row in logits.movedim(1, -1).reshape(-1, C))
    return logits, target


def both(logits: Tensor, target: Tensor, k: int, average: str | None, **options: int):
    """Accuracies of topklass and of torchmetrics, by their functions; the metrics agree."""
    ours = topk_accuracy(logits, target, k, average, num_classes=C, **options)
    theirs = multiclass_accuracy(logits, target, C, average, top_k=k, **options)
    metrics = MetricCollection(
        {
            "ours": TopKAccuracy(C, k, average, **options),
            "theirs": MulticlassAccuracy(C, k, average, **options),
        }
    )
    for rows in torch.arange(len(target)).chunk(3):
        metrics.update(logits[rows], target[rows])
    for name, expected in {"ours": ours, "theirs": theirs}.items():
        torch.testing.assert_close(metrics.compute()[name], expected, equal_nan=True)
    return ours, theirs


# Equal


@every_average
@pytest.mark.parametrize("k", [1, 3, C - 1])
def test_equal(k, average):
    ours, theirs = both(*problem(), k, average)
    torch.testing.assert_close(ours, theirs)
    assert 0 < ours.mean() < 1


@every_average
def test_equal_for_predicted_labels(average):
    logits, target = problem()
    ours, theirs = both(logits.argmax(1), target, 1, average)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours, topk_accuracy(logits, target, 1, average))


@every_average
@pytest.mark.parametrize("ignore_index", [-100, -1])
def test_equal_with_ignored_targets(average, ignore_index):
    logits, target = problem(4)
    target[::3] = ignore_index
    torch.testing.assert_close(*both(logits, target, 3, average, ignore_index=ignore_index))
    labels = logits.argmax(1)
    torch.testing.assert_close(*both(labels, target, 1, average, ignore_index=ignore_index))


def test_defaults():
    logits, target = problem()
    target[::2] = -100
    kept = target != -100
    micro, macro = (topk_accuracy(logits[kept], target[kept], 1, a) for a in ("micro", "macro"))
    assert micro != macro
    assert topk_accuracy(logits, target, 1) == micro
    torch.testing.assert_close(multiclass_accuracy(logits[kept], target[kept], C), macro)
    counted = multiclass_accuracy(logits, target, C, average="micro")
    torch.testing.assert_close(counted, micro * kept.float().mean())


# Different


@pytest.mark.parametrize("k", [1, 3])
def test_ties(k):
    _, target = problem()
    ours, theirs = both(torch.zeros(300, C), target, k, "micro")
    assert ours == 1
    listed = torch.zeros(300, C).topk(k, 1).indices if k > 1 else torch.zeros(300, 1).long()
    torch.testing.assert_close(theirs, (listed == target[:, None]).any(1).float().mean())


def test_nan():
    logits, _ = problem()
    logits[:, 3] = NAN
    ours, theirs = both(logits, torch.full((300,), 3), 1, "micro")
    assert (ours, theirs) == (0, 1)
    ours, theirs = both(logits, logits.nan_to_num(-INF).argmax(1), 2, "micro")
    assert (ours, theirs) == (0, 1)


def test_absent_labels():
    logits, target = problem()
    logits.scatter_(1, target[:, None], -INF)
    ours, theirs = both(logits, target, C, "micro")
    assert (ours, theirs) == (0, 1)


def test_macro_of_classes_without_samples():
    logits, target = problem()
    target %= 5
    ours, theirs = both(logits, target, 1, "macro")
    of_classes = topk_accuracy(logits, target, 1, "none")[:5]
    torch.testing.assert_close(ours, of_classes.mean())
    torch.testing.assert_close(theirs, of_classes.sum() / C)
    logits[:, 5:] = -9  # never predicted
    torch.testing.assert_close(*both(logits, target, 1, "macro"))


@pytest.mark.parametrize("average", ["none", None])
def test_none_of_classes_without_samples(average):
    logits, target = problem()
    ours, theirs = both(logits, target % 5, 1, average)
    torch.testing.assert_close(ours[:5], theirs[:5])
    assert ours[5:].isnan().all()
    assert (theirs[5:] == 0).all()


@every_average
@pytest.mark.parametrize("k", [1, 3])
def test_nothing_to_average(k, average):
    logits, _ = problem()
    ours, theirs = both(logits, torch.full((300,), -100), k, average, ignore_index=-100)
    assert ours.isnan().all()
    assert (theirs == 0).all()
    empty, no_target = torch.randn(0, C), torch.zeros(0).long()
    assert topk_accuracy(empty, no_target, k, average).isnan().all()
    with pytest.raises(RuntimeError, match="cannot reshape"):
        multiclass_accuracy(empty, no_target, C, average, top_k=k)


def test_predicted_labels_are_lists_of_one():
    logits, target = problem()
    with raises(ValueError, "predicted labels", "k=1", "got k=3"):
        topk_accuracy(logits.argmax(1), target, 3, num_classes=C)
    with raises(ValueError, "predicted labels", "k=1", "got k=(1, 5)"):
        TopKAccuracy(C).update(logits.argmax(1), target)
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        multiclass_accuracy(logits.argmax(1), target, C, top_k=3)


def test_names_of_arguments():
    """By position in a collection with metrics of torchmetrics."""
    logits, target = problem()
    collection = MetricCollection([TopKAccuracy(C, 1), MulticlassAccuracy(C, average="micro")])
    values = collection(logits, target)
    torch.testing.assert_close(values["TopKAccuracy"], values["MulticlassAccuracy"])
