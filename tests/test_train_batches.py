"""Batches: a function of seed, epoch and step, the same after an interruption and on any rank."""

import pytest
import torch

from topklass.train.batches import EvaluationBatches, TrainingBatches, shared_steps

IMAGES = torch.arange(50).view(50, 1, 1, 1).expand(50, 1, 4, 4).to(torch.uint8)
LABELS = torch.arange(50) % 7


def shifted(images: torch.Tensor, stream: torch.Generator) -> torch.Tensor:
    return images + torch.randint(100, (len(images), 1, 1, 1), generator=stream, dtype=torch.uint8)


def batches(seed: int = 0, rank: int = 0, processes: int = 1) -> TrainingBatches:
    loader = TrainingBatches(IMAGES, LABELS, 8, seed, shifted)
    loader.share(rank, processes, torch.device("cpu"))
    return loader


def assert_same(first, second):
    assert len(first) == len(second)
    for (images, labels), (others, other_labels) in zip(first, second, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_an_epoch_holds_every_sample_at_most_once():
    loader = TrainingBatches(IMAGES, LABELS, 8, seed=0)
    epoch = list(loader)
    assert len(epoch) == len(loader) == 6
    seen = torch.cat([images[:, 0, 0, 0] for images, _ in epoch])
    assert len(seen.unique()) == 48
    labels = torch.cat([labels for _, labels in epoch])
    assert torch.equal(labels, LABELS[seen.long()])


def test_epochs_and_seeds_differ_and_repeat():
    loader = batches()
    epochs = [list(loader), list(loader)]
    assert not torch.equal(epochs[0][0][1], epochs[1][0][1])
    again = batches()
    assert_same(epochs[0], list(again))
    assert_same(epochs[1], list(again))
    assert not torch.equal(epochs[0][0][1], next(iter(batches(seed=1)))[1])


@pytest.mark.parametrize("done", [0, 1, 5, 6, 7, 11, 12])
def test_continued_where_it_was_left(done):
    whole, first = batches(), batches()
    expected = [*whole, *whole, *whole]
    iterator = iter(first)
    for step in range(done):
        if step and step % len(first) == 0:
            iterator = iter(first)
        next(iterator)
    second = batches(seed=0)
    second.load_state_dict(first.state_dict())
    rest = [*second, *second] if done >= 6 else [*second, *second, *second]
    assert_same(rest[: 18 - done], expected[done:])


def test_processes_share_each_batch():
    whole = list(batches())
    shares = [list(batches(rank=rank, processes=2)) for rank in range(2)]
    for (images, labels), *parts in zip(whole, *shares, strict=True):
        for rank, (part, part_labels) in enumerate(parts):
            assert torch.equal(part, images[rank::2])
            assert torch.equal(part_labels, labels[rank::2])


def test_evaluation_sees_every_sample_once():
    for processes in (1, 3):
        seen, numbers = [], set()
        for rank in range(processes):
            loader = EvaluationBatches(IMAGES, LABELS, 16)
            loader.share(rank, processes, torch.device("cpu"))
            parts = [images[:, 0, 0, 0] for images, _ in loader]
            assert len(parts) == len(loader)
            numbers.add(len(loader))
            seen += parts
        assert len(numbers) == 1
        assert torch.equal(torch.cat(seen).sort().values, IMAGES[:, 0, 0, 0])


def test_processes_evaluate_as_many_batches():
    """In pieces, a network is gathered for each batch: nobody may come alone."""
    for samples in range(20):
        for processes in range(1, min(samples, 5) + 1):
            for size in (1, 4, 8, 64):
                shares = [shared_steps(samples, size, rank, processes) for rank in range(processes)]
                assert len({len(steps) for steps in shares}) == 1
                lengths = [len(step) for steps in shares for step in steps]
                assert 1 <= min(lengths) <= max(lengths) <= max(1, size // processes) + 1
                seen = torch.cat([step for steps in shares for step in steps])
                assert seen.sort().values.tolist() == list(range(samples))


def test_errors():
    with pytest.raises(ValueError, match="1 images to validate on for 2 processes"):
        EvaluationBatches(IMAGES[:1], LABELS[:1], 8).share(0, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="lower the batch size"):
        TrainingBatches(IMAGES, LABELS, 64, seed=0)
    with pytest.raises(ValueError, match="multiple of the number of processes"):
        batches(processes=3)
