"""Conformal sets of long tails: coverage of classes, clusters, tuning."""

import copy
import io
import math
import warnings

import pytest
import torch
from torch import Tensor

from set_samples import covered, long_tail, samples
from test_bad_input import raises
from topklass import ConformalSets, TopKSets
from topklass.sets.thresholds import (
    clustered_thresholds,
    clusters_and_share,
    group_thresholds,
    k_means,
)

INF = math.inf
COUNTS = [400, 200, 100, 50, 20, 10, 5, 0]
KINDS = {
    "lac": {"score": "lac"},
    "saps": {"score": "saps", "penalty": 0.1},
    "randomized saps": {"score": "saps", "penalty": 0.1, "randomized": True},
    "pas": {"score": "pas", "counts": COUNTS},
    "class": {"score": "lac", "calibration": "class"},
    "between": {"calibration": "class", "class_weight": 0.5},
    "clustered": {"score": "lac", "calibration": "clustered"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


# Coverage


def one_new_sample(sets: ConformalSets, n: int, trials: int) -> tuple[Tensor, Tensor]:
    """Whether one new sample is covered after each of many calibrations, and its label."""
    logits, target = samples(trials * (n + 1), classes=4)
    logits = 2 * logits + torch.linspace(-1, 1, 4).double()  # probabilities are wrong
    hits = []
    for x, y in zip(logits.split(n + 1), target.split(n + 1), strict=True):
        members = sets.calibrate(x[:n], y[:n])(x[n:])
        hits.append(covered(members, y[n:]))
    return torch.cat(hits), target[n :: n + 1]


@pytest.mark.parametrize(
    "options",
    [
        {"score": "lac"},
        {"score": "pas", "counts": [8, 4, 2, 1]},
        {"score": "saps", "penalty": 0.2, "randomized": True},
    ],
    ids=["LAC", "PAS", "SAPS"],
)
def test_marginal_coverage(options):
    """19 samples at α = 0.2: 16 of 20 exactly, as no scores are tied."""
    hits, _ = one_new_sample(ConformalSets(0.2, **options), 19, 1000)
    assert abs(hits.mean() - 0.8) <= 4 * (0.16 / 1000) ** 0.5


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_coverage_of_each_class(score):
    """At least 1 − α for every class, where one threshold for all leaves a class behind."""
    sets = ConformalSets(0.2, score=score, calibration="class")
    hits, labels = one_new_sample(sets, 59, 1000)
    for each in range(4):
        of_class = hits[labels == each]
        assert of_class.mean() >= 0.8 - 4 * (0.16 / len(of_class)) ** 0.5
    marginal, labels = one_new_sample(ConformalSets(0.2, score=score), 59, 1000)
    assert min(marginal[labels == each].mean() for each in range(4)) < 0.75


def clustered_samples(n: int) -> tuple[Tensor, Tensor]:
    """Scores of 100 classes, of which odd ones are larger, and their labels."""
    labels = torch.randint(100, (n,))
    return torch.rand(n).double() + 2 * (labels % 2), labels


def test_coverage_of_clusters():
    """1 − α for even and for odd classes, where one threshold for all covers every even one."""
    missed = []
    for _ in range(50):
        scores, labels = clustered_samples(6000)
        found = clustered_thresholds(scores, labels, 100, 0.1)
        new, of_class = clustered_samples(2000)
        wrong = (new > found[of_class]).double()
        missed.append([wrong[of_class % 2 == odd].mean() for odd in (0, 1)])
    mean, error = torch.tensor(missed).mean(0), torch.tensor(missed).std(0) / 50**0.5
    assert ((mean - 0.1).abs() <= 4 * error + 1e-3).all(), (mean, error)


def test_too_few_samples_for_clusters():
    """All classes have the threshold of all samples, and no sample is lost to clustering."""
    logits, target = samples(60)
    sets = ConformalSets(0.2, calibration="clustered").calibrate(logits, target)
    marginal = ConformalSets(0.2).calibrate(logits, target)
    assert sets.threshold.tolist() == [marginal.threshold] * 8


def test_clusters_with_a_generator():
    scores, labels = clustered_samples(3000)
    again = [
        clustered_thresholds(scores, labels, 100, 0.1, torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(again[0], again[1])
    assert not torch.equal(again[0], again[2])


def test_samples_make_clusters_or_thresholds():
    """Scores of the part that makes clusters have no part in the thresholds."""
    scores, labels = clustered_samples(6000)
    _, share = clusters_and_share(torch.bincount(labels), 0.1)
    found = []
    for shift in (0.0, 64.0):
        stream = torch.Generator().manual_seed(0)
        first = torch.rand(6000, generator=torch.Generator().manual_seed(0)) < share
        found.append(clustered_thresholds(scores + shift * first, labels, 100, 0.1, stream))
    assert found[1].max() < 3
    assert ((found[0] > 1) == (found[1] > 1)).all()


def test_clusters_of_capped_scores():
    """Odd classes have the score ∞ too often for their upper quantiles; even ones are as before."""
    scores, labels = clustered_samples(6000)
    scores[(labels % 2 == 1) & (torch.rand(6000) < 0.3)] = INF
    found = clustered_thresholds(scores, labels, 100, 0.1, torch.Generator().manual_seed(0))
    assert (found[::2] < 1).all()
    assert (found[1::2] == INF).all()


def test_k_means_of_clusters_of_other_sizes():
    """One of ten has most points: centres that are drawn alike would fall into it."""
    group = torch.tensor([0] * 200 + [each for each in range(1, 10) for _ in range(2)])
    points = 10.0 * group[:, None] + torch.rand(len(group), 1)
    found = k_means(points, torch.ones(len(group)), 10)
    assert (found[:, None] == found).equal(group[:, None] == group)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_k_means_by_brute_force(number):
    """The least squared distance of all divisions of weighted points on a line into intervals."""
    generator = torch.Generator().manual_seed(number)
    points = torch.rand(12, 1, generator=generator).double().sort(0).values
    weights = torch.rand(12, generator=generator).double() + 0.1

    def spread(clusters: Tensor) -> float:
        total = 0.0
        for each in clusters.unique():
            x, w = points[clusters == each].squeeze(1), weights[clusters == each]
            total += float((w * (x - (w * x).sum() / w.sum()) ** 2).sum())
        return total

    cuts = torch.combinations(torch.arange(1, 12), number - 1)
    best = min(spread((torch.arange(12)[:, None] >= cut).sum(1)) for cut in cuts)
    found = k_means(points, weights, number, torch.Generator().manual_seed(0))
    assert spread(found) == pytest.approx(best)


def test_k_means_of_equal_points():
    assert k_means(torch.zeros(5, 2), torch.ones(5), 3).max() <= 2


# Rare classes, caps


def test_group_thresholds_by_hand():
    scores, groups = torch.randn(500).double(), torch.randint(-1, 9, (500,))
    groups[groups == 4] = 3
    groups[groups == 5] = -1
    groups[0] = 5
    found = group_thresholds(scores, groups, 10, 0.1)
    for group in range(10):
        own = sorted(scores[groups == group].tolist())
        place = math.ceil((len(own) + 1) * 0.9 - 1e-9)
        assert found[group] == (own[place - 1] if place <= len(own) else INF)
    assert found[[4, 5, 9]].tolist() == [INF] * 3
    assert group_thresholds(scores[:0], groups[:0], 2, 0.1).tolist() == [INF] * 2


def test_rare_classes_are_in_every_set():
    """Eight samples are too few for α = 0.1, nine are enough; a class may have none."""
    logits, target = samples(300)
    target = torch.cat([torch.full((8,), 6), torch.full((9,), 5), torch.arange(283) % 5])
    sets = ConformalSets(0.1, score="lac", calibration="class").calibrate(logits, target)
    assert (sets.threshold == INF).tolist() == [False] * 6 + [True] * 2
    new, _ = samples(50)
    new[:, 7] = -1000.0
    new[0, 6] = -INF
    members = sets(new)
    assert members[1:, 6].all()
    assert members[:, 7].all()
    assert not members[0, 6]


def test_class_weight():
    """0 is one threshold for all, 1 that of the class; between, thresholds are finite."""
    logits, target = long_tail()
    make = {w: ConformalSets(0.1, calibration="class", class_weight=w) for w in (0.0, 0.5, 1.0)}
    found = {w: sets.calibrate(logits, target).threshold for w, sets in make.items()}
    marginal = ConformalSets(0.1).calibrate(logits, target).threshold
    assert found[0.0].tolist() == [marginal] * 12
    rare = found[1.0] == INF
    assert rare.tolist() == [False] * 10 + [True, False]
    expected = torch.where(rare, 1.0, found[1.0]) / 2 + marginal / 2
    torch.testing.assert_close(found[0.5], expected)


@pytest.mark.filterwarnings("ignore:.*cannot be covered")
@every_kind
@pytest.mark.parametrize("max_size", [1, 3, 8])
def test_cap(kind, max_size):
    logits, target = samples(400, spread=5.0)
    sets = ConformalSets(0.6, **KINDS[kind], max_size=max_size).calibrate(logits, target)
    members = sets(logits)
    assert members.sum(-1).max() <= max_size
    if kind != "pas" or max_size > 1:
        assert covered(members, target).mean() >= 0.35
    if kind != "pas":
        assert (members <= TopKSets(max_size)(logits)).all()


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_cap_that_leaves_a_class_out(score):
    """The third class is never among the first two; the others can be covered."""
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(100, 3)
    target = torch.tensor([0] * 60 + [1] * 31 + [2] * 9)
    sets = ConformalSets(0.1, score=score, calibration="class", max_size=2)
    with pytest.warns(UserWarning, match=r"1 of 3 classes cannot be .* max_size=2"):
        sets.calibrate(logits, target)
    assert sets(logits[0]).tolist() == [True, True, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ConformalSets(0.1, score=score, calibration="class").calibrate(logits, target)


# Tuning


def test_tuned_raps():
    """Much smaller than APS where half of the rows have a long tail of probabilities."""
    torch.manual_seed(0)
    logits, target = samples(4000, classes=100, spread=5.0)
    logits[::2] /= 4
    known, new = slice(0, 2000), slice(2000, 4000)
    raps = ConformalSets.tuned(logits[known], target[known], 0.1)
    aps = ConformalSets(0.1).calibrate(logits[known], target[known])
    assert raps.penalty > 0
    assert raps(logits[new]).sum() < 0.5 * aps(logits[new]).sum()
    assert covered(raps(logits[new]), target[new]).mean().item() == pytest.approx(0.9, abs=0.03)


def test_tuned_by_hand():
    """k_reg and λ of the samples that are drawn, and the threshold of the others."""
    logits, target = long_tail()
    sets = ConformalSets.tuned(
        logits, target, 0.2, share=0.4, generator=torch.Generator().manual_seed(5)
    )
    order = torch.randperm(900, generator=torch.Generator().manual_seed(5))
    chosen, others = order[:360], order[360:]
    ranks = (logits > logits.gather(1, target[:, None])).sum(1)[chosen] + 1
    assert sets.k_reg == ranks.sort().values[math.ceil(361 * 0.8) - 1]
    sizes = {}
    for penalty in (0.0, 0.001, 0.01, 0.1, 0.2, 0.5):
        tried = ConformalSets(0.2, penalty=penalty, k_reg=sets.k_reg)
        tried.calibrate(logits[chosen], target[chosen])
        sizes[penalty] = tried(logits[chosen]).sum().item()
    assert sets.penalty == min(sizes, key=lambda penalty: sizes[penalty])
    again = ConformalSets(0.2, penalty=sets.penalty, k_reg=sets.k_reg)
    assert sets.threshold == again.calibrate(logits[others], target[others]).threshold


@pytest.mark.parametrize("options", [{"score": "saps"}, {"max_size": 6}, {"randomized": True}])
def test_tuned_options(options):
    logits, target = long_tail()
    sets = ConformalSets.tuned(logits.t(), target, 0.4, dim=0, **options)
    assert all(getattr(sets, name) == value for name, value in options.items())
    assert sets(logits.t()).shape == (12, 900)
    assert sets.penalty > 0 or "score" not in options


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"score": "lac"}, ValueError, ["aps, saps", "'lac'"]),
        ({"share": 0.0}, ValueError, ["share=0.0", "positive"]),
        ({"share": 1.0}, ValueError, ["9 samples to tune", "got 20 and 0", "share=1"]),
        ({"share": 0.3}, ValueError, ["9 samples to tune", "got 6 and 14"]),
        ({"penalty": 0.1}, TypeError, ["chooses", "penalty"]),
        ({"k_reg": 2}, TypeError, ["chooses", "k_reg"]),
        ({"alpha": 0}, ValueError, ["alpha=0", "between 0 and 1"]),
        ({"max_size": 0}, ValueError, ["max_size=0"]),
    ],
)
def test_tuned_errors(options, error, parts):
    with raises(error, *parts):
        ConformalSets.tuned(*samples(30 if "max_size" in options else 20), **options)


# What all kinds share


@every_kind
def test_state(kind):
    """Thresholds and frequencies go with the state dict, in float64 whatever the model has."""
    logits, target = samples(200)
    sets = ConformalSets(0.2, **KINDS[kind]).calibrate(logits, target)
    file = io.BytesIO()
    torch.save(sets.half().state_dict(), file)
    file.seek(0)
    options = {**KINDS[kind], **({"counts": [1] * 8} if kind == "pas" else {})}
    loaded = ConformalSets(0.2, **options)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    torch.manual_seed(0)
    expected = sets(logits)
    torch.manual_seed(0)
    assert torch.equal(loaded(logits), expected)
    torch.manual_seed(0)
    assert torch.equal(copy.deepcopy(sets)(logits), expected)
    assert "threshold=" in repr(sets)
    assert ("one for each of 8 classes" in repr(sets)) == ("calibration" in options)


def test_state_of_the_first_version():
    """It knew neither scores nor calibrations."""
    logits, target = samples(100)
    sets = ConformalSets(0.3).calibrate(logits, target)
    state = sets.state_dict()
    old = {"alpha": 0.3, "penalty": 0.0, "k_reg": 5, "randomized": False, "max_size": None}
    state["_extra_state"] = {"threshold": sets.threshold, "classes": 8, "settings": old}
    loaded = ConformalSets(0.3)
    loaded.load_state_dict(state)
    assert torch.equal(loaded(logits), sets(logits))
    with raises(ValueError, "score=aps", "score=lac", "calibrate again"):
        ConformalSets(0.3, score="lac").load_state_dict(state)


@every_kind
def test_shapes_and_devices(kind):
    logits, target = samples(60)
    sets = ConformalSets(0.4, **KINDS[kind], dim=1)
    sets.calibrate(logits.reshape(3, 20, 8).movedim(-1, 1), target.reshape(3, 20))
    assert sets(logits.reshape(3, 20, 8).movedim(-1, 1)).shape == (3, 8, 20)
    assert sets(torch.randn(5, 8, device="meta")).shape == (5, 8)
    assert sets(torch.randn(0, 8)).shape == (0, 8)
    absent = logits.clone()
    absent[:, 3] = -INF
    assert not sets(absent)[:, 3].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_kind
def test_cuda(kind):
    """Calibrated on either device, used on either; random numbers are those of the device."""
    logits, target = samples(400)
    sets = ConformalSets(0.3, **KINDS[kind])
    if sets.randomized:
        assert sets.calibrate(logits.cuda(), target.cuda())(logits.cuda()).is_cuda
        return
    found = sets.calibrate(logits, target, generator=torch.Generator().manual_seed(0)).threshold
    members = sets(logits)
    assert torch.equal(sets(logits.cuda()).cpu(), members)
    sets.calibrate(logits.cuda(), target.cuda(), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.as_tensor(sets.threshold), torch.as_tensor(found))


@pytest.mark.slow
@every_kind
def test_compile(kind):
    logits, target = samples(60)
    sets = ConformalSets(0.4, **KINDS[kind]).calibrate(logits, target)
    torch._dynamo.reset()
    members = torch.compile(sets, fullgraph=True)(logits)
    if not sets.randomized:
        assert torch.equal(members, sets(logits))


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"score": "APS"}, ValueError, ["aps, lac, pas, saps", "'APS'"]),
        ({"calibration": "classes"}, ValueError, ["class, clustered, marginal", "'classes'"]),
        ({"score": "saps"}, ValueError, ["penalty=0.0", "positive"]),
        ({"score": "lac", "penalty": 0.1}, ValueError, ["'lac'", "penalty=0.1"]),
        ({"score": "lac", "randomized": True}, ValueError, ["'lac'", "randomized=True"]),
        ({"score": "pas"}, ValueError, ["'pas'", "needs counts"]),
        ({"counts": [1, 2]}, ValueError, ["'aps'", "no counts"]),
        ({"score": "pas", "counts": [1, -2]}, ValueError, ["counts", "negative", "-2"]),
        ({"score": "pas", "counts": [0, 0]}, ValueError, ["counts", "at least one"]),
        ({"score": "pas", "counts": [[1, 2]]}, ValueError, ["counts", "(1, 2)"]),
        ({"class_weight": 0.5}, ValueError, ["calibration='class'", "'marginal'"]),
        ({"class_weight": 1.5, "calibration": "class"}, ValueError, ["class_weight=1.5"]),
        ({"class_weight": -1, "calibration": "class"}, ValueError, ["class_weight=-1"]),
    ],
)
def test_parameters(options, error, parts):
    with raises(error, *parts):
        ConformalSets(0.1, **options)


def test_counts_of_other_classes():
    with raises(ValueError, "counts", "got 3", "8 classes"):
        ConformalSets(0.2, score="pas", counts=[1, 2, 3]).calibrate(*samples(60))
