"""Losses for study: the function that they compute, what they count, and training with them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.review import counts
from experiments.study_losses import (
    CountedLoss,
    CountedSmoothTopKLoss,
    PublishedTopKLoss,
    SummationTopKLoss,
)
from test_train_engine import assert_same_weights, stop_at, toy
from topklass.functional import smooth_topk_loss
from topklass.train import Interrupted, Recipe, train, train_all
from topklass.train.criterion import build_loss

ALL = (SummationTopKLoss, PublishedTopKLoss, CountedSmoothTopKLoss)


@pytest.fixture(autouse=True)
def published_code() -> None:
    pytest.importorskip("difftopk")


def problem(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = scale * torch.randn(12, 20, generator=generator)
    return scores, torch.randint(20, (12,), generator=generator)


def gradient(loss: CountedLoss, scores: Tensor, target: Tensor) -> Tensor:
    scores = scores.clone().requires_grad_()
    return torch.autograd.grad(loss(scores, target), scores)[0]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(("k", "tau"), [(2, 1.0), (5, 1.0), (5, 0.3)])
def test_where_nothing_overflows_all_are_the_smooth_loss(make, k, tau):
    scores, target = problem()
    expected = scores.double().requires_grad_()
    exact = smooth_topk_loss(expected, target, k, tau)
    loss = make(k, tau)
    torch.testing.assert_close(loss(scores, target).double(), exact, rtol=1e-5, atol=0)
    (slope,) = torch.autograd.grad(exact, expected)
    torch.testing.assert_close(gradient(loss, scores, target).double(), slope, rtol=1e-3, atol=1e-6)
    assert (loss.losses, loss.gradients, loss.first) == (0, 0, 0)


@pytest.mark.filterwarnings("ignore")  # of that package
@pytest.mark.parametrize("tau", [1.0, 0.1, 0.01])
def test_the_published_loss_is_that_of_its_package(tau):
    from difftopk import SmoothHardTopKLoss

    scores, target = problem(3.0)
    scores[:4, :5] = 10 + 40 * tau  # these switch to the hard loss
    hard = scores.topk(6).values[:, 4] - scores.topk(6).values[:, 5] >= 5 * tau * np.log(1000)
    assert hard.any()
    inside = scores.clone().requires_grad_()
    theirs = SmoothHardTopKLoss(20, 5, tau)(inside, target)
    ours = PublishedTopKLoss(5, tau)
    torch.testing.assert_close(ours(scores, target), theirs.detach())
    (slope,) = torch.autograd.grad(theirs, inside)
    torch.testing.assert_close(gradient(ours, scores, target), slope)


def test_rows_that_overflow_are_left_out_and_counted():
    scores, target = problem()
    scores[3] *= 1e3
    scores[7] *= 1e3
    loss, rest = SummationTopKLoss(5, 0.1), torch.arange(12) % 4 != 3
    rest[11] = True
    value, slope = loss(scores, target), gradient(loss, scores, target)
    kept = SummationTopKLoss(5, 0.1)
    torch.testing.assert_close(value, kept(scores[rest], target[rest]) * 10 / 12)
    assert (slope[[3, 7]] == 0).all()
    torch.testing.assert_close(slope[rest], gradient(kept, scores[rest], target[rest]) * 10 / 12)
    assert (loss.calls, loss.first, loss.losses, loss.gradients) == (1, 1, 2, 0)


class LosesItsGradient(CountedLoss):
    """|s|^½ at 0: the loss is finite, its gradient is not."""

    def rows(self, scores: Tensor, target: Tensor) -> Tensor:
        return scores.sqrt().sum(1)


def test_gradients_that_are_not_finite_count_where_the_loss_is():
    scores = torch.tensor([[1.0, 4.0], [0.0, 1.0], [-1.0, 1.0]])
    loss = LosesItsGradient(1)
    slope = gradient(loss, scores, torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(slope, torch.tensor([[0.5, 0.25], [0.0, 0.0], [0.0, 0.0]]) / 3)
    assert (loss.calls, loss.first, loss.losses, loss.gradients) == (1, 1, 1, 1)


def test_the_first_step_stays():
    loss, (scores, target) = SummationTopKLoss(5, 0.1), problem()
    for factor in (1.0, 1e3, 1.0, 1e3):
        gradient(loss, factor * scores, target)
    assert (loss.calls, loss.first, loss.losses) == (4, 2, 24)


def test_what_is_not_differentiated_does_not_count():
    loss, (scores, target) = SummationTopKLoss(5, 0.1), problem(1e3)
    loss(scores, target)
    with torch.no_grad():
        loss(scores.requires_grad_(), target)
    assert (loss.calls, loss.losses) == (0, 0)


def test_half_precision_is_evaluated_in_single():
    scores, target = problem()
    half = scores.bfloat16()
    for make in ALL:
        value = make(5, 1.0)(half, target)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, make(5, 1.0)(half.float(), target))
        assert gradient(make(5, 1.0), half, target).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["SUMMATION", "CENTRED_SUMMATION", "PUBLISHED", "TOPKLASS"])
def test_recipes_name_them_by_module(name):
    loss = f"experiments.study_losses:{name}"
    recipe = Recipe(loss=loss, tau=0.1)
    criterion = build_loss(loss, recipe.k, torch.ones(9), recipe.loss_options())
    logits, labels = torch.randn(4, 9), torch.arange(4)
    fivefold = 5 * smooth_topk_loss(logits, labels, 5, 0.1)
    torch.testing.assert_close(criterion(logits, labels), fivefold)
    with pytest.raises(ValueError, match="has no epsilon; it takes tau"):
        Recipe(loss=loss, epsilon=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard
def test_other_processes_find_them(tmp_path: Path):
    recipe = Recipe(
        data="glyphs",
        data_options={"classes": 4, "per_class": 8, "size": 16},
        loss="experiments.study_losses:SUMMATION",
        k=2,
        epochs=1,
        batch_size=16,
    )
    runs = {tmp_path / str(seed): recipe.with_changes({"seed": seed}) for seed in (0, 1)}
    train_all(runs, at_once=2)
    assert counts(tmp_path / "1")["calls"] == 2


@pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard
def test_counts_survive_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = Recipe(
        data="toy",
        loss="experiments.study_losses:SUMMATION",
        k=2,
        tau=1e-4,
        epochs=2,
        batch_size=16,
        pad=1,
    )
    train(recipe, tmp_path / "whole", dataset=toy())
    with monkeypatch.context() as patched:
        stop_at(patched, 3, None)
        with pytest.raises(Interrupted):
            train(recipe, tmp_path / "parts", dataset=toy())
    train(recipe, tmp_path / "parts", dataset=toy(), resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    found = counts(tmp_path / "whole")
    assert counts(tmp_path / "parts") == found
    assert found["losses"] > 0 < found["first"]
    assert found["calls"] == 2 * (len(toy().train) // 16)
