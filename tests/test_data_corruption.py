"""Datasets, subsets and label noise: counts, rates, records, and what stays as it is."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topklass.data import (
    Dataset,
    Split,
    Superclasses,
    balanced_subset,
    block_noise,
    generator,
    hold_out,
    long_tail,
    superclass_noise,
    symmetric_noise,
)

few_examples = settings(max_examples=30, deadline=None, derandomize=True)


def dataset(classes: int = 10, per_class: int = 20, groups: int = 2) -> Dataset:
    """Every image is another one: its first two pixels count the training images."""
    labels = torch.arange(classes).repeat_interleave(per_class)[torch.randperm(classes * per_class)]
    numbers = torch.arange(len(labels))
    images = torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0] = torch.stack([numbers // 256, numbers % 256], 1).to(torch.uint8)
    of_class = torch.randperm(classes) % groups
    test = Split(images[:classes], torch.arange(classes))
    names = tuple(f"class {index}" for index in range(classes))
    kinds = {"kind": Superclasses(tuple(map(str, range(groups))), of_class)}
    return Dataset("toy", Split(images, labels), test, names, superclasses=kinds)


def numbers(split: Split) -> torch.Tensor:
    high, low = split.images[:, 0, 0].long().unbind(1)
    return high * 256 + low


# Splits and datasets


def test_a_split_is_a_map_style_dataset():
    split = dataset().train
    image, label = split[7]
    assert torch.equal(image, split.images[7])
    assert label == split.labels[7]
    assert len(list(split)) == len(split) == 200
    loader = torch.utils.data.DataLoader(split, batch_size=8)
    assert next(iter(loader))[1].tolist() == split.labels[:8].tolist()


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2).long(), "uint8 tensor"),
        (torch.zeros(2, 2, 4, 4).byte(), torch.zeros(2).long(), "1 or 3 channels"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(2), "int64"),
        (torch.zeros(2, 3, 4, 4).byte(), [0, 1], "got list"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(3).long(), "each of the 2 images"),
    ],
)
def test_bad_splits(images, labels, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Split(images, labels)


def test_bad_datasets():
    data = dataset()
    with pytest.raises(ValueError, match="labels of test must be from 0 to 9, got 10"):
        replace(data, test=Split(data.test.images, data.test.labels + 1))
    with pytest.raises(ValueError, match="'class 0' more than once"):
        replace(data, classes=("class 0",) * 10)
    with pytest.raises(ValueError, match="'kind' are given for 10 classes, but there are 11"):
        replace(data, classes=(*data.classes, "another"))
    with pytest.raises(ValueError, match="superclasses must be from 0 to 0, got 1"):
        Superclasses(("one",), torch.tensor([0, 1]))


def test_streams_of_different_keys_differ():
    keys = [(0,), (1,), (0, 0), (0, "a"), (0, "a", 1), (0, "0")]
    draws = {tuple(torch.rand(4, generator=generator(*key)).tolist()) for key in keys}
    assert len(draws) == len(keys)


@pytest.mark.parametrize("seed", ["0", 0.5, None, True, torch.tensor(0)])
def test_seeds_are_integers(seed):
    with pytest.raises(TypeError, match="seed must be an integer, got"):
        hold_out(dataset(), 10, seed=seed)


def test_seeds_of_numpy_are_those_of_python():
    draws = [torch.rand(4, generator=generator(seed, "a")).tolist() for seed in (7, np.int64(7))]
    assert draws[0] == draws[1]


# Subsets


@few_examples
@given(st.integers(1, 200), st.integers(0, 3))
def test_held_out_images_are_balanced_and_no_longer_trained_on(size, seed):
    data = dataset()
    divided = hold_out(data, size, seed)
    counts = torch.bincount(divided.validation.labels, minlength=10)
    assert len(divided.validation) == size
    assert counts.max() - counts.min() <= 1
    both = torch.cat([numbers(divided.train), numbers(divided.validation)])
    assert both.sort().values.tolist() == list(range(200))
    for split in (divided.train, divided.validation):
        assert torch.equal(data.train.labels[numbers(split)], split.labels)
    assert torch.equal(divided.counts, 20 - counts)


def test_a_second_validation_set_is_an_error():
    with pytest.raises(ValueError, match="toy has a validation set already"):
        hold_out(hold_out(dataset(), 10), 10)


def test_balanced_subsets_are_nested_and_balanced():
    data = dataset()
    previous: set[int] = set()
    for size in (1, 9, 10, 25, 60, 200):
        part = balanced_subset(data, size, seed=3)
        chosen = set(numbers(part.train).tolist())
        assert len(chosen) == len(part.train) == size
        assert chosen > previous
        assert part.counts.max() - part.counts.min() <= 1
        assert torch.equal(data.train.labels[numbers(part.train)], part.train.labels)
        previous = chosen


def test_a_class_with_too_few_images_is_named():
    tail = long_tail(dataset(), 10)
    with pytest.raises(ValueError, match="take 5 of 'class 6', which has 4 training images"):
        balanced_subset(tail, 50)
    with pytest.raises(ValueError, match="size must be from 1 to 200"):
        balanced_subset(dataset(), 201)


@pytest.mark.parametrize(
    ("imbalance", "total"), [(10, 19573), (50, 12608), (100, 10847), (200, 9502)]
)
def test_exponential_tails_have_the_published_sizes(imbalance, total):
    """Those of CIFAR-100-LT."""
    labels = torch.arange(100).repeat_interleave(500)
    split = Split(torch.zeros(50000, 1, 1, 1, dtype=torch.uint8), labels)
    names = tuple(map(str, range(100)))
    tail = long_tail(Dataset("cifar100", split, split, names), imbalance)
    assert int(tail.counts.sum()) == len(tail.train) == total
    assert tail.counts[0] == 500
    assert tail.counts[-1] == 500 // imbalance
    assert len(tail.test) == 50000


def test_no_class_loses_all_its_images():
    assert long_tail(dataset(), 1e6).counts.min() == 1


def test_bad_tails():
    with pytest.raises(ValueError, match="imbalance must be at least 1"):
        long_tail(dataset(), 0.5)


# Noise

NOISES = {
    "superclass": lambda data, p, **options: superclass_noise(data, p, **options),
    "block": lambda data, p, **options: block_noise(data, p, **options),
    "symmetric": lambda data, p, **options: symmetric_noise(data, p, **options),
}
every_noise = pytest.mark.parametrize("noise", NOISES.values(), ids=list(NOISES))


def group_of_class(kind: str, data: Dataset) -> torch.Tensor:
    classes = len(data.classes)
    groups = {
        "superclass": data.superclasses["kind"].of_class,
        "block": torch.arange(classes) // 5,
        "symmetric": torch.zeros(classes, dtype=torch.int64),
    }
    return groups[kind]


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("classes", [10, 12])
def test_labels_are_drawn_uniformly_within_their_group(kind, p, classes):
    """Every pair of old and new label occurs as often as its binomial distribution allows."""
    each = 4000
    data = dataset(classes, each)
    noisy = NOISES[kind](data, p, seed=1)
    group = group_of_class(kind, data)
    old, new = data.train.labels, noisy.train.labels
    assert torch.equal(group[old], group[new])
    assert torch.equal(noisy.train.images, data.train.images)
    same_group = group[:, None] == group
    expected = p * same_group / same_group.sum(1, keepdim=True) + (1 - p) * torch.eye(classes)
    seen = torch.zeros(classes, classes).index_put_((old, new), torch.ones(len(old)), True) / each
    error = (expected * (1 - expected) / each).sqrt()
    assert ((seen - expected).abs() <= 4.5 * error).all()
    assert noisy.record["steps"][0]["changed"] == int((old != new).sum())


@every_noise
def test_clean_labels_stay_clean(noise):
    data = hold_out(dataset(), 50)
    noisy = noise(data, 1.0)
    assert not torch.equal(noisy.train.labels, data.train.labels)
    for name in ("validation", "test"):
        assert torch.equal(noisy.splits[name].labels, data.splits[name].labels)


@every_noise
def test_noise_is_a_function_of_its_seed(noise):
    data = dataset()
    first, again, other = (noise(data, 0.5, seed=seed).train.labels for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@every_noise
@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), "half", True])
def test_a_probability_is_from_0_to_1(noise, p):
    with pytest.raises(ValueError, match="p must be a probability"):
        noise(dataset(), p)


def test_superclass_noise_needs_superclasses():
    data = dataset()
    with pytest.raises(ValueError, match="toy has no superclasses"):
        superclass_noise(replace(data, superclasses={}), 0.1)


def test_the_record_says_how_it_was_made():
    data = hold_out(dataset(), 50, seed=4)
    data = long_tail(data, 5, seed=5)
    data = superclass_noise(data, 0.5, seed=6)
    record = json.loads(json.dumps(data.record))
    assert record["name"] == "toy"
    steps = record["steps"]
    assert [step["step"] for step in steps] == ["hold_out", "long_tail", "superclass_noise"]
    assert [step["seed"] for step in steps] == [4, 5, 6]
    assert steps[1]["imbalance"] == 5
    assert (steps[2]["p"], steps[2]["by"]) == (0.5, "kind")
