"""Top-k accuracy against sorting, against torchmetrics, and where scores tie or are missing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torchmetrics.functional.classification import multiclass_accuracy

import topklass
from synchronisation import no_synchronisation
from test_bad_input import raises
from topklass.functional import target_rank, topk_accuracy

C = 6
nan, inf = math.nan, math.inf

HALF = [torch.bfloat16, torch.float16]
SHAPES = [(C,), (5, C), (5, C, 3), (2, C, 3, 4), (0, C), (0, C, 2), (2, C, 0)]

every_average = pytest.mark.parametrize("average", ["micro", "macro", "none"])
few_examples = settings(max_examples=100, deadline=None, derandomize=True)


def is_right(row: list[float], label: int, k: int) -> bool:
    """Equation 3 by sorting, with nothing to show for NaN and absent classes."""
    if any(math.isnan(s) for s in row) or row[label] == -inf:
        return False
    return not sorted(row, reverse=True)[k - 1] > row[label]


def by_hand(input: Tensor, target: Tensor, k: int, average: str, ignore_index: int = -100):
    """Row by row and class by class."""
    classes = input.shape[0 if input.dim() == 1 else 1]
    rows = input.movedim(0 if input.dim() == 1 else 1, -1).reshape(-1, classes).tolist()
    labels = target.reshape(-1).tolist()
    results: dict[int, list[bool]] = {label: [] for label in range(classes)}
    for row, label in zip(rows, labels, strict=True):
        if label != ignore_index:
            results[label].append(is_right(row, label, k))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else nan

    if average == "micro":
        return mean([right for of_class in results.values() for right in of_class])
    of_classes = [mean(of_class) for of_class in results.values()]
    if average == "macro":
        return mean([value for value in of_classes if not math.isnan(value)])
    return of_classes


def check(input: Tensor, target: Tensor, average: str = "micro", **options: int) -> None:
    """All k at once and one by one are what is found by hand."""
    classes = input.shape[0 if input.dim() == 1 else 1]
    ks = range(1, classes + 1)
    together = topk_accuracy(input, target, ks, average=average, **options)
    for i, k in enumerate(ks):
        alone = topk_accuracy(input, target, k, average=average, **options)
        expected = torch.tensor(by_hand(input, target, k, average, **options))
        torch.testing.assert_close(alone, expected, equal_nan=True)
        torch.testing.assert_close(together[i], alone, rtol=0, atol=0, equal_nan=True)


@every_average
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_by_hand(shape, ties, average):
    input = torch.randint(3, shape).float() if ties else torch.randn(shape)
    target = torch.randint(C, shape[:0] if len(shape) == 1 else shape[:1] + shape[2:])
    check(input, target, average)


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
    input = torch.tensor(rows).reshape(-1, 4)
    target = torch.tensor(labels[: len(rows)], dtype=torch.long)
    check(input, target, average)
    accuracy = topk_accuracy(input, target, range(1, 5), average=average)
    assert not (accuracy.diff(dim=0) < 0).any()


@pytest.mark.parametrize("k", [1, 3, 10, 99])
def test_of_torchmetrics(k):
    input, target = torch.rand(300, 100), torch.randint(100, (300,))
    for row in input:
        assert row.unique().numel() == 100
    expected = multiclass_accuracy(input, target, 100, average="micro", top_k=k)
    torch.testing.assert_close(topk_accuracy(input, target, k), expected)


def test_known_values():
    input = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 4)
    target = torch.tensor([0, 0, 0, 3])
    assert topk_accuracy(input, target, 1) == 0.75
    assert topk_accuracy(input, target, 1, average="macro") == 0.5
    of_classes = topk_accuracy(input, target, (1, 4), average="none")
    expected = torch.tensor([[1.0, nan, nan, 0.0], [1.0, nan, nan, 1.0]])
    torch.testing.assert_close(of_classes, expected, equal_nan=True)
    assert target_rank(input, target).tolist() == [0, 0, 0, 3]


@every_average
@pytest.mark.parametrize("classes", [7, 100, 1003])
def test_never_falls(classes, average):
    input, target = torch.randn(2000, classes), torch.randint(classes, (2000,))
    accuracy = topk_accuracy(input, target, range(1, min(classes, 50) + 1), average=average)
    assert not (accuracy.diff(dim=0) < 0).any()


def test_exported():
    assert topklass.topk_accuracy is topk_accuracy


# Ties, absent classes, NaN


def test_ties_are_right():
    input = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]] * 5)
    assert target_rank(input, torch.arange(5)).tolist() == [0, 1, 1, 1, 4]
    assert topk_accuracy(torch.zeros(7, 4), torch.randint(4, (7,)), 1) == 1


@pytest.mark.parametrize("k", [1, 2, 4])
def test_absent_label_is_never_right(k):
    input = torch.tensor([[1.0, -inf, -inf, -inf], [-inf] * 4])
    assert topk_accuracy(input, torch.tensor([2, 0]), k) == 0
    assert topk_accuracy(input, torch.tensor([0, 0]), k) == 0.5


@pytest.mark.parametrize("where", [0, 1, 3])
def test_nan_is_never_right(where):
    """The label's score, and any other."""
    input = torch.tensor([[0.0, 5.0, 1.0, 2.0], [0.0, 5.0, 1.0, 2.0]])
    input[0, where] = nan
    target = torch.tensor([1, 1])
    assert target_rank(input, target).tolist() == [4, 0]
    assert topk_accuracy(input, target, (1, 4)).tolist() == [0.5, 0.5]


def test_infinite_scores_are_scores():
    input = torch.tensor([[inf, 1.0, inf, 0.0]] * 2)
    assert target_rank(input, torch.tensor([2, 1])).tolist() == [0, 2]


# Targets that do not count


@every_average
@pytest.mark.parametrize("ignore_index", [-100, -1, 2, 255])
@pytest.mark.parametrize("shape", [(40, C), (10, C, 4)], ids=str)
def test_ignore_index(shape, ignore_index, average):
    input, target = torch.randn(shape), torch.randint(C, shape[:1] + shape[2:])
    target.view(-1)[::3] = ignore_index
    check(input, target, average, ignore_index=ignore_index)
    ignored = target == ignore_index
    assert (target_rank(input, target, ignore_index)[ignored] == C).all()


@every_average
def test_no_samples(average):
    ignored = torch.full((3,), -100)
    for input, target in ((torch.randn(0, C), ignored[:0]), (torch.randn(3, C), ignored)):
        assert topk_accuracy(input, target, (1, C), average=average).isnan().all()


@pytest.mark.parametrize("wrong", [C, 1000, -1])
def test_target_out_of_range(wrong):
    for shape in ((C,), (3, C), (3, C, 2)):
        input = torch.randn(shape)
        target = torch.zeros(shape[:0] if len(shape) == 1 else shape[:1] + shape[2:]).long()
        target.view(-1)[-1] = wrong
        with raises(IndexError, "target", "from 0 to 5", "ignore_index=-7", str(wrong)):
            topk_accuracy(input, target, 1, ignore_index=-7)


class Unseen(Tensor):
    """A tensor whose values the library does not look at, as on a GPU."""


@pytest.mark.parametrize("wrong", [C, 10**12, -1])
def test_target_out_of_range_where_nobody_looks(wrong):
    """It is wrong, and nothing outside the scores is read."""
    input, target = torch.randn(4, C), torch.tensor([0, 1, wrong, -100]).as_subclass(Unseen)
    assert target_rank(input, target)[2:].tolist() == [C, C]
    torch.testing.assert_close(float(topk_accuracy(input, target, C)), 2 / 3, rtol=1e-6, atol=0)


def test_vmap():
    input, target = torch.randn(3, 4, C), torch.randint(C, (3, 4))
    target[0, 1] = -100
    together = torch.vmap(lambda x, y: topk_accuracy(x, y, (1, 3)))(input, target)
    for i in range(3):
        assert torch.equal(together[i], topk_accuracy(input[i], target[i], (1, 3)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_integer_targets(dtype):
    input, target = torch.randn(300, 200), torch.randint(100, (300,))
    target[0] = 100 if dtype == torch.int8 else 156  # −100 in eight bits
    narrow = target.to(dtype)
    assert torch.equal(target_rank(input, narrow), target_rank(input, target))
    assert torch.equal(topk_accuracy(input, narrow, 9), topk_accuracy(input, target, 9))


# Precision, memory, and what looks at the operations


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_ranks_exactly(dtype):
    input = (3 * torch.randn(200, 500)).to(dtype)
    target = torch.randint(500, (200,))
    assert all(row.unique().numel() < 500 for row in input)
    assert torch.equal(target_rank(input, target), target_rank(input.double(), target))


def test_neighbouring_scores_are_no_ties():
    one = torch.ones((), dtype=torch.float64)
    input = torch.stack([one, one.nextafter(2 * one)])
    assert target_rank(input, torch.tensor(0)) == 1
    assert target_rank(input, torch.tensor(1)) == 0


def test_many_rows():
    """Several blocks of rows."""
    input, target = torch.randint(50, (3000, 500)).float(), torch.randint(500, (3000,))
    expected = (input > input.gather(1, target[:, None])).sum(1)
    assert torch.equal(target_rank(input, target), expected)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # PyTorch 2.11 warns of itself
def test_memory():
    """No operation, nor what it calls, allocates as much as the scores take."""
    input, target = torch.randn(512, 16384), torch.randint(16384, (512,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as operations:
        topk_accuracy(input, target, (1, 5))
    allocated = [event.self_cpu_memory_usage for event in operations.events()]
    assert 0 < max(allocated) < input.nbytes / 4


def test_strides_and_gradients():
    input = torch.randn(C, 5).t().requires_grad_()
    target = torch.randint(C, (5,))
    accuracy = topk_accuracy(input, target, 2)
    assert not accuracy.requires_grad
    assert accuracy == topk_accuracy(input.detach().contiguous(), target, 2)


@every_average
def test_no_values_are_read(average):
    """Tensors without values will do: nothing waits for a device."""
    input, target = torch.randn(50, C, device="meta"), torch.zeros(50, device="meta").long()
    accuracy = topk_accuracy(input, target, (1, 3), average=average)
    assert accuracy.shape == ((2, C) if average == "none" else (2,))


def test_autocast():
    input, target = torch.randn(50, C), torch.randint(C, (50,))
    with torch.autocast("cpu", torch.bfloat16):
        accuracy = topk_accuracy(input, target, (1, 3))
    assert torch.equal(accuracy, topk_accuracy(input, target, (1, 3)))


@every_average
def test_compiled(average):
    input, target = torch.randn(50, C), torch.randint(C, (50,))
    target[3] = -100
    compiled = torch.compile(
        lambda x, y: topk_accuracy(x, y, (1, 3), average=average),
        fullgraph=True,
        backend="aot_eager",
    )
    expected = topk_accuracy(input, target, (1, 3), average=average)
    assert torch.equal(compiled(input, target), expected)


# Bad input


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
    input, target = torch.randn(3, C), torch.tensor([0, 1, 2])
    assert topk_accuracy(input, target, np.int64(2)) == topk_accuracy(input, target, 2)


def test_unknown_average():
    for average in ("weighted", None):
        with raises(ValueError, "micro, macro, none", repr(average)):
            topk_accuracy(torch.randn(3, C), torch.tensor([0, 1, 2]), 1, average=average)


@pytest.mark.parametrize("function", [target_rank, topk_accuracy])
def test_input_and_target(function):
    labels = torch.tensor([0, 1, 2])
    with raises(TypeError, "tensor of logits", "list"):
        function([1.0, 2.0], labels)
    with raises(ValueError, "floating-point", "torch.int64"):
        function(torch.ones(3, C).long(), labels)
    with raises(ValueError, "at least one class", "(0, 0)"):
        function(torch.ones(0, 0), labels[:0])
    with raises(ValueError, "(3,)", "(2,)"):
        function(torch.randn(3, C), labels[:2])
    with raises(TypeError, "class indices", "probabilities", "argmax(1)"):
        function(torch.randn(3, C), torch.rand(3, C))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@every_average
def test_cuda(dtype, average):
    """The same as on the CPU, without waiting for the device."""
    input, target = (3 * torch.randn(64, C, 5)).to(dtype), torch.randint(C, (64, 5))
    input[0, 1], input[1, 2], target[2] = nan, -inf, -100
    expected = topk_accuracy(input, target, (1, 3, C), average=average)
    input, target, unlike = input.cuda(), target.cuda(), torch.full_like(target, C).cuda()
    with no_synchronisation():
        accuracy = topk_accuracy(input, target, (1, 3, C), average=average)
        ranks = target_rank(input, unlike)
    torch.testing.assert_close(accuracy.cpu(), expected, equal_nan=True)
    assert (ranks == C).all()
