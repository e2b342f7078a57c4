"""What training holds out, and messages about settings that were set."""

import pytest
import torch

from topklass.data import Dataset, Split
from topklass.train import Recipe
from topklass.train.problem import with_validation


def dataset(counts):
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    train = Split(torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8), labels)
    return Dataset("toy", train, train, tuple(f"class {index}" for index in range(len(counts))))


def test_a_tenth_is_held_out():
    assert len(with_validation(dataset([50, 50]), Recipe(k=1)).validation) == 10
    assert len(with_validation(dataset([50, 50]), Recipe(k=1, validation=20)).validation) == 20


def test_a_rare_class_keeps_half_of_its_images():
    """By default; with the same number of each class it would have lost all."""
    data = with_validation(dataset([200, 6]), Recipe(k=1))
    assert data.counts.tolist() == [197, 3]
    assert torch.bincount(data.validation.labels).tolist() == [3, 3]


@pytest.mark.parametrize("fewest", [0, 1])
def test_too_few_images_of_a_class(fewest):
    with pytest.raises(ValueError, match=f"toy has no validation .*'class 1' has {fewest}\\. Add"):
        with_validation(dataset([20, fewest, 20]), Recipe(k=1))


@pytest.mark.parametrize("size", [40, 41])
def test_more_than_there_are(size):
    with pytest.raises(ValueError, match=f"validation must be less than the 40 .*toy, got {size}"):
        with_validation(dataset([20, 20]), Recipe(k=1, validation=size))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"validation": -3}, "validation must be at least 0, got -3"),
        ({"seed": 10**20}, f"seed must be from -{2**63} to {2**64 - 1}, got {10**20}"),
        ({"seed": "abc"}, "seed must be from .* got 'abc'"),
        ({"epochs": "ten"}, "epochs must be at least 1, got 'ten'"),
    ],
)
def test_settings_out_of_bounds(setting, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**setting)


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_all_seeds_within_the_bounds_work(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Recipe(seed=seed).seed)
