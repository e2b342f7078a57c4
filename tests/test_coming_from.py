"""What docs/coming-from.md claims about losses of other libraries.

smooth-topk is compared in test_compat.py, pytopk and difftopk's copy of smooth-topk in
test_published_code.py. timm and pytorch-metric-learning are compared in the slow part, where the
extra ``integrations`` is installed.
"""

import importlib
import inspect
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import topklass
from topklass.functional import focal_loss, smooth_topk_loss, topk_cross_entropy, topk_hinge_loss

PAGE = (Path(__file__).parent.parent / "docs" / "coming-from.md").read_text(encoding="utf-8")
N, C = 12, 7
REDUCTIONS = ("mean", "sum")


def problem() -> tuple[Tensor, Tensor]:
    return 3 * torch.randn(N, C, dtype=torch.float64), torch.arange(N) % C


def assert_equal(ours: Tensor, theirs: Tensor, scores: Tensor, tolerance: float = 1e-6) -> None:
    """In value and gradient."""
    found = [(x.detach(), torch.autograd.grad(x, scores)[0]) for x in (ours, theirs)]
    torch.testing.assert_close(*found, atol=tolerance, rtol=tolerance)


def section(title: str) -> str:
    return re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]


# torch.nn.MultiMarginLoss


@pytest.mark.parametrize("margin", [1.0, 0.3])
def test_multi_margin_is_the_mean_of_hinges_over_all_lengths(margin):
    scores, labels = problem()
    scores.requires_grad_()
    lengths = sum(topk_hinge_loss(scores, labels, k, margin) for k in range(1, C))
    assert_equal(lengths / C, nn.MultiMarginLoss(margin=margin)(scores, labels), scores)


def test_multi_margin_of_two_classes():
    scores, labels = torch.randn(N, 2, requires_grad=True), torch.arange(N) % 2
    assert_equal(
        topklass.TopKHingeLoss(k=1)(scores, labels) / 2,
        nn.MultiMarginLoss()(scores, labels),
        scores,
    )
    assert_equal(
        topklass.compat.MaxTop1SVM(2)(scores, labels) / 2,
        nn.MultiMarginLoss()(scores, labels),
        scores,
    )


def test_weights_of_multi_margin():
    """It divides by the number of samples, ours and cross-entropy by the sum of their weights."""
    scores, labels = torch.randn(N, 2), torch.arange(N) % 2
    weight = torch.tensor([1.0, 3.0])
    ours = {r: topk_hinge_loss(scores, labels, 1, weight=weight, reduction=r) for r in REDUCTIONS}
    theirs = {r: nn.MultiMarginLoss(weight=weight, reduction=r)(scores, labels) for r in REDUCTIONS}
    torch.testing.assert_close(ours["sum"] / 2, theirs["sum"])
    torch.testing.assert_close(ours["mean"] * weight[labels].sum() / N / 2, theirs["mean"])


def test_what_multi_margin_does_not_take():
    loss = nn.MultiMarginLoss()
    with pytest.raises(RuntimeError):
        loss(torch.randn(N, C), torch.full((N,), -100))
    with pytest.raises(RuntimeError):
        loss(torch.randn(N, C, 3), torch.zeros(N, 3, dtype=torch.long))
    with pytest.raises(RuntimeError):
        loss(torch.randn(N, C), torch.rand(N, C))


# difftopk


def sorting(p_k: list[float]) -> nn.Module:
    difftopk = pytest.importorskip("difftopk")
    return difftopk.TopKCrossEntropyLoss("neuralsort", 2.0, p_k, n=C)


def test_difftopk_of_the_first_guess():
    scores, labels = torch.randn(N, C, requires_grad=True), torch.arange(N) % C
    ours, theirs = topk_cross_entropy(scores, labels, [1.0]), sorting([1.0])(scores, labels)
    assert_equal(ours, theirs, scores, tolerance=1e-5)  # they bound probabilities by 1e-7


def test_difftopk_bounds_the_loss():
    """At −log 1e-7, without a gradient; ours goes on."""
    scores = torch.tensor([[60.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    label = torch.tensor([1])
    theirs = sorting([1.0])(scores, label)
    assert theirs.item() == pytest.approx(-math.log(1e-7), rel=1e-6)
    assert torch.autograd.grad(theirs, scores)[0].abs().max() < 1e-6
    ours = topk_cross_entropy(scores, label, [1.0])
    assert ours.item() == pytest.approx(60)
    assert torch.autograd.grad(ours, scores)[0].abs().max() == pytest.approx(1)


def test_difftopk_relaxes_sorting_instead():
    """The same weights, another probability that a list holds the label."""
    scores, labels = 3 * torch.randn(N, C), torch.arange(N) % C
    weights = [0.5, 0.5]
    difference = sorting(weights)(scores, labels) - topk_cross_entropy(scores, labels, weights)
    assert difference.abs() > 0.01


def test_positional_arguments_of_difftopk():
    """Theirs begin with the number of classes, ours with k."""
    difftopk = pytest.importorskip("difftopk")
    assert list(inspect.signature(difftopk.SmoothTopKLoss).parameters)[:2] == ["num_classes", "k"]
    scores = torch.randn(N, C)
    with pytest.raises(ValueError, match="k"):
        topklass.SmoothTopKLoss(C, 2)(scores, torch.arange(N) % C)


# pytopk


def test_pytopk_draws_other_noise():
    """The same seed gives other noise: pass the noise to compare."""
    pytopk = pytest.importorskip("pytopk")
    scores, labels = torch.randn(N, C), torch.arange(N) % C
    torch.manual_seed(0)
    theirs = pytopk.BalNoisedTopK(2, 1.0)(scores, labels)
    torch.manual_seed(0)
    ours = topklass.NoisedTopKLoss(2, 1.0, samples=5)(scores, labels)
    assert theirs != ours
    torch.manual_seed(0)
    noise = torch.randn(N, C, 5)
    ours = topklass.NoisedTopKLoss(2, 1.0, samples=5)(scores, labels, noise=noise)
    torch.testing.assert_close(ours, theirs)


def test_margin_of_a_class_without_samples():
    pytopk = pytest.importorskip("pytopk")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        theirs = pytopk.ImbalNoisedTopK(1, 0.1, 0.2, [0, 16, 1]).m_list
    assert theirs[0].isnan()
    assert theirs[1:].tolist() == [0, 0]
    ours = topklass.class_margins([0, 16, 1], 0.2)
    assert ours[0] == ours.max()
    torch.testing.assert_close(ours[1:], torch.tensor([0.1, 0.2]))


# timm


@pytest.mark.slow
def test_timm_cross_entropies():
    loss = pytest.importorskip("timm.loss")
    scores, labels = problem()
    scores.requires_grad_()
    for smoothing in (0.1, 0.3):
        assert_equal(
            topk_cross_entropy(scores, labels, 1, label_smoothing=smoothing),
            loss.LabelSmoothingCrossEntropy(smoothing)(scores, labels),
            scores,
        )
        assert_equal(
            smooth_topk_loss(scores, labels, 1, margin=0.0, label_smoothing=smoothing),
            loss.LabelSmoothingCrossEntropy(smoothing)(scores, labels),
            scores,
        )


@pytest.mark.slow
def test_timm_soft_targets():
    loss, data = pytest.importorskip("timm.loss"), importlib.import_module("timm.data")
    mixup = data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=C)
    _, target = mixup(torch.rand(N, 3, 8, 8), torch.arange(N) % C)
    scores = torch.randn(N, C, requires_grad=True)
    assert (target > 0.1 / C + 1e-6).sum() > N  # mixed
    ours = topk_cross_entropy(scores, target, 1)
    assert_equal(ours, loss.SoftTargetCrossEntropy()(scores, target), scores)


@pytest.mark.slow
def test_timm_focal_loss():
    """Without label smoothing, ASL for one label is the focal loss with γ = gamma_pos."""
    loss = pytest.importorskip("timm.loss")
    scores, labels = problem()
    scores.requires_grad_()
    for gamma_pos, gamma_neg in [(2, 4), (1, 0)]:
        theirs = loss.AsymmetricLossSingleLabel(gamma_pos, gamma_neg, eps=0.0)(scores, labels)
        assert_equal(focal_loss(scores, labels, gamma_pos), theirs, scores)
    smoothed = loss.AsymmetricLossSingleLabel(2, 4, eps=0.1)(scores, labels)
    assert (smoothed - focal_loss(scores, labels, 2, label_smoothing=0.1)).abs() > 0.01


@pytest.mark.slow
def test_timm_jsd_with_another_loss():
    """Its cross-entropy of the clean images may be any loss."""
    loss = pytest.importorskip("timm.loss")
    scores, labels = torch.randn(9, C), torch.arange(9) % C
    jsd = loss.JsdCrossEntropy(num_splits=3, smoothing=0.0)
    jsd.cross_entropy_loss = topklass.SmoothTopKLoss(k=2)
    clean = smooth_topk_loss(scores[:3], labels[:3], 2) - F.cross_entropy(scores[:3], labels[:3])
    original = loss.JsdCrossEntropy(num_splits=3, smoothing=0.0)(scores, labels)
    torch.testing.assert_close(jsd(scores, labels), original + clean)


def test_multi_label_targets():
    """Those of timm's losses, as a mask."""
    targets = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0]])
    scores = torch.randn(1, 5)
    criterion = topklass.MultiLabelSmoothTopKLoss(k=2)
    expected = criterion(scores, torch.tensor([[0, 2]]))
    torch.testing.assert_close(criterion(scores, targets.bool()), expected)


# pytorch-metric-learning


def metric_learning(name: str, **options: float) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Their loss, our last layer with the same vectors, features and labels."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    theirs = getattr(losses, name)(num_classes=C, embedding_size=5, **options)
    head = topklass.CosineClassifier(5, C)
    head.weight.data.copy_(theirs.W.data.T)
    return theirs, head, torch.randn(N, 5, requires_grad=True), torch.arange(N) % C


@pytest.mark.slow
@pytest.mark.parametrize(("margin", "scale"), [(0.35, 64), (0.1, 16)])
def test_cosface(margin, scale):
    theirs, head, features, labels = metric_learning("CosFaceLoss", margin=margin, scale=scale)
    ours = topklass.LDAMLoss(margin, scale)(head(features), labels)
    assert_equal(ours, theirs(features, labels), features)


@pytest.mark.slow
def test_normalized_softmax():
    theirs, head, features, labels = metric_learning("NormalizedSoftmaxLoss", temperature=0.05)
    ours = topklass.LDAMLoss(0.0, 1 / 0.05)(head(features), labels)
    assert_equal(ours, theirs(features, labels), features)


@pytest.mark.slow
def test_arcface_is_another_loss():
    """Its margin is an angle, so the distance in cosines depends on the angle."""
    theirs, head, features, labels = metric_learning("ArcFaceLoss", margin=28.6, scale=64)
    ours = topklass.LDAMLoss(0.35, 64.0)(head(features), labels)
    assert (ours - theirs(features, labels)).abs() > 0.1


# The tables


ARGUMENTS = {
    "smooth-topk": ["topklass.compat.SmoothTopkSVM", "topklass.compat.MaxTopkSVM"],
    "pytopk": ["pytopk.BalNoisedTopK", "pytopk.ImbalNoisedTopK", "pytopk.NoisedTopK"],
    "difftopk": ["difftopk.TopKCrossEntropyLoss", "difftopk.SmoothTopKLoss"],
    "torch.nn.MultiMarginLoss": ["torch.nn.MultiMarginLoss"],
    "timm": [
        "timm.loss.LabelSmoothingCrossEntropy",
        "timm.loss.SoftTargetCrossEntropy",
        "timm.loss.AsymmetricLossSingleLabel",
        "timm.loss.JsdCrossEntropy",
    ],
    "pytorch-metric-learning": ["pytorch_metric_learning.losses.NormalizedSoftmaxLoss"],
}


@pytest.mark.slow
@pytest.mark.parametrize("title", ARGUMENTS)
def test_the_page_has_every_argument(title):
    text = section(title)
    for path in ARGUMENTS[title]:
        module, _, name = path.rpartition(".")
        kind = getattr(pytest.importorskip(module), name)
        assert f"`{name}" in text
        for parameter in inspect.signature(kind).parameters.values():
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                assert re.search(rf"`[^`]*\b{parameter.name}\b[^`]*`", text), parameter.name
