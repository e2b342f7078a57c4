"""Top-k accuracy against sorting, against torchmetrics, and where scores tie or are missing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from synchronisation import no_synchronisation
from test_bad_input import raises
from topklass.functional import target_rank, topk_accuracy

C = 6
nan, inf = math.nan, math.inf

HALF = [torch.bfloat16, torch.float16]

every_average = pytest.mark.parametrize("average", ["micro", "macro", "weighted", "none", None])
few_examples = settings(max_examples=40, deadline=None, derandomize=True)


def is_right(row: list[float], label: int, k: int) -> bool:
    """Equation 3 by sorting, with nothing to show for NaN and absent classes."""
    if any(math.isnan(s) for s in row) or row[label] == -inf:
        return False
    return not sorted(row, reverse=True)[k - 1] > row[label]


def by_hand(logits: Tensor, target: Tensor, k: int, average: str, ignore_index: int = -100):
    """Row by row and class by class."""
    classes = logits.shape[0 if logits.dim() == 1 else 1]
    rows = logits.movedim(0 if logits.dim() == 1 else 1, -1).reshape(-1, classes).tolist()
    labels = target.reshape(-1).tolist()
    results: dict[int, list[bool]] = {label: [] for label in range(classes)}
    for row, label in zip(rows, labels, strict=True):
        if label != ignore_index:
            results[label].append(is_right(row, label, k))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else nan

    if average in ("micro", "weighted"):
        return mean([right for of_class in results.values() for right in of_class])
    of_classes = [mean(of_class) for of_class in results.values()]
    if average == "macro":
        return mean([value for value in of_classes if not math.isnan(value)])
    return of_classes


def check(logits: Tensor, target: Tensor, average: str = "micro", **options: int) -> None:
    """All k at once and one by one are what is found by hand."""
    classes = logits.shape[0 if logits.dim() == 1 else 1]
    ks = range(1, classes + 1)
    together = topk_accuracy(logits, target, ks, average=average, **options)
    for i, k in enumerate(ks):
        alone = topk_accuracy(logits, target, k, average=average, **options)
        expected = torch.tensor(by_hand(logits, target, k, average, **options))
        torch.testing.assert_close(alone, expected, equal_nan=True)
        torch.testing.assert_close(together[i], alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "average", "ties"),
    [
        ((C,), "micro", True),
        ((C,), None, False),
        ((5, C), "micro", False),
        ((5, C), "macro", True),
        ((5, C), "weighted", True),
        ((5, C), "none", True),
        ((5, C, 3), "micro", True),
        ((5, C, 3), "macro", False),
        ((2, C, 3, 4), "none", False),
        ((2, C, 3, 4), None, True),
        ((0, C), "micro", False),
        ((0, C, 2), "macro", False),
        ((2, C, 0), "none", False),
    ],
    ids=str,
)
def test_by_hand(shape, average, ties):
    logits = torch.randint(3, shape).float() if ties else torch.randn(shape)
    target = torch.randint(C, shape[:0] if len(shape) == 1 else shape[:1] + shape[2:])
    check(logits, target, average)


@every_average
@few_examples
@given(
    rows=st.lists(
        st.lists(st.sampled_from([-inf, -1.0, -0.0, 0.0, 1.0, inf, nan]), min_size=4, max_size=4),
        max_size=5,
    ),
    labels=st.lists(st.sampled_from([0, 1, 2, 3, -100]), min_size=5, max_size=5),
)
def test_any_rows(rows, labels, average):
    logits = torch.tensor(rows).reshape(-1, 4)
    target = torch.tensor(labels[: len(rows)], dtype=torch.long)
    check(logits, target, average)
    accuracy = topk_accuracy(logits, target, range(1, 5), average=average)
    assert not (accuracy.diff(dim=0) < 0).any()


def test_dim():
    """Sequences as long as there are classes: only ``dim`` tells them apart."""
    logits, target = torch.randn(4, C, C), torch.randint(C, (4, C))
    target[0, 0] = -100
    ranks = target_rank(logits.movedim(-1, 1), target)
    accuracy = topk_accuracy(logits.movedim(-1, 1), target, (1, 3), "macro")
    assert not torch.equal(ranks, target_rank(logits, target))
    for moved, dim in ((logits, -1), (logits, 2), (logits.movedim(-1, 0), 0)):
        assert torch.equal(target_rank(moved, target, dim=dim), ranks)
        assert torch.equal(topk_accuracy(moved, target, (1, 3), "macro", dim=dim), accuracy)
    assert target_rank(logits[1, 2], target[1, 2], dim=-1) == ranks[1, 2]
    for dim in (3, -4):
        with raises(IndexError, "from -3 to 2", f"dim={dim}"):
            topk_accuracy(logits, target, 1, dim=dim)


def test_number_of_classes():
    with raises(ValueError, "num_classes=7", "got 6 classes"):
        topk_accuracy(torch.randn(3, C), torch.tensor([0, 1, 2]), 1, num_classes=7)


def test_known_values():
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 4)
    target = torch.tensor([0, 0, 0, 3])
    assert topk_accuracy(logits, target, 1) == 0.75
    assert topk_accuracy(logits, target, 1, average="macro") == 0.5
    of_classes = topk_accuracy(logits, target, (1, 4), average="none")
    expected = torch.tensor([[1.0, nan, nan, 0.0], [1.0, nan, nan, 1.0]])
    torch.testing.assert_close(of_classes, expected, equal_nan=True)
    assert target_rank(logits, target).tolist() == [0, 0, 0, 3]


# Ties, absent classes, NaN


# Targets that do not count


@pytest.mark.parametrize(
    ("shape", "ignore_index", "average"),
    [
        ((40, C), -100, "micro"),
        ((40, C), 2, "none"),
        ((40, C), 255, "macro"),
        ((10, C, 4), -1, "macro"),
        ((10, C, 4), 2, "micro"),
        ((10, C, 4), -100, None),
    ],
    ids=str,
)
def test_ignore_index(shape, ignore_index, average):
    logits, target = torch.randn(shape), torch.randint(C, shape[:1] + shape[2:])
    target.view(-1)[::3] = ignore_index
    check(logits, target, average, ignore_index=ignore_index)
    ignored = target == ignore_index
    assert (target_rank(logits, target, ignore_index=ignore_index)[ignored] == C).all()


@every_average
def test_no_samples(average):
    ignored = torch.full((3,), -100)
    for logits, target in ((torch.randn(0, C), ignored[:0]), (torch.randn(3, C), ignored)):
        assert topk_accuracy(logits, target, (1, C), average=average).isnan().all()


@pytest.mark.parametrize("wrong", [C, 1000, -1])
def test_target_out_of_range(wrong):
    for shape in ((C,), (3, C), (3, C, 2)):
        logits = torch.randn(shape)
        target = torch.zeros(shape[:0] if len(shape) == 1 else shape[:1] + shape[2:]).long()
        target.view(-1)[-1] = wrong
        with raises(IndexError, "target", "from 0 to 5", "ignore_index=-7", str(wrong)):
            topk_accuracy(logits, target, 1, ignore_index=-7)


class Unseen(Tensor):
    """A tensor whose values the library does not look at, as on a GPU."""


@pytest.mark.parametrize("wrong", [C, 10**12, -1])
def test_target_out_of_range_where_nobody_looks(wrong):
    """It is wrong, and nothing outside the scores is read."""
    logits, target = torch.randn(4, C), torch.tensor([0, 1, wrong, -100]).as_subclass(Unseen)
    assert target_rank(logits, target)[2:].tolist() == [C, C]
    torch.testing.assert_close(float(topk_accuracy(logits, target, C)), 2 / 3, rtol=1e-6, atol=0)


def test_vmap():
    logits, target = torch.randn(3, 4, C), torch.randint(C, (3, 4))
    target[0, 1] = -100
    together = torch.vmap(lambda x, y: topk_accuracy(x, y, (1, 3)))(logits, target)
    for i in range(3):
        assert torch.equal(together[i], topk_accuracy(logits[i], target[i], (1, 3)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_integer_targets(dtype):
    logits, target = torch.randn(300, 200), torch.randint(100, (300,))
    target[0] = 100 if dtype == torch.int8 else 156  # −100 in eight bits
    narrow = target.to(dtype)
    assert torch.equal(target_rank(logits, narrow), target_rank(logits, target))
    assert torch.equal(topk_accuracy(logits, narrow, 9), topk_accuracy(logits, target, 9))


# Precision, memory, and what looks at the operations


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_ranks_exactly(dtype):
    logits = (3 * torch.randn(200, 500)).to(dtype)
    target = torch.randint(500, (200,))
    assert all(row.unique().numel() < 500 for row in logits)
    assert torch.equal(target_rank(logits, target), target_rank(logits.double(), target))


def test_neighbouring_scores_are_no_ties():
    one = torch.ones((), dtype=torch.float64)
    logits = torch.stack([one, one.nextafter(2 * one)])
    assert target_rank(logits, torch.tensor(0)) == 1
    assert target_rank(logits, torch.tensor(1)) == 0


def test_many_rows():
    """Several blocks of rows."""
    logits, target = torch.randint(50, (3000, 500)).float(), torch.randint(500, (3000,))
    expected = (logits > logits.gather(1, target[:, None])).sum(1)
    assert torch.equal(target_rank(logits, target), expected)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # PyTorch 2.11 warns of itself
def test_memory():
    """No operation, nor what it calls, allocates as much as the scores take."""
    logits, target = torch.randn(512, 16384), torch.randint(16384, (512,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as operations:
        topk_accuracy(logits, target, (1, 5))
    allocated = [event.self_cpu_memory_usage for event in operations.events()]
    assert 0 < max(allocated) < logits.nbytes / 4


def test_strides_and_gradients():
    logits = torch.randn(C, 5).t().requires_grad_()
    target = torch.randint(C, (5,))
    accuracy = topk_accuracy(logits, target, 2)
    assert not accuracy.requires_grad
    assert accuracy == topk_accuracy(logits.detach().contiguous(), target, 2)


@every_average
def test_no_values_are_read(average):
    """Tensors without values will do: nothing waits for a device."""
    logits, target = torch.randn(50, C, device="meta"), torch.zeros(50, device="meta").long()
    accuracy = topk_accuracy(logits, target, (1, 3), average=average)
    assert accuracy.shape == ((2, C) if average in ("none", None) else (2,))


@pytest.mark.parametrize("average", ["micro", None])
def test_compiled(average):
    logits, target = torch.randn(50, C), torch.randint(C, (50,))
    target[3] = -100
    compiled = torch.compile(
        lambda x, y: topk_accuracy(x, y, (1, 3), average=average),
        fullgraph=True,
        backend="aot_eager",
    )
    expected = topk_accuracy(logits, target, (1, 3), average=average)
    assert torch.equal(compiled(logits, target), expected)


# Bad logits


@pytest.mark.parametrize("k", [0, -1, C + 1, (1, C + 1)])
def test_k_out_of_range(k):
    given = k[-1] if isinstance(k, tuple) else k
    with raises(ValueError, f"k={given}", "from 1 to 6", "number of classes"):
        topk_accuracy(torch.randn(3, C), torch.tensor([0, 1, 2]), k)


@pytest.mark.parametrize("k", [True, 2.0, "2", None, (1, 2.0), torch.tensor([1])])
def test_k_is_an_integer(k):
    with raises(TypeError, "k must be an integer"):
        topk_accuracy(torch.randn(3, C), torch.tensor([0, 1, 2]), k)


def test_no_k():
    with raises(ValueError, "integer or several", "()"):
        topk_accuracy(torch.randn(3, C), torch.tensor([0, 1, 2]), ())


def test_k_of_numpy():
    logits, target = torch.randn(3, C), torch.tensor([0, 1, 2])
    assert topk_accuracy(logits, target, np.int64(2)) == topk_accuracy(logits, target, 2)


def test_unknown_average():
    with raises(ValueError, "micro, macro, weighted, none, None", "'samples'"):
        topk_accuracy(torch.randn(3, C), torch.tensor([0, 1, 2]), 1, average="samples")


@pytest.mark.parametrize("function", [target_rank, topk_accuracy])
def test_input_and_target(function):
    """The types of errors are those of cross-entropy."""
    labels = torch.tensor([0, 1, 2])
    cases = [
        (TypeError, ([1.0, 2.0], labels), ["logits", "list"]),
        (TypeError, (torch.randn(3, C), [0, 1, 2]), ["target", "list"]),
        (ValueError, (torch.randn(3, C), labels[:2]), ["(3,)", "(2,)"]),
        (RuntimeError, (torch.randn(3, C), labels[:, None]), ["(3,)", "(3, 1)", "squeeze"]),
        (RuntimeError, (torch.randn(3, C, 2), labels), ["(3, 2)", "(3,)"]),
        (RuntimeError, (torch.randn(3, C), labels.float()), ["(3, 6)", "(3,)", "long"]),
        (RuntimeError, (torch.randn(3, C), labels > 0), ["class indices", "torch.bool"]),
        (IndexError, (torch.randn(3, C), labels + 4), ["from 0 to 5", "got 6"]),
    ]
    for error, arguments, parts in cases:
        with raises(error, *parts):
            function(*arguments)
        with pytest.raises(error):
            torch.nn.functional.cross_entropy(*arguments)
    with raises(ValueError, "at least one class", "(0, 0)"):
        function(torch.ones(0, 0), labels[:0])
    with raises(TypeError, "class indices", "probabilities", "argmax(1)"):
        function(torch.randn(3, C), torch.rand(3, C))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "average"),
    [(torch.float32, "micro"), (torch.bfloat16, "macro"), (torch.float16, None)],
    ids=str,
)
def test_cuda(dtype, average):
    """The same as on the CPU, without waiting for the device."""
    logits, target = (3 * torch.randn(64, C, 5)).to(dtype), torch.randint(C, (64, 5))
    logits[0, 1], logits[1, 2], target[2] = nan, -inf, -100
    expected = topk_accuracy(logits, target, (1, 3, C), average=average)
    logits, target, unlike = logits.cuda(), target.cuda(), torch.full_like(target, C).cuda()
    with no_synchronisation():
        accuracy = topk_accuracy(logits, target, (1, 3, C), average=average)
        ranks = target_rank(logits, unlike)
    torch.testing.assert_close(accuracy.cpu(), expected, equal_nan=True)
    assert (ranks == C).all()
