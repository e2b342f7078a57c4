"""Bad input raises an error that names what was given and what was expected."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import topklass
from contract_cases import C, every_loss, name
from losses_table import LOSSES, problem
from topklass.functional import smooth_topk_loss

nan, inf = math.nan, math.inf

every_loss_with_k = pytest.mark.parametrize("loss", [x for x in LOSSES if x.takes_k], ids=name)
every_loss_with_margin = pytest.mark.parametrize(
    "loss", [x for x in LOSSES if x.takes_margin], ids=name
)


def raises(error, *parts):
    """The error's message has these parts, in any order."""
    return pytest.raises(error, match="".join(f"(?=.*{re.escape(part)})" for part in parts))


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.long)


# What cross-entropy refuses, too: the same type of error, with a better message

LOGITS, INDICES, CHANCES = torch.zeros(3, C), zeros(3), torch.ones(3, C) / C
MISTAKES = [
    # logits, target, options, parts of the message
    (LOGITS.long(), INDICES, {}, ["logits", "floating-point", "torch.int64"]),
    (LOGITS.bool(), INDICES, {}, ["logits", "floating-point", "torch.bool"]),
    (LOGITS.to(torch.complex64), INDICES, {}, ["logits", "floating-point", "torch.complex64"]),
    (torch.tensor(1.0), zeros(), {}, ["class dimension", "()"]),
    (LOGITS.tolist(), INDICES, {}, ["logits", "tensor", "list"]),
    (LOGITS, [0, 1, 2], {}, ["target", "tensor", "list"]),
    (LOGITS, None, {}, ["target", "tensor", "NoneType"]),
    (LOGITS[0], zeros(C), {}, ["class indices", "(6,)", "()"]),
    (LOGITS, zeros(), {}, ["class indices", "(3, 6)", "(3,)", "()"]),
    (LOGITS, zeros(4), {}, ["class indices", "(3, 6)", "(3,)", "(4,)"]),
    (LOGITS, zeros(3, 1), {}, ["class indices", "(3,)", "(3, 1)", "target.squeeze(-1)"]),
    (LOGITS, zeros(3, C), {}, ["class indices", "(3,)", "(3, 6)", "target.float()"]),
    (torch.zeros(3, C, 2), zeros(3), {}, ["class indices", "(3, 6, 2)", "(3, 2)", "(3,)"]),
    (torch.zeros(3, C, 2), zeros(2, 3), {}, ["class indices", "(3, 2)", "(2, 3)"]),
    (torch.zeros(3, 7, C), zeros(3, 7), {}, ["class indices", "(3, 6)", "(3, 7)", "dim=-1"]),
    (torch.zeros(3, C, 2, 2), zeros(3, 4), {}, ["class indices", "(3, 2, 2)", "(3, 4)"]),
    (LOGITS[0], torch.tensor(0.0), {}, ["class probabilities", "(6,)", "()"]),
    (LOGITS, torch.zeros(3), {}, ["class probabilities", "(3, 6)", "(3,)", "target.long()"]),
    (LOGITS, torch.ones(3, C - 1), {}, ["class probabilities", "(3, 6)", "(3, 5)"]),
    (torch.zeros(3, C, 2), torch.ones(3, 2, C), {}, ["class probabilities", "(3, 2, 6)"]),
    (LOGITS, INDICES.bool(), {}, ["target", "integers", "torch.bool"]),
    (LOGITS, CHANCES.bool(), {}, ["target", "integers", "torch.bool"]),
    (LOGITS, INDICES.to(torch.complex64), {}, ["target", "integers", "torch.complex64"]),
    (LOGITS, INDICES + C, {}, ["target", "from 0 to 5", "ignore_index=-100", "got 6"]),
    (LOGITS, INDICES - 1, {}, ["target", "from 0 to 5", "ignore_index=-100", "got -1"]),
    (LOGITS, INDICES - 100, {"ignore_index": -7}, ["ignore_index=-7", "got -100"]),
    (LOGITS, INDICES + C, {"label_smoothing": 0.1}, ["target", "from 0 to 5", "got 6"]),
    (torch.zeros(3, C, 2), zeros(3, 2) + 9, {}, ["target", "from 0 to 5", "got 9"]),
    (LOGITS, CHANCES, {"ignore_index": 2}, ["ignore_index=2", "probabilities"]),
    (LOGITS, INDICES, {"ignore_index": 1.5}, ["ignore_index", "integer", "1.5"]),
    (LOGITS, INDICES, {"ignore_index": None}, ["ignore_index", "integer", "None"]),
    (LOGITS, INDICES, {"reduction": "average"}, ["none, mean, sum", "'average'"]),
    (LOGITS, INDICES, {"reduction": None}, ["none, mean, sum", "None"]),
    (LOGITS, INDICES, {"label_smoothing": 1.1}, ["label_smoothing", "from 0 to 1", "1.1"]),
    (LOGITS, INDICES, {"label_smoothing": "1"}, ["label_smoothing", "number", "'1'"]),
    (LOGITS, INDICES, {"weight": torch.ones(())}, ["weight", "6 classes", "()"]),
    (LOGITS, INDICES, {"weight": torch.ones(C, 1)}, ["weight", "6 classes", "(6, 1)"]),
    (LOGITS, INDICES, {"weight": torch.ones(C - 1)}, ["weight", "6 classes", "(5,)"]),
    (LOGITS, CHANCES, {"weight": torch.ones(C + 1)}, ["weight", "6 classes", "(7,)"]),
    (LOGITS, INDICES, {"weight": [1.0] * C}, ["weight", "tensor", "list"]),
    (LOGITS, INDICES, {"weight": zeros(C)}, ["weight", "floating-point", "torch.int64"]),
    (LOGITS, INDICES.to("meta"), {}, ["target is on meta", "logits are on cpu"]),
    (LOGITS, INDICES, {"weight": torch.ones(C, device="meta")}, ["weight is on meta", "on cpu"]),
    (LOGITS, INDICES, {"size_averaged": True}, ["size_averaged"]),
]


@pytest.mark.parametrize(
    ("logits", "target", "options", "parts"),
    [pytest.param(*mistake, id=" ".join(mistake[3])) for mistake in MISTAKES],
)
def test_mistakes_that_cross_entropy_refuses(logits, target, options, parts):
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        F.cross_entropy(logits, target, **options)
    with raises(theirs.type, *parts) as ours:
        smooth_topk_loss(logits, target, 2, **options)
    older = (NotImplementedError, RuntimeError)  # PyTorch 2.6 raises the base class
    assert ours.type is theirs.type or (ours.type, theirs.type) == older


@every_loss
def test_every_loss_checks_its_call(loss):
    """Those of the table above are checked in one place, which every loss must call."""
    arguments = loss.arguments()
    with raises(NotImplementedError, "logits must be a floating-point tensor"):
        loss(LOGITS.long(), INDICES, **arguments)
    with raises(ValueError, "class indices", "(4,)"):
        loss(LOGITS, zeros(4), **arguments)
    with raises(IndexError, "target", "from 0 to 5", "got 6"):
        loss(LOGITS, INDICES + C, **arguments)
    with raises(RuntimeError, "weight", "6 classes"):
        loss(LOGITS, INDICES, **arguments, weight=torch.ones(C - 1))
    with raises(IndexError, "dim", "from -2 to 1", "dim=2"):
        loss(LOGITS, INDICES, **arguments, dim=2)
    with raises(TypeError, "size_average"):
        loss.module(**arguments, size_average=True)
    with pytest.raises(TypeError):  # options are keywords
        loss.module(*arguments.values(), torch.ones(C))


@pytest.mark.parametrize(("dim", "error"), [(2, IndexError), (-3, IndexError), (0.5, TypeError)])
def test_dim(dim, error):
    with raises(error, "dim", str(dim)):
        smooth_topk_loss(LOGITS, INDICES, 2, dim=dim)


@pytest.mark.parametrize("value", [-0.1, nan])
def test_label_smoothing_below_0(value):
    """Cross-entropy takes it without a word."""
    with raises(RuntimeError, "label_smoothing", "from 0 to 1", str(value)):
        smooth_topk_loss(LOGITS, INDICES, 2, label_smoothing=value)


# Parameters: the constructor raises, and so does the function

PARAMETERS = [
    ("k", 0, ValueError, "at least 1"),
    ("k", 2.0, TypeError, "integer"),
    ("k", True, TypeError, "integer"),
    ("tau", 0.0, ValueError, "positive"),
    ("tau", nan, ValueError, "finite"),
    ("tau", "1", TypeError, "number"),
    ("epsilon", -0.1, ValueError, "non-negative"),
    ("epsilon", None, TypeError, "number"),
    ("samples", 0, ValueError, "at least 1"),
    ("samples", 1.5, TypeError, "integer"),
    ("scale", 0.0, ValueError, "positive"),
    ("scale", inf, ValueError, "finite"),
    ("gamma", -0.5, ValueError, "non-negative"),
    ("gamma", nan, ValueError, "finite"),
    ("margin", -0.5, ValueError, "non-negative"),
    ("margin", nan, ValueError, "finite"),
    ("margin", True, TypeError, "number"),
    ("reduction", "average", ValueError, "none, mean, sum"),
    ("ignore_index", 0.5, TypeError, "integer"),
    ("label_smoothing", 1.1, RuntimeError, "from 0 to 1"),
]
CASES = [
    pytest.param(loss, *case, id=f"{loss.name}-{case[0]}={case[1]!r}")
    for loss in LOSSES
    for case in PARAMETERS
    if case[0] in loss.arguments()
    or (loss is LOSSES[0] and case[0] in ("reduction", "ignore_index", "label_smoothing"))
]


@pytest.mark.parametrize(("loss", "parameter", "value", "error", "expectation"), CASES)
def test_parameter(loss, parameter, value, error, expectation):
    arguments = loss.arguments() | {parameter: value}
    shown = repr(value) if isinstance(value, str) else str(value)
    with raises(error, parameter, shown, expectation):
        loss.module(**arguments)
    with raises(error, parameter, shown, "" if parameter == "k" else expectation):
        loss.function(*problem((3, C)), **arguments)


@every_loss_with_k
def test_k_needs_another_class(loss):
    arguments = loss.arguments(k=C)
    module = loss.module(**arguments)
    with raises(ValueError, f"k={C}", "from 1 to 5", "6 classes"):
        module(*problem((3, C)))
    with raises(ValueError, f"k={C}", "from 1 to 5", "6 classes"):
        loss(*problem((C,)), **arguments)


@pytest.mark.parametrize("tau", [1e-40, 1e300])
def test_temperature_out_of_float32(tau):
    with raises(ValueError, f"tau={tau}", "1e-30 to 1e30"):
        topklass.SmoothTopKLoss(tau=tau)


def test_numbers_of_numpy():
    loss = topklass.SmoothTopKLoss(k=np.int64(2), tau=np.float32(0.5), margin=np.float64(1))
    scores, target = problem((3, C))
    expected = topklass.SmoothTopKLoss(k=2, tau=0.5)(scores, target)
    torch.testing.assert_close(loss(scores, target), expected)


# One margin for each class


@pytest.mark.parametrize("wrong", [-0.25, nan])
def test_margin_of_one_class(wrong):
    margin = torch.ones(C)
    margin[3] = wrong
    for given in (margin, margin.tolist()):
        with raises(ValueError, "margin", "non-negative", str(wrong)):
            topklass.SmoothTopKLoss(2, margin=given)
    with raises(ValueError, "margin", "non-negative", str(wrong)):
        smooth_topk_loss(LOGITS, INDICES, 2, margin=margin)


@pytest.mark.parametrize("margin", [torch.ones(C, 1), zeros(C)], ids=["matrix", "integers"])
def test_margin_is_a_vector(margin):
    expected = "margin", "one value per class", str(tuple(margin.shape)), str(margin.dtype)
    with raises(ValueError, *expected):
        topklass.SmoothTopKLoss(2, margin=margin)
    with raises(ValueError, *expected):
        smooth_topk_loss(LOGITS, INDICES, 2, margin=margin)


@every_loss_with_margin
def test_margins_for_all_classes(loss):
    module = loss.module(**(loss.arguments() | {"margin": torch.ones(C - 1)}))
    for shape in ((C,), (3, C), (3, C, 2)):
        with raises(ValueError, "margin", "6 classes", "(5,)"):
            module(*problem(shape))


@pytest.mark.parametrize("margin", ["1", None, {}])
def test_margin_of_another_type(margin):
    with raises(TypeError, "margin", "a number or a tensor", repr(margin)):
        topklass.SmoothTopKLoss(2, margin=margin)


# Operators


@pytest.mark.parametrize(
    "operator",
    [topklass.log_esp, topklass.topk_marginals, topklass.noised_topk, topklass.expected_topk],
)
def test_operator(operator):
    scores = torch.randn(3, 4)
    for k in (0, 5):
        with raises(ValueError, f"k={k}", "from 1 to 4"):
            operator(scores, k)
    with raises(ValueError, "k=4", "from 1 to 3"):
        operator(scores, 4, dim=0)
    for k in (True, 2.0, "2", None):
        with raises(TypeError, "k must be an integer", repr(k)):
            operator(scores, k)
    with raises(ValueError, "scores", "at least one class", "()"):
        operator(torch.tensor(1.0), 1)
    with raises(ValueError, "scores", "at least one class", "(3, 0)"):
        operator(torch.ones(3, 0), 1)
    with raises(TypeError, "scores", "floating-point", "torch.int64"):
        operator(torch.tensor([1, 2]), 1)
    with raises(TypeError, "scores", "tensor", "list"):
        operator([1.0, 2.0], 1)
    with raises(IndexError, "dim", "from -2 to 1", "dim=2"):
        operator(scores, 1, dim=2)


@pytest.mark.parametrize(
    ("parameter", "value", "error", "expectation"),
    [case for case in PARAMETERS if case[0] in ("epsilon", "samples")],
)
def test_noised_topk_parameter(parameter, value, error, expectation):
    with raises(error, parameter, str(value), expectation):
        topklass.noised_topk(torch.randn(3, 4), 2, **{parameter: value})


@pytest.mark.parametrize("shape", [(), (3, C), (C, 3, 5), (3, C, 2, 5), (3, C, 0)], ids=str)
def test_noise_of_wrong_shape(shape):
    expected = "noise", "sample", str(shape)
    with raises(ValueError, *expected):
        topklass.noised_topk(torch.randn(3, C), 2, noise=torch.zeros(shape))
    with raises(ValueError, *expected):
        topklass.NoisedTopKLoss(2)(*problem((3, C)), noise=torch.zeros(shape))


# Classes of unequal size


@pytest.mark.parametrize("shape", [(), (2, 3), (0,)], ids=str)
def test_counts_are_a_vector(shape):
    with raises(ValueError, "counts", "one per class", str(shape)):
        topklass.class_margins(torch.ones(shape))


@pytest.mark.parametrize("wrong", [-2.0, nan])
def test_counts_are_counts(wrong):
    with raises(ValueError, "counts", "negative", str(wrong)):
        topklass.class_margins(torch.tensor([1.0, wrong]))


@pytest.mark.parametrize("largest", [-0.1, nan, inf])
def test_largest_margin(largest):
    with raises(ValueError, "largest", "non-negative and finite", str(largest)):
        topklass.class_margins(torch.tensor([1, 2]), largest)


def test_extras_are_found_as_attributes():
    assert topklass.metrics.TopKAccuracy is not None
    with pytest.raises(AttributeError, match="no attribute 'metric'"):
        _ = topklass.metric


# Advice


def test_a_mistyped_name_suggests_the_right_one():
    """Python does so in tracebacks, if the error says where the name was sought."""
    with pytest.raises(AttributeError, match="SmoothTopkLoss") as error:
        topklass.SmoothTopkLoss  # noqa: B018
    assert (error.value.name, error.value.obj) == ("SmoothTopkLoss", topklass)


def test_counts_are_no_margins():
    with raises(ValueError, "torch.int64", "class_margins(counts)"):
        topklass.LDAMLoss(torch.tensor([5, 3, 2]))


def test_raps_is_a_penalty():
    with raises(ValueError, "score='raps'", 'score="aps" with a penalty'):
        topklass.ConformalSets(score="raps")
