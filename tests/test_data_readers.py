"""Arrays, image folders, datasets passed in from Python, and the function that finds the reader."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from topklass._extras import extra
from topklass.data import (
    FORMATS,
    ImageFiles,
    Normalize,
    from_map_style,
    hold_out,
    load,
    map_split,
    read_image_folder,
    read_npz,
    superclass_noise,
)

# Arrays


def write_npz(path, **changes):
    rng = np.random.default_rng(0)
    content = {
        "x_train": rng.integers(0, 256, (12, 5, 4, 3), dtype=np.uint8),
        "y_train": np.arange(12) % 4,
        "x_test": rng.integers(0, 256, (4, 5, 4, 3), dtype=np.uint8),
        "y_test": np.arange(4),
    } | changes
    np.savez(path, **{name: value for name, value in content.items() if value is not None})
    return content


def test_npz(tmp_path):
    content = write_npz(
        tmp_path / "toy.npz",
        x_val=np.ones((4, 5, 4, 3), np.uint8),
        y_val=np.arange(4, dtype=np.uint8),
        classes=np.array(["cat", "dog", "cow", "pig"]),
        superclass=np.array([0, 0, 1, 1]),
        superclasses=np.array(["pet", "farm"]),
    )
    dataset = read_npz(tmp_path / "toy.npz")
    assert dataset.name == "toy"
    assert dataset.classes == ("cat", "dog", "cow", "pig")
    assert dataset.superclasses["coarse"].names == ("pet", "farm")
    assert dataset.superclasses["coarse"].of_class.tolist() == [0, 0, 1, 1]
    assert dataset.counts.tolist() == [3, 3, 3, 3]
    assert dataset.validation.labels.dtype == torch.int64
    pixel = content["x_train"][7, 3, 2, 1]
    assert dataset.train.images[7, 1, 3, 2] == pixel
    assert superclass_noise(dataset, 1.0).train.labels.max() == 3


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((4, 6, 5), 1), ((4, 6, 5, 1), 1), ((4, 6, 5, 3), 3), ((4, 3, 6, 5), 3), ((4, 1, 6, 5), 1)],
)
def test_shapes_of_images(tmp_path, shape, channels):
    images = np.zeros(shape, np.uint8)
    write_npz(tmp_path / "toy.npz", x_train=images, y_train=np.arange(4), x_test=images)
    assert read_npz(tmp_path / "toy.npz").test.images.shape == (4, channels, 6, 5)


def test_superclasses_of_samples(tmp_path):
    write_npz(tmp_path / "toy.npz", coarse_train=np.arange(12) % 4 // 2)
    dataset = read_npz(tmp_path / "toy.npz")
    assert dataset.superclasses["coarse"].of_class.tolist() == [0, 0, 1, 1]
    write_npz(tmp_path / "toy.npz", coarse_train=np.arange(12) // 6)
    with pytest.raises(ValueError, match="class 0 comes with more than one superclass"):
        read_npz(tmp_path / "toy.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, r"lacks y_test: expected x_train, .*; found x_train, y_train, x_test"),
        ({"x_test": np.zeros((4, 5, 4, 3))}, "x_test must be uint8"),
        ({"x_test": np.zeros((4, 5), np.uint8)}, r"x_test must have shape .*got \(4, 5\)"),
        ({"x_test": np.zeros((4, 5, 4, 2), np.uint8)}, "x_test must have shape"),
        ({"y_test": np.zeros(4)}, "y_test must be integers"),
        ({"y_test": np.zeros(3, int)}, "each of the 4 images"),
        ({"y_test": np.array([0, 1, 2, -1])}, "without gaps.*from -1 to 3"),
        ({"classes": np.array(["cat"])}, "labels of train must be from 0 to 0, got 3"),
        ({"classes": np.array([print], dtype=object)}, "plain arrays"),
        ({"classes": np.array("cat")}, r"classes must be a list of at most 16 names"),
        ({"y_test": np.array([0, 1, 2, 9])}, "without gaps; there are 5 different .* from 0 to 9"),
        ({"y_test": np.array(["a", "b", "c", "d"])}, "y_test must be integers, got <U1"),
        ({"y_test": np.zeros(4, complex)}, "y_test must be integers"),
        ({"x_val": np.zeros((4, 5, 4, 3), np.uint8)}, "there is x_val, but no y_val"),
        ({"x_train": np.zeros((0, 5, 4, 3), np.uint8)}, "x_train is empty"),
        ({"x_test": np.zeros((0, 5, 4, 3), np.uint8), "y_test": np.zeros(0, int)}, "x_test is em"),
        ({"x_test": np.zeros((4, 0, 0, 3), np.uint8)}, r"must have pixels, got .*\(4, 3, 0, 0\)"),
        ({"x_test": np.zeros((4, 5, 4), np.uint8)}, r"images of test .*\(3, 5, 4\), got \(1, 5, 4"),
        ({"x_test": np.zeros((4, 6, 4, 3), np.uint8)}, r"images of test .*got \(3, 6, 4\): resize"),
        (
            {"superclass": np.zeros(3, int)},
            r"superclass must have one label for each of the 4 classes, got shape \(3,\)",
        ),
        (
            {"coarse_train": np.zeros(3, int)},
            "coarse_train must have one label for each of the 12 training im",
        ),
    ],
)
def test_bad_npz(tmp_path, changes, message):
    write_npz(tmp_path / "toy.npz", **changes)
    with pytest.raises((TypeError, ValueError), match=rf"toy\.npz.*{message}"):
        read_npz(tmp_path / "toy.npz")


def test_broken_npz(tmp_path):
    path = tmp_path / "toy.npz"
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_npz(path)
    write_npz(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"toy\.npz is broken"):
        read_npz(path)
    path.write_bytes(b"not an archive")
    with pytest.raises(ValueError, match=r"toy\.npz is broken"):
        read_npz(path)


# Image folders


def write_folder(root, splits=("train", "val", "test"), classes=("b", "a", "c"), each=3):
    for place, split in enumerate(splits):
        for label, name in enumerate(sorted(classes)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(each):
                colour = (50 * label, 10 * number, 100 * place)
                Image.new("RGB", (12, 8), colour).save(folder / f"{number}.png")
            (folder / "notes.txt").write_text("not an image")


def test_an_image_folder(tmp_path):
    write_folder(tmp_path)
    dataset = read_image_folder(tmp_path)
    assert dataset.classes == ("a", "b", "c")
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert not dataset.train.in_memory
    for place, split in enumerate(dataset.splits.values()):
        image, label = split[5]
        assert (image.mode, image.size, label) == ("RGB", (12, 8), 1)
        assert image.getpixel((0, 0)) == (50, 20, 100 * place)


def test_files_can_be_held_out_and_labels_be_wrong(tmp_path):
    write_folder(tmp_path, ("train", "val"))
    dataset = hold_out(read_image_folder(tmp_path), 3)
    assert isinstance(dataset.validation.images, ImageFiles)
    assert dataset.validation.labels.tolist() == [0, 1, 2]
    for image, label in dataset.validation:
        assert image.getpixel((0, 0))[0] == 50 * label
    with pytest.raises(TypeError, match="pass mean and std"):
        Normalize.of(dataset.train)


@pytest.mark.parametrize(
    ("splits", "found"),
    [
        (("train", "val"), {"train", "test"}),
        (("train", "test"), {"train", "test"}),
        (("train", "validation", "test"), {"train", "validation", "test"}),
        (("images_train", "images_val", "images_test"), {"train", "validation", "test"}),
        (("images/train", "images/val", "images/test"), {"train", "validation", "test"}),
    ],
)
def test_names_of_splits(tmp_path, splits, found):
    write_folder(tmp_path, splits)
    assert set(read_image_folder(tmp_path).splits) == found


def test_grey_and_transparent_images_become_rgb(tmp_path):
    write_folder(tmp_path)
    for mode, name in (("L", "0.png"), ("RGBA", "1.png"), ("P", "2.png")):
        Image.new(mode, (4, 4)).save(tmp_path / "train" / "a" / name)
    images = read_image_folder(tmp_path).train.images
    assert [images[index].mode for index in range(3)] == ["RGB"] * 3


def test_unreadable_images_are_named(tmp_path):
    write_folder(tmp_path)
    file = tmp_path / "train" / "b" / "1.png"
    images = read_image_folder(tmp_path).train.images
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"b/1\.png cannot be read as an image"):
        images[4]
    file.write_text("not an image")
    with pytest.raises(ValueError, match=r"b/1\.png cannot be read as an image"):
        images[4]
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no image .*b/1\.png"):
        images[4]


def test_bad_folders(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"expected train/<class>.*found neither folders nor images"
    ):
        read_image_folder(tmp_path)
    write_folder(tmp_path, ("train",))
    with pytest.raises(FileNotFoundError, match="found the folders train"):
        read_image_folder(tmp_path)
    (tmp_path / "val").mkdir()
    with pytest.raises(ValueError, match="val has no folders of classes"):
        read_image_folder(tmp_path)
    (tmp_path / "val").rmdir()
    write_folder(tmp_path, ("test",), classes=("a", "b", "d"))
    with pytest.raises(ValueError, match=r"test lacks 'c' \(1 are missing, 1 are unknown\)"):
        read_image_folder(tmp_path)
    (tmp_path / "test" / "c").mkdir()
    with pytest.raises(ValueError, match="test has 'd', which train lacks"):
        read_image_folder(tmp_path)


def test_a_folder_in_another_form_says_what_was_found(tmp_path):
    write_folder(tmp_path / "no splits", ("",))
    with pytest.raises(
        FileNotFoundError, match=r"no splits is .* it has the folders a, b, c; images must"
    ):
        load(tmp_path / "no splits")
    flat = tmp_path / "no splits" / "a"
    with pytest.raises(
        FileNotFoundError, match=r"it has 3 images; images must be sorted into train/<c"
    ):
        load(flat)
    write_folder(tmp_path / "no test", ("train",))
    with pytest.raises(FileNotFoundError, match=r"one of val and test .*found the folders train"):
        load(tmp_path / "no test")
    (tmp_path / "no classes").mkdir()
    for split in ("train", "test"):
        flat.rename(tmp_path / "no classes" / split)
        flat = tmp_path / "no splits" / "b"
    with pytest.raises(ValueError, match=r"train has no folders of classes.*found 3 images"):
        load(tmp_path / "no classes")


def test_classes_without_images_are_named(tmp_path):
    write_folder(tmp_path)
    for file in (tmp_path / "val" / "b").glob("*.png"):
        file.unlink()
    with pytest.raises(ValueError, match="val/b has no images"):
        read_image_folder(tmp_path)


# Datasets passed in from Python


class InMemory:
    """As CIFAR100 of torchvision."""

    def __init__(self, transform=None):
        self.data = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
        self.targets = [0, 1, 2, 0, 1, 2]
        self.classes = ["cat", "dog", "cow"]
        self.transform = transform
        self.target_transform = None

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image = Image.fromarray(self.data[index])
        return (self.transform(image) if self.transform else image), self.targets[index]


def test_images_in_memory_become_tensors():
    source = InMemory()
    split = map_split(source)
    assert split.in_memory
    assert torch.equal(split.images, torch.from_numpy(source.data).movedim(3, 1))
    assert split.labels.tolist() == source.targets


def test_images_with_a_transform_are_read_on_demand():
    split = map_split(InMemory(transform=lambda image: image.rotate(90, expand=True)))
    assert not split.in_memory
    assert split[1][0].size == (5, 4)
    part = split.take(torch.tensor([4, 2])).take(torch.tensor([1]))
    assert part.labels.tolist() == [2]
    assert part.images[0].tobytes() == split.images[2].tobytes()


def test_pairs_without_attributes():
    pairs = [(torch.full((3, 4, 4), n, dtype=torch.uint8), n % 2) for n in range(4)]
    dataset = from_map_style(pairs, pairs, name="pairs")
    assert dataset.classes == ("0", "1")
    assert dataset.train.images[3].unique().tolist() == [3]
    assert dataset.counts.tolist() == [2, 2]


def test_tensors_stay_in_memory():
    """Small images that are read on demand would be enlarged, as files are."""
    images, labels = torch.randint(256, (6, 3, 5, 4), dtype=torch.uint8), torch.arange(6) % 3
    sources = [TensorDataset(images, labels), [*zip(images, labels.tolist(), strict=True)]]
    for source in [*sources, *(Subset(each, range(6)) for each in sources)]:
        split = map_split(source)
        assert split.in_memory
        assert torch.equal(split.images, images)
        assert torch.equal(split.labels, labels)
    assert not map_split([(images[0], 0), (images[0, :, :4], 1)]).in_memory


def test_subsets():
    source = InMemory()
    split = map_split(Subset(source, [5, 0, 2]))
    assert split.in_memory
    assert torch.equal(split.images, map_split(source).images[[5, 0, 2]])
    assert split.labels.tolist() == [2, 0, 2]
    rotated = map_split(Subset(InMemory(transform=lambda image: image.rotate(90)), [4]))
    assert not rotated.in_memory
    assert rotated.labels.tolist() == [1]
    assert from_map_style(Subset(source, [1, 2]), source).classes == ("cat", "dog", "cow")


def test_all_images_are_in_memory_or_none():
    """Or the network would be trained on small images, and tested on enlarged ones."""
    with pytest.raises(ValueError, match="images of test are read on demand but the training"):
        from_map_style(InMemory(), InMemory(transform=lambda image: image))


def test_names_come_from_the_training_set():
    dataset = from_map_style(InMemory(), InMemory(), InMemory())
    assert (dataset.name, dataset.classes) == ("InMemory", ("cat", "dog", "cow"))
    assert set(dataset.splits) == {"train", "validation", "test"}


def test_images_that_are_no_bytes_are_an_error():
    split = map_split([(torch.rand(3, 4, 4), 0)])
    with pytest.raises(TypeError, match=r"got torch\.float32: construct the dataset without"):
        split[0]


# Finding the reader


def test_formats_are_recognised(tmp_path):
    write_folder(tmp_path / "pictures")
    write_npz(tmp_path / "toy.npz")
    assert load(tmp_path / "pictures").record["format"] == "image folder"
    assert load(str(tmp_path / "toy.npz")).record["format"] == "npz"


def test_what_is_not_there_says_what_there_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="Did you mean 'glyphs'") as raised:
        load("Glyph")
    for name in FORMATS:
        assert name in str(raised.value)
    with pytest.raises(FileNotFoundError, match="neither a name nor a path"):
        load("imagenet")
    with pytest.raises(FileNotFoundError, match=r"format of the folder .* is unknown"):
        load(tmp_path)


def test_unknown_options_are_named(tmp_path):
    write_npz(tmp_path / "toy.npz")
    with pytest.raises(TypeError, match="glyphs has no option clases; options: classes, per_class"):
        load("glyphs", clases=10)
    with pytest.raises(TypeError, match="has no option seed; options: there are none"):
        load(tmp_path / "toy.npz", seed=0)


def test_a_missing_package_says_how_to_install_it():
    with pytest.raises(ImportError, match=r"needs nowhere.*pip install 'topklass\[train\]'"):
        extra("nowhere.at_all")
