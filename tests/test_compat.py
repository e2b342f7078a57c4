"""The published names of the SVM losses, against numbers of the published code.

``published_svm.json`` has values and gradients of smooth-topk (Berrada et al. 2018), commit
12c1645, in float64: "cases" where it follows the paper, "departures" where it does not, and "bags",
the losses of ``attention_mil.train(topk.svm.SmoothTop1SVM)``.
"""

import copy
import inspect
import itertools
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attention_mil
from test_bad_input import raises
from topklass import compat
from topklass.functional import smooth_topk_loss, topk_hinge_loss
from topklass.integrations import hf_loss

PUBLISHED = json.loads((Path(__file__).parent / "published_svm.json").read_text(encoding="utf-8"))
ALL = [getattr(compat, name) for name in compat.__all__]

every_loss = pytest.mark.parametrize("kind", ALL)


def name_of(case: dict) -> str:
    return f"{case['loss']} {case['n_classes']} {case['arguments']}"


def found_and_published(case: dict) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Value and gradient, ours and theirs."""
    scores = torch.tensor(case["scores"], dtype=torch.float64, requires_grad=True)
    criterion = getattr(compat, case["loss"])(case["n_classes"], **case["arguments"])
    loss = criterion(scores, torch.tensor(case["labels"]))
    theirs = [torch.tensor(case[x], dtype=torch.float64) for x in ("value", "gradient")]
    return (loss.detach(), torch.autograd.grad(loss, scores)[0]), tuple(theirs)


@pytest.mark.parametrize("case", PUBLISHED["cases"], ids=name_of)
def test_equal_to_the_published_code(case):
    found, published = found_and_published(case)
    torch.testing.assert_close(found, published, rtol=0, atol=2e-9)


def loss_by_subsets(scores: Tensor, label: int, k: int) -> Tensor:
    """Equation 9 with τ = 1: all lists of k classes, and those that hold the label."""
    lists = list(itertools.combinations(range(len(scores)), k))
    sums = torch.stack([scores[list(x)].sum() / k + (label not in x) for x in lists])
    right = torch.tensor([label in x for x in lists])
    return sums.logsumexp(0) - sums[right].logsumexp(0)


@pytest.mark.parametrize("case", PUBLISHED["departures"], ids=name_of)
def test_follows_the_paper_where_the_published_code_does_not(case):
    """Two rows where it switches to the hard loss, and its gradient for k = 1."""
    scores = torch.tensor(case["scores"], dtype=torch.float64, requires_grad=True)
    loss = loss_by_subsets(scores[0], case["labels"][0], case["arguments"].get("k", 1))
    expected = loss.detach(), torch.autograd.grad(loss, scores)[0]
    found, published = found_and_published(case)
    torch.testing.assert_close(found, expected)
    assert (expected[1] - published[1]).abs().max() > 1e-4


def test_no_jump_where_the_published_code_switches():
    """At a gap of τ log(thresh), whatever thresh is."""
    for thresh in (10.0, 1e3):
        gaps = math.log(thresh) + torch.tensor([-1e-6, 1e-6], dtype=torch.float64)
        scores, labels = torch.stack([gaps, 0 * gaps], 1), torch.tensor([0])
        criterion = compat.SmoothTop1SVM(2, thresh=thresh)
        below, above = (criterion(row[None], labels) for row in scores)
        assert 0 < below - above < 1e-6


def test_what_the_switch_changes_for_two_classes():
    """Less than 0.003 at τ = 1, the case of pathology code."""
    gaps = math.log(1e3) + torch.arange(0, 20, 0.01, dtype=torch.float64)
    scores, zeros = torch.stack([gaps, 0 * gaps], 1), torch.zeros(len(gaps), dtype=torch.long)
    smooth, hard = compat.SmoothTop1SVM(2), compat.MaxTop1SVM(2)
    smooth.reduction = hard.reduction = "none"
    for labels in (zeros, zeros + 1):
        change = smooth(scores, labels) - hard(scores, labels)
        assert change.min() > 0
        assert change.max() < 0.003


def test_absent_classes_and_one_class_more_than_guesses():
    scores = torch.tensor([[0.5, 1.0, -1.0, 2.0, 0.0, 3.0]])
    absent = torch.cat([scores, torch.full((1, 2), -math.inf)], 1)
    expected = loss_by_subsets(scores[0].double(), 2, 5).float()
    labels = torch.tensor([2])
    torch.testing.assert_close(compat.SmoothTopkSVM(6)(scores, labels), expected)
    torch.testing.assert_close(compat.SmoothTopkSVM(8)(absent, labels), expected)


def test_one_line_over_our_losses():
    scores, labels = torch.randn(5, 9), torch.arange(5)
    for found, expected in [
        (compat.SmoothTop1SVM(9, 0.5, 2.0), smooth_topk_loss(scores, labels, 1, 2.0, 0.5)),
        (compat.SmoothTopkSVM(9, 0.5, 2.0, 3), smooth_topk_loss(scores, labels, 3, 2.0, 0.5)),
        (compat.MaxTop1SVM(9, 0.5), topk_hinge_loss(scores, labels, 1, 0.5)),
        (compat.MaxTopkSVM(9, 0.5, 3), topk_hinge_loss(scores, labels, 3, 1.5) / 3),
    ]:
        torch.testing.assert_close(found(scores, labels), expected)


def test_constructors():
    """The published arguments in the published order; thresh, an attribute there, comes last."""
    signatures = {
        "SmoothTop1SVM": {"alpha": None, "tau": 1.0, "thresh": 1e3},
        "SmoothTopkSVM": {"alpha": None, "tau": 1.0, "k": 5, "thresh": 1e3},
        "MaxTop1SVM": {"alpha": None},
        "MaxTopkSVM": {"alpha": None, "k": 5},
    }
    for kind in ALL:
        parameters = list(inspect.signature(kind).parameters.values())
        assert parameters[0].name == "n_classes"
        assert {p.name: p.default for p in parameters[1:]} == signatures[kind.__name__]
        assert list(signatures[kind.__name__]) == [p.name for p in parameters[1:]]


@every_loss
def test_moves_and_copies(kind):
    criterion = kind(7)
    scores, labels = torch.randn(4, 7), torch.arange(4)
    expected = criterion(scores, labels)
    for twin in (pickle.loads(pickle.dumps(criterion)), copy.deepcopy(criterion), criterion.cpu()):
        torch.testing.assert_close(twin(scores, labels), expected)
    assert criterion.to(torch.float64)(scores.double(), labels).dtype == torch.float64
    assert {x.device.type for x in kind(7).to("meta").buffers()} == {"meta"}


@every_loss
def test_state_dict_of_the_published_code(kind):
    """A model that holds the loss has the key ``labels`` in its checkpoints."""
    criterion = kind(7)
    assert list(criterion.state_dict()) == ["labels"]
    criterion.load_state_dict({"labels": torch.arange(7)}, strict=True)


def test_temperature_can_be_set():
    """As it is when τ changes in training."""
    scores, labels = torch.randn(4, 7), torch.arange(4)
    criterion = compat.SmoothTopkSVM(7, k=2)
    criterion.tau = 0.1
    expected = compat.SmoothTopkSVM(7, k=2, tau=0.1)(scores, labels)
    torch.testing.assert_close(criterion(scores, labels), expected)


def test_options_of_our_losses():
    """They have what Hugging Face's Trainer needs."""
    scores, labels = torch.randn(4, 7), torch.tensor([0, 3, -100, 6])
    criterion = compat.MaxTopkSVM(7, k=2)
    mean = hf_loss(criterion)(scores, labels)
    torch.testing.assert_close(hf_loss(criterion)(scores, labels, num_items_in_batch=3), mean)


@every_loss
def test_errors(kind):
    with raises(ValueError, "n_classes must be at least 1", "n_classes=0"):
        kind(0)
    with raises(TypeError, "n_classes must be an integer", "2.0"):
        kind(2.0)
    with raises(ValueError, "alpha", "-1"):
        kind(7, alpha=-1.0)
    with raises(ValueError, "8 classes", "n_classes", "got 7", "(4, 7)"):
        kind(8)(torch.randn(4, 7), torch.arange(4))


def test_attention_model_of_bags_trains_as_with_the_published_loss():
    """One changed import: the same losses, and every bag is recognised."""
    model, losses = attention_mil.train(compat.SmoothTop1SVM)
    assert losses == pytest.approx(PUBLISHED["bags"], abs=1e-8)
    assert losses[-1] < losses[0] / 4
    assert all(
        int(model(bag, label)[0].argmax()) == int(label) for bag, label in attention_mil.bags()
    )
    assert "instance_loss.labels" in model.state_dict()
