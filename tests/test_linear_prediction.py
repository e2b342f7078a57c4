"""The k best classes of a layer, in chunks of rows or of classes."""

import math

import pytest
import torch
import torch.nn.functional as F
from benchmarks.memory import peak_on_cpu
from torch import Tensor

from contract_cases import all_pairs
from topklass.functional import linear_predict_topk

nan, inf = math.nan, math.inf


def in_order(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k first classes by their logits, ties in the order of classes."""
    labels = logits.argsort(dim=-1, descending=True, stable=True)[..., :k]
    return labels, logits.gather(-1, labels)


@pytest.mark.parametrize(
    ("k", "chunk_bytes", "bias", "tied"),
    all_pairs([1, 3, 20], [1, 100, 800, 10**6], [False, True], [False, True]),
)
def test_labels_and_scores(k, chunk_bytes, bias, tied):
    """Whole numbers have many ties."""

    def random(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape).double() if tied else torch.randn(shape).double()

    input, weight = random(10, 3), random(20, 3)
    shift = random(20) if bias else None
    labels, scores = linear_predict_topk(
        input, weight, k, linear_bias=shift, chunk_bytes=chunk_bytes
    )
    wanted, values = in_order(F.linear(input, weight, shift), k)
    assert torch.equal(labels, wanted)
    torch.testing.assert_close(scores, values)


@pytest.mark.parametrize("features", [3, 0])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_shapes(shape, features):
    found = linear_predict_topk(torch.randn(*shape, features), torch.randn(20, features), 4)
    assert found.labels.shape == found.scores.shape == (*shape, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_precision(dtype):
    input, weight = torch.randn(6, 8).to(dtype), torch.randn(500, 8).to(dtype)
    labels, scores = linear_predict_topk(input, weight, 5, chunk_bytes=6 * 100 * 16)
    wanted, values = in_order(F.linear(input, weight), 5)
    assert scores.dtype == dtype
    assert torch.equal(labels, wanted)
    torch.testing.assert_close(scores, values)  # products of other shapes are rounded otherwise


def test_autocast():
    input, weight = torch.randn(6, 8), torch.randn(500, 8)
    with torch.autocast("cpu", torch.bfloat16):
        labels, scores = linear_predict_topk(input, weight, 5)
        wanted, _ = in_order(F.linear(input, weight), 5)
    assert scores.dtype == torch.bfloat16
    assert torch.equal(labels, wanted)


def test_absent_and_spoilt_classes():
    """Absent classes fill the list in their order, NaN comes first."""
    bias = torch.tensor([-inf, 1.0, -inf, 2.0, -inf, -inf])
    weight = torch.zeros(6, 2)
    for chunk_bytes in (1, 1000):
        labels, scores = linear_predict_topk(
            torch.zeros(2), weight, 4, linear_bias=bias, chunk_bytes=chunk_bytes
        )
        assert labels.tolist() == [3, 1, 0, 2]
        assert scores.tolist() == [2, 1, -inf, -inf]
    bias[4] = nan
    labels, scores = linear_predict_topk(torch.zeros(2), weight, 2, linear_bias=bias, chunk_bytes=1)
    assert labels.tolist() == [4, 3]
    assert scores[0].isnan()


@pytest.mark.parametrize("room", [2**21, 2**19], ids=["rows", "classes"])
@pytest.mark.parametrize("tied", [False, True])
def test_memory(room, tied):
    input, weight = torch.randn(64, 4), torch.randn(50_000, 4)
    if tied:
        weight = weight.round()
    taken = peak_on_cpu(lambda: linear_predict_topk(input, weight, 5, chunk_bytes=room))
    assert 0.3 * room < taken < 1.5 * room < 64 * 50_000 * 4


def test_no_gradient():
    weight = torch.randn(9, 4, requires_grad=True)
    assert not linear_predict_topk(torch.randn(3, 4), weight, 2).scores.requires_grad


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": 10}, ValueError, "from 1 to 9, the number of classes"),
        ({"input": torch.zeros(3, 5)}, RuntimeError, "that of linear_weight, 4"),
        ({"linear_bias": torch.zeros(8)}, RuntimeError, r"shape \(9,\), got \(8,\)"),
        ({"chunk_bytes": -1}, ValueError, "chunk_bytes must be at least 1"),
    ],
    ids=str,
)
def test_errors(changed, error, message):
    given = {"input": torch.zeros(3, 4), "linear_weight": torch.zeros(9, 4), "k": 2}
    with pytest.raises(error, match=message):
        linear_predict_topk(**given | changed)
