"""Every kind of sets: k labels, k on average, and what all of them share."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import Tensor

from set_samples import covered, samples
from test_bad_input import raises
from topklass import AverageKSets, ConformalSets, TopKSets

INF = math.inf
SETS = {
    "k": lambda: TopKSets(2),
    "average k": lambda: AverageKSets(2),
    "plain": lambda: ConformalSets(0.2),
    "randomized": lambda: ConformalSets(0.2, randomized=True),
}


@pytest.fixture(params=SETS)
def sets(request: pytest.FixtureRequest):
    """Each kind of sets, not yet calibrated."""
    return SETS[request.param]()


# Fixed k


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_topk_by_sorting(k, dtype):
    logits = torch.randint(-2, 3, (50, 8)).to(dtype)
    for row, members in zip(logits.tolist(), TopKSets(k)(logits), strict=True):
        expected = sorted(range(8), key=lambda i: (-row[i], i))[:k]
        assert members.nonzero().squeeze(1).tolist() == sorted(expected)


# k on average


@pytest.mark.parametrize("k", [0.1, 1, 2.5, 3, 8])
def test_average_k_is_exact(k):
    logits, _ = samples(40)
    sets = AverageKSets(k).calibrate(logits)
    members = sets(logits)
    assert members.sum().item() == 40 * k
    probabilities = logits.softmax(-1)
    assert k == 8 or probabilities[members].min() > probabilities[~members].max()
    assert math.exp(sets.threshold) == pytest.approx(probabilities[members].min().item())


def test_average_k_rounds_to_whole_labels():
    logits, _ = samples(7)
    assert AverageKSets(1.5).calibrate(logits)(logits).sum().item() in (10, 11)


def test_average_k_covers_more_than_top_k():
    """With true probabilities no sets of that average size cover more (Lorieul et al.)."""
    logits, target = samples(20_000, spread=3.0)
    average = covered(AverageKSets(2).calibrate(logits)(logits), target).mean()
    assert average > covered(TopKSets(2)(logits), target).mean() + 0.01


def test_average_k_takes_all_ties():
    logits = torch.zeros(3, 4)
    assert AverageKSets(2).calibrate(logits)(logits).all()


def test_average_k_of_unlikely_classes():
    """Probabilities below the smallest number of float64 still have an order."""
    logits = torch.tensor([[0.0, -1000.0, -2000.0, -3000.0]])
    assert AverageKSets(2).calibrate(logits)(logits).tolist() == [[True, True, False, False]]


# Absent classes, shapes, precision


def test_absent_classes_are_in_no_set(sets):
    logits, target = samples(60)
    sets.calibrate(logits, target)
    new, _ = samples(50)
    new[:, [0, 5]] = -INF
    new[0] = -INF
    new[1, 1:] = -INF
    new[1, 0] = 0.0
    members = sets(new)
    assert not members[new == -INF].any()
    assert members[2:].any()
    assert members[1].sum() <= 1


def test_absent_classes_with_a_threshold_that_takes_all():
    logits, target = samples(60)
    sets = ConformalSets(0.02, penalty=1.0, k_reg=1).calibrate(logits, target)
    sets.threshold = 100.0
    logits[:, 3] = -INF
    assert torch.equal(sets(logits), logits > -INF)


def test_calibration_with_absent_classes():
    """The same as with fewer classes, and a label that is absent is never covered."""
    logits, target = samples(99, classes=6)
    wider = torch.cat([logits, torch.full((99, 2), -INF, dtype=torch.float64)], -1)
    for make in (lambda: ConformalSets(0.2), lambda: AverageKSets(2)):
        narrow, wide = make().calibrate(logits, target), make().calibrate(wider, target)
        assert narrow.threshold == pytest.approx(wide.threshold)
        assert torch.equal(wide(wider)[:, :6], narrow(logits))
    target[:30] = 7
    with raises(ValueError, "80 of 99", "only 69", "present"):
        ConformalSets(0.2).calibrate(wider, target)
    empty = torch.cat([wider, torch.full((1, 8), -INF, dtype=torch.float64)])
    assert AverageKSets(2).calibrate(empty)(empty).sum() == 200
    assert torch.equal(AverageKSets(7).calibrate(wider)(wider), wider > -INF)


def test_leading_dimensions(sets):
    logits, target = samples(60)
    if isinstance(sets, ConformalSets) and sets.randomized:
        sets = ConformalSets(0.2)
    expected = sets.calibrate(logits, target)(logits)
    shaped = copy.deepcopy(sets).calibrate(logits.reshape(3, 4, 5, 8), target.reshape(3, 4, 5))
    assert torch.equal(shaped(logits.reshape(3, 4, 5, 8)).reshape(60, 8), expected)
    assert torch.equal(sets(logits[7]), expected[7])


@pytest.mark.parametrize("name", SETS)
def test_dim(name):
    """Sequences as long as there are classes: only ``dim`` tells them apart."""
    last, target = samples(64)
    last, target = last.reshape(8, 8, 8), target.reshape(8, 8)

    def found(dim: int, logits: Tensor) -> Tensor:
        sets = SETS[name]()
        assert sets.dim == -1
        sets.dim = dim
        torch.manual_seed(1)
        return sets.calibrate(logits, target)(logits)

    expected = found(-1, last)
    assert torch.equal(found(2, last), expected)
    for dim in (0, 1, -2):
        assert torch.equal(found(dim, last.movedim(-1, dim)), expected.movedim(-1, dim))
    with raises(IndexError, "dim=3", "from -3 to 2"):
        found(3, last)


def test_dim_is_an_argument():
    made = TopKSets(2, dim=1), AverageKSets(2, dim=1), ConformalSets(0.2, dim=1)
    for sets in made:
        assert sets.dim == 1
        assert "dim=1" in repr(sets)


def test_state_of_another_dim():
    """The threshold does not depend on where the classes are."""
    logits, target = samples(100)
    sets = ConformalSets(0.3).calibrate(logits, target)
    other = ConformalSets(0.3, dim=0)
    other.load_state_dict(sets.state_dict())
    assert torch.equal(other(logits.t()), sets(logits).t())


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
def test_no_samples(sets, shape):
    sets.calibrate(*samples(60))
    members = sets(torch.randn(shape))
    assert members.shape == shape
    assert members.dtype == torch.bool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precision(sets, dtype):
    """Sets are found in float64, whatever the logits' own precision."""
    logits, target = samples(100)
    logits = logits.to(dtype)
    torch.manual_seed(1)
    members = sets.calibrate(logits, target)(logits)
    torch.manual_seed(1)
    assert torch.equal(sets.calibrate(logits.double(), target)(logits.double()), members)


def test_leaves_logits_alone(sets):
    logits, target = samples(60)
    before = logits.clone()
    members = sets.calibrate(logits.requires_grad_(), target)(logits)
    assert not members.requires_grad
    assert torch.equal(logits, before)


def test_probabilities_as_logarithms():
    """Averaged over crops, say; −inf is a probability of 0."""
    logits, target = samples(200)
    members = ConformalSets(0.2).calibrate(logits, target)(logits)
    logarithms = logits.softmax(-1).log()
    assert torch.equal(ConformalSets(0.2).calibrate(logarithms, target)(logarithms), members)


# Randomness, state, devices


def test_generator():
    logits, target = samples(100)
    state = torch.get_rng_state()

    def found(first: int, second: int) -> Tensor:
        sets = ConformalSets(0.3, randomized=True)
        sets.calibrate(logits, target, generator=torch.Generator().manual_seed(first))
        return sets(logits, generator=torch.Generator().manual_seed(second))

    assert torch.equal(found(1, 2), found(1, 2))
    assert not torch.equal(found(1, 2), found(1, 3))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "make", [lambda: AverageKSets(2), lambda: ConformalSets(0.3, penalty=0.1)], ids=["k", "alpha"]
)
def test_state(make):
    """The threshold goes with the state dict, also inside a model, and with copies."""
    logits, target = samples(100)
    sets = make().calibrate(logits, target)
    expected = sets(logits)
    model, file = torch.nn.Sequential(torch.nn.Identity(), sets), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.nn.Sequential(torch.nn.Identity(), make())
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for again in (loaded, copy.deepcopy(sets), pickle.loads(pickle.dumps(sets))):
        assert torch.equal(again(logits), expected)
    assert f"threshold={sets.threshold}" in repr(sets)


def test_state_of_other_settings():
    state = ConformalSets(0.3).calibrate(*samples(100)).state_dict()
    with raises(ValueError, "alpha=0.3", "alpha=0.2", "calibrate again"):
        ConformalSets(0.2).load_state_dict(state)
    with raises(ValueError, "penalty=0.0", "penalty=0.1"):
        ConformalSets(0.3, penalty=0.1).load_state_dict(state)


def test_reads_no_values_off_the_cpu(sets):
    """Tensors on "meta" have no values: whatever would wait for a device raises."""
    sets.calibrate(*samples(60))
    assert sets(torch.randn(5, 8, device="meta")).shape == (5, 8)


@pytest.mark.slow
def test_compile(sets):
    logits, target = samples(60)
    sets.calibrate(logits, target)
    torch._dynamo.reset()
    members = torch.compile(sets, fullgraph=True)(logits)
    assert members.shape == logits.shape
    if not getattr(sets, "randomized", False):
        assert torch.equal(members, sets(logits))


# Bad input


@pytest.mark.parametrize("make", [lambda: AverageKSets(2), ConformalSets], ids=["k", "alpha"])
def test_calibrate_first(make):
    sets = make()
    with raises(RuntimeError, type(sets).__name__, "calibrate"):
        sets(torch.randn(3, 8))


@pytest.mark.parametrize("make", [lambda: AverageKSets(2), ConformalSets], ids=["k", "alpha"])
def test_other_number_of_classes(make):
    sets = make()
    sets.calibrate(*samples(60))
    with raises(ValueError, type(sets).__name__, "8 classes", "got 7"):
        sets(torch.randn(3, 7))


@pytest.mark.parametrize("wrong", [math.nan, INF])
def test_logits_are_finite(sets, wrong):
    logits, target = samples(60)
    sets.calibrate(logits, target)
    logits[3, 4] = wrong
    with raises(ValueError, "logits", "finite", str(wrong)):
        sets(logits)
    if not isinstance(sets, TopKSets):
        with raises(ValueError, "logits", "finite", str(wrong)):
            sets.calibrate(logits, target)


def test_logits_are_scores(sets):
    with raises(TypeError, "logits", "floating-point", "torch.int64"):
        sets(torch.ones(3, 8, dtype=torch.long))
    with raises(ValueError, "logits", "at least one class", "()"):
        sets(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("target", "error", "parts"),
    [
        (torch.zeros(60), RuntimeError, ["(60, 8)", "(60,)", "long"]),
        (torch.rand(60, 8), TypeError, ["integers", "torch.float32"]),
        (torch.zeros(60, dtype=torch.bool), RuntimeError, ["integers", "torch.bool"]),
        ([0] * 60, TypeError, ["class indices", "list"]),
        (torch.zeros(59, dtype=torch.long), ValueError, ["(60,)", "(59,)"]),
        (torch.zeros(60, 8, dtype=torch.long), RuntimeError, ["(60,)", "(60, 8)"]),
        (torch.full((60,), 8), IndexError, ["from 0 to 7", "got 8"]),
        (torch.full((60,), -100), IndexError, ["from 0 to 7", "got -100"]),
    ],
)
def test_target(target, error, parts):
    with raises(error, "target", *parts):
        ConformalSets(0.2).calibrate(samples(60)[0], target)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)
def test_target_of_other_integers(dtype):
    logits, target = samples(60)
    expected = ConformalSets(0.2).calibrate(logits, target).threshold
    assert ConformalSets(0.2).calibrate(logits, target.to(dtype)).threshold == expected


@pytest.mark.parametrize(
    ("make", "error", "parts"),
    [
        (lambda: ConformalSets(0.0), ValueError, ["alpha=0.0", "between 0 and 1"]),
        (lambda: ConformalSets(1.0), ValueError, ["alpha=1.0", "between 0 and 1"]),
        (lambda: ConformalSets(1.5), ValueError, ["alpha=1.5", "between 0 and 1"]),
        (lambda: ConformalSets(math.nan), ValueError, ["alpha=nan"]),
        (lambda: ConformalSets("0.1"), TypeError, ["alpha", "'0.1'"]),
        (lambda: ConformalSets(penalty=-0.1), ValueError, ["penalty=-0.1", "non-negative"]),
        (lambda: ConformalSets(k_reg=0), ValueError, ["k_reg=0", "at least 1"]),
        (lambda: ConformalSets(max_size=0), ValueError, ["max_size=0", "at least 1"]),
        (lambda: ConformalSets(max_size=2.5), TypeError, ["max_size", "integer"]),
        (lambda: AverageKSets(0), ValueError, ["k=0", "positive"]),
        (lambda: AverageKSets(INF), ValueError, ["k=inf", "finite"]),
        (lambda: TopKSets(0), ValueError, ["k=0", "at least 1"]),
        (lambda: TopKSets(2.0), TypeError, ["k", "integer"]),
    ],
)
def test_parameters(make, error, parts):
    with raises(error, *parts):
        make()


def test_k_for_the_number_of_classes():
    with raises(ValueError, "k=9", "from 1 to 8"):
        TopKSets(9)(torch.randn(3, 8))
    with raises(ValueError, "k=8.5", "(3, 8)"):
        AverageKSets(8.5).calibrate(torch.randn(3, 8))
    with raises(ValueError, "k=0.1", "(3, 8)"):
        AverageKSets(0.1).calibrate(torch.randn(3, 8))
    with raises(ValueError, "k=2", "(0, 8)"):
        AverageKSets(2).calibrate(torch.randn(0, 8))


def test_probabilities_are_noticed():
    logits, target = torch.randn(50, 6), torch.randint(6, (50,))
    for sets in (ConformalSets(0.2), AverageKSets(2)):
        with pytest.warns(UserWarning, match=r"probabilities\.log\(\)"):
            sets.calibrate(logits.softmax(1), target)
        sets.calibrate(logits.softmax(1).log(), target)
        sets.calibrate(logits, target)
