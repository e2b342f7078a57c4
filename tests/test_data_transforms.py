"""Augmentation and views against plain loops, and against torchvision."""

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import v2

from topklass.data import (
    Normalize,
    Split,
    cutmix,
    cutout,
    fixed_views,
    generator,
    mixup,
    random_crop,
    random_view,
)


def random_images(*shape: int) -> torch.Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8)


def by_loop(images, seed, pad, flip, border):
    """Pad, mirror, crop: one image after the other, with the same draws."""
    stream = generator(seed)
    count, _, height, width = images.shape
    moves = torch.randint(-pad, pad + 1, (count, 2), generator=stream)
    mirrored = torch.randint(2, (count, 1), generator=stream)
    mode = "constant" if border == "zero" else "replicate"
    result = []
    for image, (down, right), mirror in zip(images, moves.tolist(), mirrored, strict=True):
        padded = F.pad(image[None].float(), (pad,) * 4, mode=mode)[0]
        top, left = pad + down, pad + right
        crop = padded[:, top : top + height, left : left + width]
        result.append(crop.flip(2) if flip and mirror else crop)
    return torch.stack(result).to(images.dtype)


@pytest.mark.parametrize("border", ["zero", "edge"])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("pad", [0, 1, 4])
@pytest.mark.parametrize("shape", [(64, 3, 8, 8), (64, 1, 6, 9), (1, 3, 5, 4)], ids=str)
def test_random_crops_are_those_of_a_loop(shape, pad, flip, border):
    images = random_images(*shape)
    before = images.clone()
    result = random_crop(images, generator(7), pad=pad, flip=flip, border=border)
    assert torch.equal(images, before)
    assert result.dtype == torch.uint8
    assert torch.equal(result, by_loop(images, 7, pad, flip, border))


def test_every_shift_occurs_and_half_of_the_images_are_mirrored():
    count, pad = 20000, 2
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[..., 4, 4:6] = torch.tensor([1, 2], dtype=torch.uint8)
    crops = random_crop(image.expand(count, -1, -1, -1), generator(0), pad=pad)[:, 0].long()
    ones = (crops == 1).nonzero()
    twos = (crops == 2).nonzero()
    mirrored = twos[:, 2] < ones[:, 2]
    assert (mirrored.float().mean() - 0.5).abs() < 4.5 * 0.5 / count**0.5
    rows = torch.bincount(ones[:, 1]) / count
    assert rows.nonzero().flatten().tolist() == [2, 3, 4, 5, 6]
    assert ((rows[2:] - 0.2).abs() < 4.5 * (0.16 / count) ** 0.5).all()


def test_an_empty_batch_is_cropped():
    assert random_crop(random_images(0, 3, 8, 8), generator(0)).shape == (0, 3, 8, 8)


def test_bad_crops():
    images = random_images(1, 3, 8, 8)
    with pytest.raises(ValueError, match="border must be one of zero, edge, got 'mirror'"):
        random_crop(images, generator(0), border="mirror")
    with pytest.raises(ValueError, match="pad must not be negative"):
        random_crop(images, generator(0), pad=-1)


@pytest.mark.parametrize("channels", [1, 3])
def test_normalised_images_have_mean_0_and_deviation_1(channels):
    darker = torch.arange(1, channels + 1, dtype=torch.uint8).view(-1, 1, 1)
    images = random_images(5000, channels, 4, 4) // darker
    normal = Normalize.of(Split(images, torch.zeros(5000, dtype=torch.int64)))
    result = normal(images).double().movedim(1, 0).flatten(1)
    assert result.mean(1).abs().max() < 1e-5
    assert (result.std(1, correction=0) - 1).abs().max() < 1e-5
    torch.testing.assert_close(normal.mean, images.float().mean((0, 2, 3)) / 255)
    assert set(normal.state_dict()) == {"mean", "std"}


def test_normalising_a_constant_channel():
    for brightness in range(256):
        images = torch.full((3, 1, 4, 4), brightness, dtype=torch.uint8)
        normal = Normalize.of(Split(images, torch.zeros(3, dtype=torch.int64)))
        assert normal.std == 1
        assert normal(images).abs().max() < 1e-6


def test_normalising_views():
    normal = Normalize([0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    views = random_images(2, 10, 3, 4, 4)
    expected = v2.functional.normalize(views / 255, [0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    torch.testing.assert_close(normal(views), expected, rtol=1e-5, atol=1e-6)


def test_bad_normalisation():
    with pytest.raises(ValueError, match="one number for each channel"):
        Normalize([0.5], [0.1, 0.2])
    with pytest.raises(ValueError, match="without images"):
        Normalize.of(Split(random_images(0, 1, 4, 4), torch.zeros(0, dtype=torch.int64)))


# Pictures of any size


def picture(height: int, width: int) -> Image.Image:
    return v2.functional.to_pil_image(random_images(3, height, width))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("size", [(40, 60), (60, 40), (16, 16)])
def test_random_views_are_crops_of_the_resized_picture(size, flip):
    original = picture(*size)
    small = v2.functional.pil_to_tensor(v2.functional.resize(original, [32]))
    windows = small.unfold(1, 24, 1).unfold(2, 24, 1).permute(1, 2, 0, 3, 4)
    mirrored = set()
    for seed in range(12):
        view = random_view(original, generator(seed), resize=32, crop=24, flip=flip)
        again = random_view(original, generator(seed), resize=32, crop=24, flip=flip)
        assert torch.equal(view, again)
        found = [(windows == side).flatten(2).all(2).any() for side in (view, view.flip(2))]
        assert sum(found) == 1
        mirrored.add(bool(found[1]))
    assert mirrored == ({False, True} if flip else {False})


def test_random_views_differ():
    original = picture(40, 50)
    views = {random_view(original, generator(n), resize=32, crop=24).sum().item() for n in range(9)}
    assert len(views) > 4


def test_fixed_views_are_ten_crops_or_the_centre():
    original = picture(48, 36)
    small = v2.functional.pil_to_tensor(v2.functional.resize(original, [32]))
    ten = fixed_views(original, resize=32, crop=24)
    corners = [small[:, top : top + 24, left : left + 24] for top in (0, 18) for left in (0, 8)]
    assert torch.equal(ten[:4], torch.stack(corners))
    assert torch.equal(ten[4], small[:, 9:33, 4:28])
    assert torch.equal(ten[9], ten[4].flip(-1))
    one = fixed_views(original, resize=32, crop=24, ten=False)
    assert torch.equal(one[0], v2.functional.center_crop(small, [24, 24]))


def test_a_crop_larger_than_the_picture():
    with pytest.raises(ValueError, match="crop must be at most resize, got crop=40"):
        fixed_views(picture(48, 48), resize=32, crop=40)


@pytest.mark.parametrize(
    ("shape", "size"), [((40, 3, 9, 6), 4), ((40, 1, 5, 5), 3), ((3, 3, 4, 4), 9)]
)
def test_cutout(shape, size):
    """A grey square around a pixel, as far as it lies inside the image; the rest is as before."""
    images = random_images(*shape)
    images[images == 128] = 0
    result = cutout(images, generator(3), size=size)
    for image, covered in zip(images, result, strict=True):
        grey = (covered == 128).all(0)
        down, right = (grey.any(d).nonzero().flatten() for d in (1, 0))
        assert grey[down[0] : down[-1] + 1, right[0] : right[-1] + 1].all()
        for places, length in ((down, shape[2]), (right, shape[3])):
            inside = places[0] > 0 and places[-1] < length - 1
            assert len(places) == size if inside else 0 < len(places) <= size
        assert torch.equal(image[:, ~grey], covered[:, ~grey])
    if size <= min(shape[2:]):
        assert {int((r == 128).all(0).sum()) for r in result} >= {size * size}


def test_no_cutout():
    images = random_images(4, 3, 8, 8)
    assert torch.equal(cutout(images, generator(0), size=0), images)
    assert cutout(random_images(0, 3, 8, 8), generator(0), size=2).shape == (0, 3, 8, 8)
    with pytest.raises(ValueError, match="size=-1"):
        cutout(images, generator(0), size=-1)


@pytest.mark.parametrize("shape", [(7, 3, 9, 6), (2, 1, 5, 5), (1, 3, 4, 4)])
def test_cutmix(shape):
    """A rectangle of one other image, the same place in all; its area is the other's weight."""
    images = torch.arange(shape[0]).view(-1, 1, 1, 1).expand(shape)
    shares = []
    for seed in range(200):
        mixed, others, share = cutmix(images, generator(seed))
        assert torch.equal(others.sort().values, torch.arange(shape[0]))
        moved = others != torch.arange(shape[0])
        pasted = (mixed[:, 0] == others[:, None, None]) & moved[:, None, None]
        assert torch.equal(mixed[:, 0][~pasted], images[:, 0][~pasted])
        for area in pasted[moved]:
            assert torch.equal(area, pasted[moved][0])
            assert area.double().mean().item() == pytest.approx(1 - share)
            down, right = (area.any(d).nonzero().flatten() for d in (1, 0))
            assert area.sum() == len(down) * len(right)
        shares.append(share)
    assert 0 <= min(shares) < 0.3
    assert 0.9 < max(shares) <= 1
    assert (images[:, 0, 0, 0] == torch.arange(shape[0])).all()  # they stay as they were


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_mixup(dtype):
    """Each is the mean of two, by their shares, rounded if they are bytes."""
    images, shares = random_images(7, 3, 9, 6).to(dtype), []
    for seed in range(50):
        mixed, others, share = mixup(images, generator(seed))
        assert torch.equal(others.sort().values, torch.arange(7))
        expected = share * images.double() + (1 - share) * images[others].double()
        assert mixed.dtype == dtype
        assert (mixed - expected).abs().max() <= (0.5001 if dtype == torch.uint8 else 1e-4)
        shares.append(share)
    assert 0 <= min(shares) < 0.1
    assert 0.9 < max(shares) <= 1


@pytest.mark.parametrize("mix", [cutmix, mixup])
def test_mixing_nothing(mix):
    mixed, others, _ = mix(random_images(0, 3, 8, 8), generator(0))
    assert mixed.shape == (0, 3, 8, 8)
    assert others.shape == (0,)
