"""Thresholds and sets of published code, on the same scores.

``published_sets.json`` has what the authors' code gives for the samples of ``long_tail``: commit
3f70778 of class-conditional-conformal (Ding et al. 2023), and for prevalence-adjusted scores commit
4fea246 of long-tail-conformal (Ding, Fermanian and Salmon 2025). Their scores are 1 − p and
1 − p/π; None is ∞. Clusters are those of ``clustered_conformal(scores, labels, 0.1,
frac_clustering=0.5, num_clusters=2)``.

TorchCP is compared where it is installed. As a whole it needs torch_geometric, transformers and
torchsort, of which classification needs none.
"""

import importlib
import json
import math
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from set_samples import long_tail
from topklass import ConformalSets
from topklass.sets.scores import label_scores
from topklass.sets.thresholds import (
    cluster_classes,
    clusters_and_share,
    group_thresholds,
    places,
    thresholds_of_clusters,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of TorchCP
PUBLISHED = json.loads((Path(__file__).parent / "published_sets.json").read_text())
CLASSES, ALPHA = 12, 0.1
COUNTS = [1000 // (c + 1) for c in range(CLASSES)]
OPTIONS = {
    "lac": {"score": "lac"},
    "aps": {"score": "aps"},
    "raps": {"score": "aps", "penalty": 0.05, "k_reg": 2},
    "pas": {"score": "pas", "counts": COUNTS},
}
every_score = pytest.mark.parametrize("name", OPTIONS)


def authors(name: str, what: str) -> Tensor:
    """Thresholds of the authors on the scale of ours: −p instead of 1 − p."""
    found = PUBLISHED[name][what]
    values = [math.inf if q is None else q for q in (found if isinstance(found, list) else [found])]
    shift = 1 if name in ("lac", "pas") else 0
    return torch.tensor(values, dtype=torch.float64) - shift


def found(name: str, **more) -> tuple[Tensor, float]:
    """Our thresholds, and the mean size of sets of new samples."""
    sets = ConformalSets(ALPHA, **OPTIONS[name], **more).calibrate(*long_tail())
    size = sets(long_tail(200, seed=1)[0]).sum(1).double().mean().item()
    return torch.as_tensor(sets.threshold, dtype=torch.float64).reshape(-1), size


# The authors


@every_score
@pytest.mark.parametrize("calibration", ["marginal", "class"])
def test_thresholds_and_sets_of_the_authors(name, calibration):
    thresholds, size = found(name, calibration=calibration)
    torch.testing.assert_close(thresholds, authors(name, calibration), rtol=0, atol=1e-7)
    assert size == pytest.approx(PUBLISHED[name]["sizes"][calibration], abs=1e-9)
    assert (calibration == "class") == bool((thresholds == math.inf).any())


@every_score
def test_interpolation_of_the_authors(name):
    """They take 1 for ∞, which is not the largest score of RAPS: only its rare class differs."""
    thresholds, size = found(name, calibration="class", class_weight=0.5)
    expected = authors(name, "interpolated")
    rare = authors(name, "class") == math.inf
    assert rare.sum() == 1
    torch.testing.assert_close(thresholds[~rare], expected[~rare], rtol=0, atol=1e-7)
    if name == "raps":
        assert thresholds[rare] - expected[rare] == pytest.approx(0.5 * 0.05 * (CLASSES - 2))
    else:
        torch.testing.assert_close(thresholds[rare], expected[rare], rtol=0, atol=1e-7)
        assert size == pytest.approx(PUBLISHED[name]["sizes"]["interpolated"], abs=1e-9)


@every_score
def test_clusters_of_the_authors(name):
    """With the part of the samples that they draw: six rare classes, and two clusters."""
    sets = ConformalSets(ALPHA, **OPTIONS[name])
    logits, labels = long_tail()
    scores = sets._scores(logits, None).gather(1, labels[:, None]).squeeze(1)
    first = torch.from_numpy(np.random.RandomState(0).uniform(size=len(labels)) < 0.5)
    stream = torch.Generator().manual_seed(3)
    clusters = cluster_classes(scores[first], labels[first], CLASSES, ALPHA, 2, stream)
    assert (clusters == -1).sum() == 6
    thresholds = thresholds_of_clusters(scores[~first], labels[~first], clusters, ALPHA)
    torch.testing.assert_close(thresholds, authors(name, "clustered"), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("counts", "alpha", "number", "used", "of"),
    [
        ([50] * 100, 0.1, 14, 28, 50),  # what their get_clustering_parameters returns
        ([5] * 10 + [60] * 90, 0.1, 2, 4, 9),
        ([20] * 10 + [60] * 90, 0.05, 5, 11, 20),
        ([3] * 40, 0.1, 0, 0, 9),
    ],
)
def test_number_of_clusters(counts, alpha, number, used, of):
    assert clusters_and_share(torch.tensor(counts), alpha) == (number, used / of)


# TorchCP


@pytest.fixture(scope="module")
def torchcp():
    """Scores and predictors of TorchCP."""
    pytest.importorskip("sklearn")
    if (spec := find_spec("torchcp")) is None:
        pytest.skip("torchcp is not installed")
    kept = {name: module for name, module in sys.modules.items() if name.startswith("torchcp")}
    for name in ("torchcp", "torchcp.classification"):  # without running their __init__
        package = types.ModuleType(name)
        below = name.split(".")[1:]
        package.__path__ = [str(Path(p, *below)) for p in spec.submodule_search_locations]
        sys.modules[name] = package
    parts = [importlib.import_module(f"torchcp.classification.{x}") for x in ("score", "predictor")]
    yield types.SimpleNamespace(**{k: v for part in parts for k, v in vars(part).items()})
    for name in [name for name in sys.modules if name.startswith("torchcp")]:
        del sys.modules[name]
    sys.modules.update(kept)


def calibrated(predictor, logits, labels):
    predictor.calculate_threshold(logits, labels)
    return predictor


@pytest.mark.parametrize("by_class", [False, True], ids=["marginal", "class"])
def test_lac_of_torchcp(torchcp, by_class):
    logits, labels = long_tail()
    new, _ = long_tail(200, seed=1)
    kind = torchcp.ClassConditionalPredictor if by_class else torchcp.SplitPredictor
    theirs = calibrated(kind(torchcp.LAC(), alpha=ALPHA), logits, labels)
    ours = ConformalSets(ALPHA, score="lac", calibration="class" if by_class else "marginal")
    threshold = torch.as_tensor(ours.calibrate(logits, labels).threshold)
    torch.testing.assert_close(
        threshold + 1, theirs.q_hat, check_dtype=False, rtol=1e-6, atol=0
    )  # by class they keep thresholds in float32
    theirs.q_hat = theirs.q_hat.double() + 1e-7
    assert torch.equal(ours(new), theirs.predict_with_logits(new).bool())


@pytest.mark.parametrize(
    ("name", "options", "arguments"),
    [
        ("APS", {}, {}),
        ("RAPS", {"penalty": 0.05, "k_reg": 2}, {"penalty": 0.05, "kreg": 2}),
        ("SAPS", {"score": "saps", "penalty": 0.1}, {"weight": 0.1}),
    ],
)
@pytest.mark.parametrize("u", [0.3, 0.8])
def test_randomized_scores_of_torchcp(torchcp, monkeypatch, name, options, arguments, u):
    """With the same U: they subtract U times the label's own probability, we add it.

    For the scores of calibration labels of rank 1 their SAPS adds it, which has the same law.
    """
    logits, labels = long_tail()
    theirs = getattr(torchcp, name)(**arguments)
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.tensor(1 - u).double())
    uniform = torch.full((len(labels), 1), u, dtype=torch.float64)
    ours = label_scores(logits, **{"score": "aps", **options}, uniform=uniform)
    torch.testing.assert_close(theirs(logits), ours)
    known, expected = theirs(logits, labels), ours.gather(1, labels[:, None]).squeeze(1)
    if name == "SAPS":
        first = logits.argmax(1) == labels
        known = torch.where(first, logits.softmax(1).amax(1) - known, known)
    torch.testing.assert_close(known, expected)


@pytest.mark.parametrize(
    ("name", "options"), [("APS", {}), ("RAPS", {"penalty": 0.05, "k_reg": 2})]
)
def test_plain_scores_of_torchcp_are_ours_with_u_of_one(torchcp, name, options):
    logits, labels = long_tail()
    arguments = {"penalty": 0.05, "kreg": 2} if options else {}
    theirs = getattr(torchcp, name)(randomized=False, **arguments)(logits, labels)
    ones = torch.ones(len(labels), 1, dtype=torch.float64)
    ours = label_scores(logits, "aps", **options, uniform=ones).gather(1, labels[:, None])
    torch.testing.assert_close(theirs, ours.squeeze(1))


def test_plain_saps_of_torchcp_has_two_scores_for_a_first_label(torchcp):
    """0 in calibration, the largest probability in prediction: their sets cover less than 1 − α."""
    stream = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(4000, 10, generator=stream)
    labels = logits.softmax(1).multinomial(1, generator=stream).squeeze(1)
    score = torchcp.SAPS(randomized=False, weight=0.1)
    right = logits.argmax(1)
    assert score(logits, right).count_nonzero() == 0
    torch.testing.assert_close(
        score(logits).gather(1, right[:, None]).squeeze(1), logits.softmax(1).amax(1)
    )
    half = len(labels) // 2
    covered = []
    theirs = calibrated(torchcp.SplitPredictor(score, alpha=0.2), logits[:half], labels[:half])
    ours = ConformalSets(0.2, score="saps", penalty=0.1).calibrate(logits[:half], labels[:half])
    for members in (theirs.predict_with_logits(logits[half:]).bool(), ours(logits[half:])):
        covered.append(members.gather(1, labels[half:, None]).double().mean().item())
    assert covered[0] < 0.6
    assert covered[1] > 0.78


def test_clusters_of_torchcp(torchcp):
    """Its clusters are ours; classes without one have ∞, where the authors take all samples."""
    logits, labels = long_tail()
    theirs = torchcp.ClusteredPredictor(
        torchcp.LAC(), alpha=ALPHA, ratio_clustering=0.5, num_clusters=2
    )
    torch.manual_seed(0)
    theirs = calibrated(theirs, logits, labels)
    scores = label_scores(logits, "lac").gather(1, labels[:, None]).squeeze(1)
    first, stream = theirs.idx1, torch.Generator().manual_seed(0)
    clusters = cluster_classes(scores[first], labels[first], CLASSES, ALPHA, 2, stream)
    assert torch.equal(clusters == -1, theirs.cluster_assignments == -1)
    ours = thresholds_of_clusters(scores[~first], labels[~first], clusters, ALPHA)
    inside = clusters >= 0
    assert 0 < inside.sum() < CLASSES
    torch.testing.assert_close(ours[inside] + 1, theirs.q_hat[inside].double(), rtol=1e-6, atol=0)
    assert (theirs.q_hat[~inside] == math.inf).all()
    everything = group_thresholds(scores[~first], labels[~first] * 0, 1, ALPHA)
    assert (ours[~inside] == everything).all()


def test_quantile_of_torchcp_by_class_is_rounded(torchcp):
    """It has α in float32: at α = 0.29 and 299 samples 213.00001 becomes 214."""
    scores = torch.arange(1.0, 300.0)
    theirs = torchcp.ClassConditionalPredictor(torchcp.LAC())
    found = theirs._calculate_conformal_value(scores, torch.tensor(0.29))
    assert (float(found), int(places(torch.tensor(299), 0.29))) == (214, 213)
