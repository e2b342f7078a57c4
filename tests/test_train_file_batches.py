"""Batches from files: a function of seed, epoch and index, for any workers and processes."""

from functools import partial

import pytest
import torch

from image_folders import CLASSES, write_folder
from topklass.data import (
    Dataset,
    ImageFiles,
    Split,
    fixed_views,
    generator,
    random_view,
    read_image_folder,
)
from topklass.train.file_batches import FileEvaluationBatches, FileTrainingBatches, UnreadableError
from topklass.train.file_check import require_readable, unreadable, unreadable_images
from topklass.train.file_views import centre_view, several_views, training_view, worker_count
from topklass.train.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
RECIPE = Recipe(crop=12, resize=15, batch_size=20, k=2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return read_image_folder(write_folder(tmp_path_factory.mktemp("images")))


def batches(dataset, workers: int = 0, rank: int = 0, processes: int = 1, seed: int = 3):
    train = dataset.train
    loader = FileTrainingBatches(
        train.images, train.labels, 20, seed, training_view(RECIPE), workers
    )
    loader.share(rank, processes, CPU)
    return loader


def assert_same(first, second):
    for (images, labels), (others, other_labels) in zip(first, second, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_views_by_hand(dataset):
    loader = batches(dataset)
    for epoch in range(2):
        order = torch.randperm(len(dataset.train), generator=generator(3, "order", epoch))
        for step, (images, labels) in enumerate(loader):
            chosen = order[20 * step : 20 * (step + 1)]
            assert torch.equal(labels, dataset.train.labels[chosen])
            for image, index in zip(images, chosen.tolist(), strict=True):
                stream = generator(3, "augmentation", epoch, index)
                view = random_view(dataset.train.images[index], stream, resize=15, crop=12)
                assert torch.equal(image, view)
        assert step == 2


def test_workers_change_nothing(dataset):
    """Workers that stay for two epochs, after one that was left in the middle."""
    here, there = batches(dataset), batches(dataset, workers=2)
    iterator = iter(there)
    next(iterator)
    there.load_state_dict({"epoch": 0, "step": 0})
    assert_same([*here, *here], [*there, *there])
    assert there.loader.num_workers == 2


@pytest.mark.parametrize(("done", "workers"), [(1, 0), (2, 2), (3, 0), (4, 0)])
def test_continued_where_it_was_left(dataset, done, workers):
    whole = batches(dataset)
    expected = [*whole, *whole]
    first = batches(dataset, workers)
    iterator = iter(first)
    for step in range(done):
        if step == len(first):
            iterator = iter(first)
        next(iterator)
    second = batches(dataset, workers)
    second.load_state_dict(first.state_dict())
    rest = [*second] if done >= 3 else [*second, *second]
    assert_same(rest, expected[done:])


def test_processes_share_each_batch(dataset):
    shares = [list(batches(dataset, rank=rank, processes=2)) for rank in range(2)]
    for (images, labels), *parts in zip(batches(dataset), *shares, strict=True):
        for rank, (part, part_labels) in enumerate(parts):
            assert torch.equal(part, images[rank::2])
            assert torch.equal(part_labels, labels[rank::2])


@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (2, 2), (5, 0)])
def test_evaluation_sees_the_centre_of_every_picture_once(dataset, processes, workers):
    test = dataset.test
    expected = torch.stack(
        [fixed_views(picture, resize=15, crop=12, ten=False)[0] for picture, _ in test]
    )
    seen, labels = torch.zeros_like(expected), torch.full_like(test.labels, -1)
    for rank in range(processes):
        loader = FileEvaluationBatches(test.images, test.labels, 10, centre_view(RECIPE), workers)
        loader.share(rank, processes, CPU)
        parts = list(loader)
        assert len(parts) == len(loader)
        assert_same(parts, list(loader))
        seen[rank::processes] = torch.cat([images for images, _ in parts])
        labels[rank::processes] = torch.cat([part for _, part in parts])
    assert torch.equal(seen, expected)
    assert torch.equal(labels, test.labels)


def test_nothing_to_evaluate():
    none = torch.zeros(0, dtype=torch.int64)
    loader = FileEvaluationBatches(ImageFiles([]), none, 10, centre_view(RECIPE), 2)
    assert (len(loader), list(loader)) == (0, [])


def test_views_of_a_recipe(dataset):
    picture = dataset.test.images[0]
    ten = fixed_views(picture, resize=15, crop=12)
    assert torch.equal(several_views(RECIPE)(picture), ten)
    assert torch.equal(several_views(RECIPE.with_changes({"flip": False}))(picture), ten[:5])
    still = training_view(RECIPE.with_changes({"flip": False, "resize": 12}))
    for seed in range(8):
        unmirrored = random_view(picture, generator(seed), resize=12, crop=12, flip=False)
        assert torch.equal(still(picture, generator(seed)), unmirrored)
    assert Recipe().shorter_side == 256
    assert Recipe(crop=28).shorter_side == 32


def test_number_of_workers():
    assert worker_count(Recipe(workers=0)) == 0
    assert worker_count(Recipe(workers=40)) == 40
    assert 1 <= worker_count(Recipe()) <= 16
    assert worker_count(Recipe(devices=10_000)) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_file_is_named(tmp_path, workers):
    dataset = read_image_folder(write_folder(tmp_path))
    bad = tmp_path / "train" / "class 2" / "5.png"
    bad.write_bytes(bad.read_bytes()[:200])
    with pytest.raises(UnreadableError, match=r"class 2.5\.png cannot be read") as caught:
        list(batches(dataset, workers))
    assert "Traceback" not in str(caught.value)
    bad.unlink()
    with pytest.raises(UnreadableError, match=r"there is no image .*class 2.5\.png"):
        list(batches(dataset, workers))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_all_unreadable_files_are_found(tmp_path, workers):
    dataset = read_image_folder(write_folder(tmp_path, others=20))
    assert unreadable_images(dataset, workers) == []
    require_readable(dataset, workers)
    for number in range(13):
        (tmp_path / "test" / "class 1" / f"{number}.png").write_bytes(b"no image")
    (tmp_path / "train" / "class 1" / "0.png").write_bytes(b"")
    assert len(unreadable(dataset.test.images, workers)) == 13
    found = unreadable_images(dataset, workers)
    assert len(found) == 14
    assert sum("train" in sentence for sentence in found) == 1
    with pytest.raises(UnreadableError, match=r"class 1.0\.png .*; and 3 more"):
        require_readable(dataset, workers)


def grows(picture: torch.Tensor, by: int) -> torch.Tensor:
    return picture + by


def test_pictures_may_be_tensors():
    class Pictures:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return torch.full((1, 4, 4), index, dtype=torch.uint8)

    labels = torch.arange(5) % CLASSES
    loader = FileEvaluationBatches(Pictures(), labels, 2, partial(grows, by=3))
    assert [images[:, 0, 0, 0].tolist() for images, _ in loader] == [[3, 4], [5, 6], [7]]


def test_errors(dataset):
    with pytest.raises(ValueError, match="lower the batch size"):
        FileTrainingBatches(dataset.train.images, dataset.train.labels, 99, 0, grows)
    with pytest.raises(ValueError, match="multiple of the number of processes"):
        batches(dataset, processes=3)
    with pytest.raises(ValueError, match="resize must be at least crop=224, got 200"):
        Recipe(resize=200)
    with pytest.raises(ValueError, match="workers must be at least 0"):
        Recipe(workers=-1)


class Grey:
    """Pictures with so many channels each."""

    def __init__(self, *channels: int) -> None:
        self.channels = channels

    def __len__(self) -> int:
        return len(self.channels)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(self.channels[index], 8, 8, dtype=torch.uint8)

    def take(self, indices: torch.Tensor) -> "Grey":
        return Grey(*(self.channels[index] for index in indices.tolist()))


def test_pictures_with_other_channels():
    colour, grey, mixed = (Split(Grey(*n), torch.tensor([0, 1])) for n in ((3, 3), (1, 1), (3, 1)))
    with pytest.raises(ValueError, match=r"test of toy have 1 channels, .* images have 3"):
        require_readable(Dataset("toy", colour, grey, ("a", "b")))
    batches = FileEvaluationBatches(mixed.images, mixed.labels, 2, centre_view(Recipe(crop=4)))
    with pytest.raises(UnreadableError, match=r"same channels, got views of \[\(1, 4, 4\), \(3"):
        list(batches)
