"""Glyphs: what is drawn, and how it is grouped."""

import json
import unicodedata
from itertools import combinations

import pytest
import torch
from PIL import ImageFont

from topklass.data import generator, glyphs
from topklass.data.characters import FACES, _covered, characters, face_files
from topklass.data.lookalikes import distances, grouped, lookalike_groups
from topklass.data.rendering import _Face, draw, masks

SMALL = {"classes": 100, "per_class": 3, "validation_per_class": 1, "test_per_class": 2}
ALL = 2000


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPKLASS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def drawn():
    """All masks of many classes, in a small size."""
    return masks(characters(ALL), 16)


# Characters


def test_characters_are_different_and_have_at_least_two_faces():
    chosen = _covered()
    assert len(chosen) > ALL
    assert len({character.text for character in chosen}) == len(chosen)
    assert len({character.name for character in chosen}) == len(chosen)
    assert min(len(character.faces) for character in chosen) >= 2
    for character in chosen:
        assert unicodedata.normalize("NFKC", character.text) == character.text
    assert characters(300) == chosen[:300]


def test_three_hundred_classes_have_seven_scripts_and_lookalikes_across_them():
    chosen = characters(300)
    assert len({character.script for character in chosen}) == 7
    texts = {character.text for character in chosen}
    for name in ("A", "B", "E", "H", "I", "K", "M", "O", "P", "T", "X"):
        assert name in texts
    for script in ("GREEK CAPITAL LETTER ALPHA", "CYRILLIC CAPITAL LETTER A"):
        assert unicodedata.lookup(script) in texts


def test_too_many_characters():
    with pytest.raises(ValueError, match=r"classes must be from 1 to .*two or more faces have"):
        characters(100_000)


def test_every_mask_is_a_character_and_none_the_sign_for_a_missing_one(drawn):
    """Nothing is blank, nothing is cut off, and nothing is what a font shows for U+FFFF."""
    ink, where = drawn
    assert (ink.flatten(1).amax(1) > 60).all()
    assert (ink[:, [0, -1]] == 0).all()
    assert (ink[:, :, [0, -1]] == 0).all()
    assert ((where >= 0).sum(1) >= 2).all()
    for face, file in enumerate(face_files()):
        missing = _Face(str(file), ink.shape[1]).ink("\uffff")
        index = where[:, face]
        assert not (ink[index[index >= 0]] == missing).all(2).all(1).any(), file


def test_masks_are_where_the_faces_are(drawn):
    _, where = drawn
    for character, row in zip(characters(ALL), where, strict=True):
        assert tuple((row >= 0).nonzero().flatten().tolist()) == character.faces


def test_masks_are_what_pillow_draws(drawn):
    ink, where = drawn
    face = FACES.index("DejaVuSerif")
    font = ImageFont.truetype(str(face_files()[face]), round(0.88 * 32))
    mask = font.getmask("R", mode="L")
    index = [character.text for character in characters(ALL)].index("R")
    square = ink[where[index, face]]
    rows, columns = square.nonzero().unbind(1)
    box = square[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    assert torch.equal(box.sum(), torch.tensor(sum(bytes(mask))))


def test_one_guess_cannot_be_right_but_five_can():
    """The best accuracy with k guesses of who knows which classes have which clean image."""
    ink, where = masks(characters(300), 32)
    index, face = (where >= 0).nonzero().unbind(1)
    images, image = ink[where[index, face]].flatten(1).unique(dim=0, return_inverse=True)
    chances = torch.zeros(len(images), 300)
    faces = (where >= 0).sum(1).float()
    chances.index_put_((image, index), 1 / faces[index], accumulate=True)
    one, five = (chances.topk(k, 1).values.sum() / 300 for k in (1, 5))
    assert 0.9 < one < 0.93
    assert five > 0.9999


# Images


def test_without_distortion_and_noise_images_are_ink_on_paper():
    ink, where = masks(characters(100), 16)
    images = draw(ink, where, 20, generator(0), distortion=0.0, noise=0.0)
    assert images.shape == (2000, 1, 16, 16)
    flat = images.flatten(1).float()
    assert (flat.amax(1) >= 255 * 0.65 - 1).all()
    assert (flat.amin(1) < flat.amax(1) - 20).all()
    middle = images[:, 0].float().amax(1, keepdim=True).amax(2, keepdim=True) - images[:, 0]
    places = torch.arange(16) - 7.5
    for sums in (middle.sum(1), middle.sum(2)):
        assert ((sums * places).sum(1) / sums.sum(1)).abs().max() < 3


def test_every_face_of_a_class_is_drawn():
    """Every face is as likely: with one class and clean images, they can be counted."""
    ink = torch.zeros(3, 32, 32, dtype=torch.uint8)
    for face in range(3):
        ink[face, 8 * face : 8 * face + 8] = 255
    where = torch.tensor([[0, -1, 1, 2]])
    images = draw(ink, where, 3000, generator(0), distortion=0.0, noise=0.0)
    darkest = images[:, 0].float().mean(2)[:, [2, 6, 10]].argmin(1)
    counts = torch.bincount(darkest, minlength=3)
    assert ((counts - 1000).abs() < 4.5 * (3000 * 2 / 9) ** 0.5).all()


def test_distortion_moves_and_noise_adds():
    ink, where = masks(characters(1), 32)

    def spread(**options):
        stack = draw(ink, where[:, :1], 200, generator(0), **options).float()
        return (stack / stack.flatten(1).amax(1).view(-1, 1, 1, 1)).std(0).mean().item()

    still, moved = (spread(distortion=strength, noise=0.0) for strength in (0.0, 1.0))
    assert moved > 1.5 * still
    smooth, noisy = (
        draw(ink, where[:, :1], 50, generator(0), distortion=0.0, noise=noise)[:, 0, :2].float()
        for noise in (0.0, 0.2)
    )
    assert smooth.std(2).max() == 0
    assert noisy.std(2).mean() > 10


def test_the_dataset():
    data = glyphs(**SMALL)
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 300,
        "validation": 100,
        "test": 200,
    }
    assert data.counts.tolist() == [3] * 100
    assert data.train.images.shape == (300, 1, 32, 32)
    assert data.train.images.flatten(1).float().std(1).min() > 5
    assert data.classes[0] == "A latin capital a"
    assert list(data.superclasses) == ["lookalikes", "script"]
    assert data.superclasses["script"].names[:3] == ("Latin", "Greek", "Cyrillic")
    record = json.loads(json.dumps(data.record))
    assert {name: record[name] for name in SMALL} == SMALL


def test_images_are_a_function_of_the_seed():
    first, again, other = (glyphs(**SMALL, seed=seed, cache=False) for seed in (1, 1, 2))
    for name, split in first.splits.items():
        assert torch.equal(split.images, again.splits[name].images)
        assert not torch.equal(split.images, other.splits[name].images)


def test_no_image_is_in_two_splits():
    options = {"per_class": 2, "validation_per_class": 2, "test_per_class": 2}
    data = glyphs(classes=20, **options, cache=False)
    images = torch.cat([split.images for split in data.splits.values()]).flatten(1)
    assert len(images.unique(dim=0)) == len(images) == 120


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 0}, "classes must be from 1"),
        ({"size": 8}, "size must be at least 16 pixels"),
        ({"per_class": 0}, "per_class must be at least 1"),
        ({"noise": -1.0}, "noise must be non-negative"),
        ({"distortion": float("inf")}, "distortion must be non-negative and finite"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        glyphs(**{**SMALL, **options})


# Groups


def test_distances_are_those_of_a_loop():
    ink, where = masks(characters(12), 16)
    where[3, ::2] = -1
    where[5] = -1
    where[5, 1] = 7
    where[6, 1] = -1
    small = torch.nn.functional.avg_pool2d(ink[:, None].double() / 255, 4)
    vectors = torch.nn.functional.avg_pool2d(small, 3, 1, 1).flatten(1)
    found = distances(ink, where)
    for i, j in combinations(range(12), 2):
        faces = [f for f in range(where.shape[1]) if where[i, f] >= 0 and where[j, f] >= 0]
        pairs = [(vectors[where[i, f]], vectors[where[j, f]]) for f in faces]
        above = sum((a - b).square().sum() for a, b in pairs)
        below = sum(a.square().sum() + b.square().sum() for a, b in pairs)
        expected = float(above / below) if faces else 1.0
        assert found[i, j] == found[j, i] == pytest.approx(expected, abs=1e-5)
    assert found[5, 6] == 1


@pytest.mark.parametrize("count", [1, 4, 5, 6, 11, 23, 50])
def test_groups_have_nearly_the_same_size(count):
    points = torch.randint(100, (count, 1)).float()
    group = grouped((points - points.T).abs(), 5)
    sizes = torch.bincount(group)
    assert len(sizes) == -(-count // 5)
    assert sizes.max() <= 5
    assert sizes.max() - sizes.min() <= 1
    first = [int((group == index).nonzero()[0]) for index in range(len(sizes))]
    assert first == sorted(first)


def test_groups_that_are_clear_are_found():
    centre = torch.arange(8).repeat_interleave(5)[torch.randperm(40)]
    points = torch.stack([1000 * (centre % 3), 1000 * (centre // 3)], 1) + torch.randint(
        99, (40, 2)
    )
    group = grouped(torch.cdist(points.float(), points.float()).round(), 5)
    assert torch.equal(group[:, None] == group, centre[:, None] == centre)


def test_no_exchange_makes_groups_better():
    points = torch.randint(1000, (23, 2)).float()
    distance = torch.cdist(points, points).round()
    group = grouped(distance, 5)

    def cost(group):
        return distance[group[:, None] == group].sum()

    for i, j in combinations(range(23), 2):
        other = group.clone()
        other[[i, j]] = group[[j, i]]
        assert cost(other) >= cost(group)


def test_twins_are_in_the_same_group():
    """Of 300 classes, all that look the same, and the capitals that three scripts share."""
    chosen = characters(300)
    ink, where = masks(chosen, 32)
    group = lookalike_groups(ink, where)
    twins = distances(ink, where) < 0.005
    assert twins.sum() > 300 + 2 * 40
    assert (group[:, None] == group)[twins].all()
    assert torch.bincount(group).tolist() == [5] * 60
    place = {unicodedata.name(character.text): n for n, character in enumerate(chosen)}
    for latin, greek, cyrillic in (("A", "ALPHA", "A"), ("O", "OMICRON", "O"), ("P", "RHO", "ER")):
        names = (f"LATIN CAPITAL LETTER {latin}", f"GREEK CAPITAL LETTER {greek}")
        names = (*names, f"CYRILLIC CAPITAL LETTER {cyrillic}")
        assert len({int(group[place[name]]) for name in names}) == 1


def test_glyphs_come_from_the_cache(folder):
    first = glyphs(**SMALL)
    (path,) = folder.iterdir()
    time = path.stat().st_mtime_ns
    again = glyphs(**SMALL)
    assert path.stat().st_mtime_ns == time
    for name, split in first.splits.items():
        assert torch.equal(split.images, again.splits[name].images)
    for name, division in first.superclasses.items():
        assert torch.equal(division.of_class, again.superclasses[name].of_class)
        assert division.names == again.superclasses[name].names
    glyphs(**SMALL, noise=0.0)
    assert len(list(folder.iterdir())) == 2
