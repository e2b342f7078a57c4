"""Bad input raises an error that names what was given and what was expected."""

import math
import re

import numpy as np
import pytest
import torch

import topklass
from losses_table import CLASSES, LOSSES, problem

C = CLASSES
nan, inf = math.nan, math.inf

every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
every_loss_with_k = pytest.mark.parametrize(
    "loss", [x for x in LOSSES if x.takes_k], ids=lambda loss: loss.name
)
every_loss_with_margin = pytest.mark.parametrize(
    "loss", [x for x in LOSSES if x.takes_margin], ids=lambda loss: loss.name
)


def raises(error, *parts):
    """The error's message has these parts, in any order."""
    return pytest.raises(error, match="".join(f"(?=.*{re.escape(part)})" for part in parts))


# Parameters: the constructor raises, and so does the function

PARAMETERS = [
    ("k", 0, ValueError, "at least 1"),
    ("k", -1, ValueError, "at least 1"),
    ("k", 2.0, TypeError, "integer"),
    ("k", True, TypeError, "integer"),
    ("k", "2", TypeError, "integer"),
    ("k", None, TypeError, "integer"),
    ("tau", 0.0, ValueError, "positive"),
    ("tau", -1.0, ValueError, "positive"),
    ("tau", nan, ValueError, "finite"),
    ("tau", inf, ValueError, "finite"),
    ("tau", "1", TypeError, "number"),
    ("epsilon", -0.1, ValueError, "non-negative"),
    ("epsilon", nan, ValueError, "finite"),
    ("epsilon", None, TypeError, "number"),
    ("samples", 0, ValueError, "at least 1"),
    ("samples", 1.5, TypeError, "integer"),
    ("samples", True, TypeError, "integer"),
    ("scale", 0.0, ValueError, "positive"),
    ("scale", -1.0, ValueError, "positive"),
    ("scale", inf, ValueError, "finite"),
    ("gamma", -0.5, ValueError, "non-negative"),
    ("gamma", nan, ValueError, "finite"),
    ("margin", -0.5, ValueError, "non-negative"),
    ("margin", nan, ValueError, "finite"),
    ("margin", True, TypeError, "number"),
    ("reduction", "average", ValueError, "none, mean, sum"),
    ("reduction", None, ValueError, "none, mean, sum"),
    ("label_smoothing", -0.1, ValueError, "from 0 to 1"),
    ("label_smoothing", 1.1, ValueError, "from 0 to 1"),
    ("label_smoothing", nan, ValueError, "from 0 to 1"),
]
CASES = [
    pytest.param(loss, *case, id=f"{loss.name}-{case[0]}={case[1]!r}")
    for loss in LOSSES
    for case in PARAMETERS
    if case[0] in loss.arguments() or case[0] in ("reduction", "label_smoothing")
]


@pytest.mark.parametrize(("loss", "parameter", "value", "error", "expectation"), CASES)
def test_parameter(loss, parameter, value, error, expectation):
    arguments = loss.arguments() | {parameter: value}
    shown = repr(value) if isinstance(value, str) else str(value)
    with raises(error, parameter, shown, expectation):
        loss.module(**arguments)
    if parameter == "k":
        expectation = {"at least 1": "from 1 to 5"}.get(expectation, expectation)
    with raises(error, parameter, shown, expectation):
        loss.function(*problem((3, C)), **arguments)


@every_loss
def test_unknown_option(loss):
    with raises(TypeError, loss.module.__name__, "size_average", "label_smoothing"):
        loss.module(**loss.arguments(), size_average=True)
    with raises(TypeError, "size_average", "label_smoothing"):
        loss(*problem((3, C)), **loss.arguments(), size_average=True)


@every_loss
def test_options_are_keywords(loss):
    with pytest.raises(TypeError):
        loss.module(*loss.arguments().values(), torch.ones(C))


@every_loss_with_k
@pytest.mark.parametrize("k", [C, C + 1])
def test_k_needs_another_class(loss, k):
    arguments = loss.arguments(k=k)
    module = loss.module(**arguments)
    with raises(ValueError, f"k={k}", "from 1 to 5", "6 classes"):
        module(*problem((3, C)))
    with raises(ValueError, f"k={k}", "from 1 to 5", "6 classes"):
        loss(*problem((C,)), **arguments)


# One margin, or weight, for each class


@every_loss_with_margin
@pytest.mark.parametrize("wrong", [-0.25, nan])
def test_margin_of_one_class(loss, wrong):
    arguments = loss.arguments(per_class=True)
    arguments["margin"][3] = wrong
    with raises(ValueError, "margin", "non-negative", str(wrong)):
        loss.module(**arguments)
    with raises(ValueError, "margin", "non-negative", str(wrong)):
        loss(*problem((3, C)), **arguments)
    with raises(ValueError, "margin", "non-negative", str(wrong)):
        loss.module(**(arguments | {"margin": arguments["margin"].tolist()}))


@every_loss_with_margin
@pytest.mark.parametrize(
    "margin", [torch.ones(C, 1), torch.ones(C, dtype=torch.long)], ids=["matrix", "integers"]
)
def test_margin_is_a_vector(loss, margin):
    expected = "margin", "one value per class", str(tuple(margin.shape)), str(margin.dtype)
    with raises(ValueError, *expected):
        loss.module(**(loss.arguments() | {"margin": margin}))
    with raises(ValueError, *expected):
        loss(*problem((3, C)), **(loss.arguments() | {"margin": margin}))


@every_loss_with_margin
@pytest.mark.parametrize("length", [1, C - 1, C + 1])
def test_margins_for_all_classes(loss, length):
    arguments = loss.arguments() | {"margin": torch.ones(length)}
    module = loss.module(**arguments)
    for shape in ((C,), (3, C), (3, C, 2)):
        with raises(ValueError, "margin", "6 classes", f"({length},)"):
            module(*problem(shape))


@every_loss
@pytest.mark.parametrize("shape", [(), (C, 1)], ids=str)
def test_weight_is_a_vector(loss, shape):
    with raises(ValueError, "weight", "each class", str(shape)):
        loss.module(**loss.arguments(), weight=torch.ones(shape))
    with raises(ValueError, "weight", "6 classes", str(shape)):
        loss(*problem((3, C)), **loss.arguments(), weight=torch.ones(shape))
    for wrong, given in (([1.0] * C, "list"), (torch.ones(C, dtype=torch.long), "torch.int64")):
        with raises(TypeError, "weight", "floating-point", given):
            loss.module(**loss.arguments(), weight=wrong)


@every_loss
@pytest.mark.parametrize("shape", [(1,), (C - 1,), (C + 1,)], ids=str)
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_weights_for_all_classes(loss, shape, kind):
    module = loss.module(**loss.arguments(), weight=torch.ones(shape))
    for input_shape in ((C,), (3, C), (3, C, 2)):
        with raises(ValueError, "weight", "6 classes", str(shape)):
            module(*problem(input_shape, kind))


@every_loss_with_margin
@pytest.mark.parametrize("margin", ["1", None, {}])
def test_margin_of_another_type(loss, margin):
    with raises(TypeError, "margin", "a number or a tensor", repr(margin)):
        loss.module(**(loss.arguments() | {"margin": margin}))


@every_loss
def test_ignore_index_does_not_apply_to_probabilities(loss):
    with raises(ValueError, "ignore_index=2", "probabilities"):
        loss(*problem((3, C), "probabilities"), **loss.arguments(), ignore_index=2)


@pytest.mark.parametrize("tau", [1e-40, 1e300])
def test_temperature_out_of_float32(tau):
    with raises(ValueError, f"tau={tau}", "1e-30 to 1e30"):
        topklass.SmoothTopKLoss(tau=tau)


def test_numbers_of_numpy():
    loss = topklass.SmoothTopKLoss(k=np.int64(2), tau=np.float32(0.5), margin=np.float64(1))
    scores, target = problem((3, C))
    expected = topklass.SmoothTopKLoss(k=2, tau=0.5)(scores, target)
    torch.testing.assert_close(loss(scores, target), expected)


# Input and target


@every_loss
@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.bool, torch.complex64], ids=str)
def test_input_is_floating_point(loss, dtype):
    with raises(ValueError, "input", "floating-point", str(dtype)):
        loss(torch.ones(3, C, dtype=dtype), torch.zeros(3, dtype=torch.long), **loss.arguments())


@every_loss
def test_input_has_classes(loss):
    with raises(ValueError, "(C), (N, C) or (N, C, d1, ...)", "()"):
        loss(torch.tensor(1.0), torch.tensor(0), **loss.arguments())


@every_loss
@pytest.mark.parametrize(
    ("shape", "target", "expected"),
    [
        ((C,), (1,), ()),
        ((C,), (C,), ()),
        ((3, C), (), (3,)),
        ((3, C), (4,), (3,)),
        ((3, C), (3, 1), (3,)),
        ((3, C), (3, C), (3,)),
        ((3, C, 2), (3,), (3, 2)),
        ((3, C, 2), (2, 3), (3, 2)),
        ((3, C, 2), (3, C, 2), (3, 2)),
        ((3, C, 2, 2), (3, 4), (3, 2, 2)),
    ],
    ids=str,
)
def test_shape_of_indices(loss, shape, target, expected):
    with raises(ValueError, "target", "class indices", str(shape), str(target), str(expected)):
        loss(torch.randn(shape), torch.zeros(target, dtype=torch.long), **loss.arguments())


@every_loss
@pytest.mark.parametrize(
    ("shape", "target"),
    [((C,), ()), ((C,), (C + 1,)), ((3, C), (3,)), ((3, C), (3, C - 1)), ((3, C, 2), (3, 2, C))],
    ids=str,
)
def test_shape_of_probabilities(loss, shape, target):
    with raises(ValueError, "target", "class probabilities", str(shape), str(target)):
        loss(torch.randn(shape), torch.ones(target) / C, **loss.arguments())


@every_loss
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(3,), (3, C)], ids=str)
def test_dtype_of_target(loss, dtype, shape):
    with raises(TypeError, "target", "integers", str(dtype)):
        loss(torch.randn(3, C), torch.ones(shape, dtype=dtype), **loss.arguments())


@every_loss
@pytest.mark.parametrize("wrong", [C, 1000, -1, -100])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_target_out_of_range(loss, wrong, label_smoothing):
    module = loss.module(**loss.arguments(), ignore_index=-7, label_smoothing=label_smoothing)
    for shape in ((C,), (3, C), (3, C, 2)):
        input, target = problem(shape)
        target.view(-1)[-1] = wrong
        with raises(IndexError, "target", "from 0 to 5", "ignore_index=-7", str(wrong)):
            module(input, target)


# Operators


@pytest.mark.parametrize(
    "operator", [topklass.log_esp, topklass.topk_marginals, topklass.noised_topk]
)
class TestOperator:
    @pytest.mark.parametrize("k", [0, -1, 5])
    def test_k_out_of_range(self, operator, k):
        with raises(ValueError, f"k={k}", "from 1 to 4"):
            operator(torch.randn(3, 4), k)

    @pytest.mark.parametrize("k", [True, 2.0, "2", None])
    def test_k_is_an_integer(self, operator, k):
        with raises(TypeError, "k must be an integer", repr(k)):
            operator(torch.randn(3, 4), k)

    @pytest.mark.parametrize("scores", [torch.tensor(1.0), torch.ones(3, 0)], ids=str)
    def test_scores_have_classes(self, operator, scores):
        with raises(ValueError, "scores", "(..., classes)", str(tuple(scores.shape))):
            operator(scores, 1)

    def test_scores_are_floating_point(self, operator):
        with raises(TypeError, "scores", "floating-point", "torch.int64"):
            operator(torch.tensor([1, 2]), 1)
        with raises(TypeError, "scores", "tensor", "list"):
            operator([1.0, 2.0], 1)


@pytest.mark.parametrize(
    ("parameter", "value", "error", "expectation"),
    [case for case in PARAMETERS if case[0] in ("epsilon", "samples")],
)
def test_noised_topk_parameter(parameter, value, error, expectation):
    with raises(error, parameter, str(value), expectation):
        topklass.noised_topk(torch.randn(3, 4), 2, **{parameter: value})


@pytest.mark.parametrize("shape", [(), (3, C), (3, C, 4), (C, 3, 5), (5, 3, C)], ids=str)
def test_noise_of_wrong_shape(shape):
    expected = "noise", f"(3, {C}, 5)", str(shape)
    with raises(ValueError, *expected):
        topklass.noised_topk(torch.randn(3, C), 2, samples=5, noise=torch.zeros(shape))
    with raises(ValueError, *expected):
        module = topklass.NoisedTopKLoss(2, samples=5)
        module(*problem((3, C)), noise=torch.zeros(shape))


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


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        (torch.zeros(4), r"target\.long\(\)"),
        (torch.zeros(4, 6).long(), r"target\.float\(\)"),
        (torch.zeros(4, 1).long(), r"target\.squeeze\(-1\)"),
    ],
)
def test_hints_for_targets(target, hint):
    with pytest.raises(ValueError, match=hint):
        topklass.functional.smooth_topk_loss(torch.zeros(4, 6), target, 2)


def test_hint_for_classes_in_the_last_dimension():
    with pytest.raises(ValueError, match=r"input\.movedim\(-1, 1\)"):
        topklass.functional.smooth_topk_loss(torch.zeros(4, 7, 6), torch.zeros(4, 7).long(), 2)


def test_a_mistyped_option_lists_the_right_ones():
    with pytest.raises(TypeError, match=r"no option 'margn'; it takes k, tau, margin, weight"):
        topklass.SmoothTopKLoss(margn=1.0)


def test_extras_are_found_as_attributes():
    assert topklass.metrics.TopKAccuracy is not None
    with pytest.raises(AttributeError, match="no attribute 'metric'"):
        _ = topklass.metric
