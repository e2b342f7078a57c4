"""Class weights, their deferral, and the cosine classifier."""

import copy
import io
import math
import pickle

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck

import topklass
from topklass import CosineClassifier, DeferredReweighting, class_weights

INF = math.inf
COUNTS = torch.tensor([1000, 100, 10, 3])


# Class weights


def exact_weights(counts: list[int], beta: float) -> Tensor:
    with mpmath.workdps(50):
        b = mpmath.mpf(beta)
        weights = [(1 - b) / (1 - b**n) for n in counts]
        mean = mpmath.fsum(weights) / len(weights)
        return torch.tensor([float(w / mean) for w in weights], dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.9999, 1 - 1e-9, 1 - 1e-15])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64], ids=str)
def test_class_weights(beta, dtype):
    counts = [1, 2, 50, 1_000_000]
    weights = class_weights(torch.tensor(counts, dtype=dtype), beta)
    assert weights.dtype == (dtype if dtype.is_floating_point else torch.float32)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    expected = exact_weights(counts, beta).to(weights.dtype)
    torch.testing.assert_close(weights, expected, rtol=tolerance, atol=0)
    assert weights.mean().item() == pytest.approx(1)


def test_class_weights_without_samples():
    """A class without samples is as rare as the rarest that has some."""
    weights = class_weights(torch.tensor([100, 0, 5, 0]), beta=0.9)
    assert weights[1] == weights[2] == weights[3] > weights[0]
    assert weights.mean().item() == pytest.approx(1)
    for beta in (0.0, 0.9999):
        assert torch.equal(class_weights(torch.tensor([0, 0]), beta), torch.ones(2))
    assert torch.equal(class_weights(torch.tensor([0, 7, 2]), 0.0), torch.ones(3))


@pytest.mark.parametrize("beta", [-0.1, 1.0, 1.5, math.nan, "0.9", None, True])
def test_bad_beta(beta):
    with pytest.raises(ValueError, match=f"from 0 to below 1, got beta={beta!r}"):
        class_weights(COUNTS, beta)


@pytest.mark.parametrize("counts", [torch.ones(2, 2), torch.tensor([]), torch.tensor(3)], ids=str)
def test_counts_of_another_shape(counts):
    with pytest.raises(ValueError, match="counts must be a vector, one per class"):
        class_weights(counts)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        class_weights(torch.tensor([1, -1]))


# Deferred re-weighting

CRITERIA = [
    topklass.SmoothTopKLoss(2),
    topklass.LDAMLoss(0.3),
    topklass.TopKCrossEntropyLoss({1: 1.0, 2: 1.0}),
    topklass.FocalLoss(label_smoothing=0.1),
    nn.CrossEntropyLoss(),
    nn.MultiMarginLoss(),
]
every_criterion = pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: type(c).__name__)


def a_batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4).to(dtype), torch.tensor([0, 1, 2, 3, 0, 2])


def weighted(criterion: nn.Module, weight: Tensor) -> nn.Module:
    """A copy with these weights."""
    twin = copy.deepcopy(criterion)
    twin.weight = weight
    return twin


@every_criterion
def test_weights_come_at_the_start_epoch(criterion):
    logits, target = a_batch()
    plain, later = criterion(logits, target), weighted(criterion, class_weights(COUNTS))
    loss = DeferredReweighting(criterion, COUNTS, start=3)
    for epoch in (None, 0, 2, 3, 4, 1):
        if epoch is not None:
            loss.set_epoch(epoch)
        expected = plain if epoch in (None, 0, 1, 2) else later(logits, target)
        torch.testing.assert_close(loss(logits, target), expected, rtol=0, atol=0)
        assert criterion.weight is None
    assert not torch.equal(plain, later(logits, target))


def test_beta_is_handed_on():
    logits, target = a_batch()
    loss = DeferredReweighting(nn.CrossEntropyLoss(), COUNTS.tolist(), 0, beta=0.9)
    expected = F.cross_entropy(logits, target, class_weights(COUNTS, 0.9))
    torch.testing.assert_close(loss(logits, target), expected)


def test_weights_of_the_criterion_are_multiplied():
    logits, target = a_batch()
    own = torch.rand(4)
    loss = DeferredReweighting(nn.CrossEntropyLoss(own), COUNTS, start=1)
    torch.testing.assert_close(loss(logits, target), F.cross_entropy(logits, target, own))
    loss.set_epoch(1)
    expected = F.cross_entropy(logits, target, own * class_weights(COUNTS))
    torch.testing.assert_close(loss(logits, target), expected)
    assert torch.equal(loss.criterion.weight, own)


@pytest.mark.parametrize("epoch", [0, 1])
def test_all_arguments_are_handed_on(epoch):
    logits, target = a_batch()
    noise = torch.randn(6, 4, 3)
    loss = DeferredReweighting(topklass.NoisedTopKLoss(2, samples=3), COUNTS, start=1)
    loss.set_epoch(epoch)
    weight = class_weights(COUNTS) if epoch else None
    expected = topklass.NoisedTopKLoss(2, samples=3, weight=weight)(logits, target, noise=noise)
    assert torch.equal(loss(logits, target=target, noise=noise), expected)


@every_criterion
def test_gradient_of_weighted_classes(criterion):
    logits, target = a_batch()
    loss = DeferredReweighting(criterion, COUNTS, start=0)
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    loss(leaves[0], target).backward()
    weighted(criterion, class_weights(COUNTS))(leaves[1], target).backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize("own", [None, torch.ones(4)], ids=["", "weighted"])
@pytest.mark.parametrize("epoch", [1, 7])
def test_state_dict_in_the_middle_of_training(own, epoch):
    logits, target = a_batch()
    loss = DeferredReweighting(topklass.SmoothTopKLoss(2, weight=own), COUNTS, start=5)
    loss.set_epoch(epoch)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other_weight = None if own is None else torch.zeros(4)
    other = DeferredReweighting(
        topklass.SmoothTopKLoss(2, weight=other_weight), torch.ones(4), start=5
    )
    other.load_state_dict(state)
    assert other.active == (epoch == 7)
    assert torch.equal(other(logits, target), loss(logits, target))
    other.set_epoch(5)
    loss.set_epoch(5)
    assert torch.equal(other(logits, target), loss(logits, target))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copy(copied):
    logits, target = a_batch()
    loss = DeferredReweighting(topklass.SmoothTopKLoss(2), COUNTS, start=2)
    loss.set_epoch(2)
    twin = copied(loss)
    assert torch.equal(twin(logits, target), loss(logits, target))
    loss.set_epoch(0)
    assert twin.active


def test_weights_move_with_the_module():
    logits, target = a_batch(torch.float64)
    loss = DeferredReweighting(nn.CrossEntropyLoss(torch.ones(4)), COUNTS, start=0)
    assert loss.double()(logits, target).dtype == torch.float64
    loss.to("meta")
    assert {b.device.type for b in loss.buffers()} == {"meta"}
    assert loss(logits.to("meta"), target.to("meta")).device.type == "meta"
    assert not list(loss.parameters())


def test_compile():
    """One graph before and one after the start, whatever the number of epochs."""
    logits, target = a_batch()
    loss = DeferredReweighting(topklass.FocalLoss(), COUNTS, start=2)
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=counting)
    for epoch in range(5):
        loss.set_epoch(epoch)
        torch.testing.assert_close(compiled(logits, target), loss(logits, target))
    assert len(graphs) == 2


def test_bad_criterion():
    for criterion in (nn.MSELoss(), nn.Linear(2, 2), F.cross_entropy):
        with pytest.raises(TypeError, match=f"{type(criterion).__name__}.*no buffer named weight"):
            DeferredReweighting(criterion, COUNTS, 1)
    with pytest.raises(ValueError, match=r"\(3,\) as the criterion's weight, got shape \(4,\)"):
        DeferredReweighting(nn.CrossEntropyLoss(torch.ones(3)), COUNTS, 1)


@pytest.mark.parametrize("epoch", [-1, 1.5, True, None])
def test_bad_epoch(epoch):
    with pytest.raises(
        ValueError, match=f"start must be a non-negative integer, got start={epoch}"
    ):
        DeferredReweighting(nn.CrossEntropyLoss(), COUNTS, epoch)
    with pytest.raises(ValueError, match="epoch must be a non-negative integer"):
        DeferredReweighting(nn.CrossEntropyLoss(), COUNTS, 1).set_epoch(epoch)


def test_repr_of_deferred_weights():
    shown = repr(DeferredReweighting(topklass.SmoothTopKLoss(2), COUNTS, start=9))
    assert all(part in shown for part in ("start=9", "active=False", "SmoothTopKLoss(", "k=2"))


# The cosine classifier


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("learn_scale", [False, True])
def test_scores_are_cosines(shape, scale, learn_scale):
    head = CosineClassifier(5, 4, scale, learn_scale).double()
    features = torch.randn(shape, dtype=torch.float64)
    expected = scale * F.cosine_similarity(features.unsqueeze(-2), head.weight, dim=-1)
    torch.testing.assert_close(head(features), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-10, 1.0, 1e10])
def test_scores_stay_within_the_scale(dtype, size):
    """Also where rounding would make a cosine larger than 1."""
    head = CosineClassifier(7, 500, scale=30.0).to(dtype)
    scores = head(torch.cat([head.weight, -head.weight]) * size)
    assert scores.abs().max() <= 30
    if size > 1e-20 or dtype == torch.float64:
        torch.testing.assert_close(scores[:500].diagonal(), torch.full((500,), 30.0, dtype=dtype))
        torch.testing.assert_close(scores[500:].diagonal(), torch.full((500,), -30.0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_vectors_of_length_0(dtype):
    head = CosineClassifier(5, 4, scale=20.0).to(dtype)
    with torch.no_grad():
        head.weight[1] = 0
    features = torch.randn(3, 5).to(dtype)
    features[2] = 0
    features.requires_grad_()
    scores = head(features)
    assert (scores[2] == 0).all()
    assert (scores[:, 1] == 0).all()
    scores.square().sum().backward()
    scores = head(features)
    scores.sum().backward()
    for gradient in (features.grad, head.weight.grad):
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 1e4


@pytest.mark.parametrize("learn_scale", [False, True])
def test_derivatives_of_the_head(learn_scale):
    head = CosineClassifier(4, 3, 2.5, learn_scale).double()
    features = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    parameters = dict(head.named_parameters())

    def scores(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(head, named, (x,))

    assert gradcheck(scores, (features, *parameters.values()))


def test_scale_that_is_learnt_stays_positive():
    head = CosineClassifier(4, 3, scale=0.5, learn_scale=True)
    assert set(dict(head.named_parameters())) == {"weight", "log_scale"}
    assert head.scale.item() == pytest.approx(0.5)
    optimizer = torch.optim.SGD(head.parameters(), lr=5.0)
    features = head.weight.detach().clone()
    for _ in range(20):
        optimizer.zero_grad()
        head(features).diagonal().sum().backward()
        optimizer.step()
    assert 0 < head.scale.item() < 0.5
    fixed = CosineClassifier(4, 3, scale=0.5)
    assert set(fixed.state_dict()) == {"weight"}
    assert fixed.scale == 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_computes_in_float32(dtype):
    head = CosineClassifier(64, 10, scale=20.0, learn_scale=True).to(dtype)
    features = torch.randn(8, 64, dtype=dtype)
    wide = CosineClassifier(64, 10, scale=20.0, learn_scale=True)
    wide.load_state_dict(head.state_dict())
    scores = head(features)
    assert scores.dtype == dtype
    assert torch.equal(scores, wide(features.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_cosines_under_autocast(dtype):
    """In float32: bfloat16 has less than three digits, as many as the noise on cosines."""
    head = CosineClassifier(64, 10).to(torch.promote_types(dtype, torch.float32))
    features = torch.randn(8, 64).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = head(features)
    assert scores.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(scores, head(features.to(scores.dtype)))
    scores.sum().backward()
    assert features.grad.dtype == dtype


def test_vectors_begin_alike():
    """Lengths about 1, no direction preferred."""
    weight = CosineClassifier(400, 300).weight.detach()
    assert weight.norm(dim=1).sub(1).abs().max() < 0.2
    assert weight.mean().abs() < 1e-3
    cosines = F.normalize(weight) @ F.normalize(weight).t()
    assert cosines.fill_diagonal_(0).abs().max() < 0.35


def test_training_with_the_losses_for_long_tails():
    """Three classes of unequal size are told apart; features need no scale of their own."""
    features = torch.randn(120, 8)
    target = torch.tensor([0] * 80 + [1] * 30 + [2] * 10)
    features[:, :3] += 4 * F.one_hot(target, 3)
    margins = topklass.class_margins(target.bincount())
    for loss in (
        topklass.LDAMLoss(margins, scale=20.0),
        topklass.NoisedTopKLoss(1, 0.01, 5, margins, scale=20.0),
    ):
        head = CosineClassifier(8, 3)
        criterion = DeferredReweighting(loss, target.bincount(), start=20)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        for epoch in range(40):
            criterion.set_epoch(epoch)
            optimizer.zero_grad()
            criterion(head(features), target).backward()
            optimizer.step()
        right = head(features).argmax(1) == target
        assert all(right[target == c].float().mean() > 0.85 for c in range(3))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_the_head(copied):
    head = CosineClassifier(4, 3, 2.0, learn_scale=True)
    features = torch.randn(2, 4)
    assert torch.equal(copied(head)(features), head(features))
    assert "in_features=4, out_features=3, scale=2.0, learn_scale=True" in repr(head)
    assert head.to("meta")(features.to("meta")).device.type == "meta"


def test_compile_of_the_head():
    head = CosineClassifier(4, 3, 2.0, learn_scale=True)
    features = torch.randn(2, 4)
    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(features), head(features))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 3), ValueError, "in_features"),
        ((3, 2.0), TypeError, "out_features"),
        ((3, 2, 0.0), ValueError, "scale must be positive"),
        ((3, 2, -1.0), ValueError, "scale must be positive"),
        ((3, 2, INF), ValueError, "finite"),
    ],
    ids=str,
)
def test_bad_arguments_of_the_head(arguments, error, message):
    with pytest.raises(error, match=message):
        CosineClassifier(*arguments)


def test_wrong_counts_are_found_before_they_matter():
    criterion = topklass.DeferredReweighting(nn.CrossEntropyLoss(), [3.0, 2.0], start=100)
    with pytest.raises(ValueError, match=r"counts for 2 classes.*minlength=3"):
        criterion(torch.zeros(4, 3), torch.zeros(4).long())
    criterion(torch.zeros(4, 2), torch.zeros(4).long())
    criterion(torch.zeros(2), torch.tensor(0))
