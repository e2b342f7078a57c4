"""The pictures of losses: one for each, of what the library computes."""

from pathlib import Path

import pytest
import torch
from benchmarks import loss_pictures

import topklass

DOCS = Path(__file__).parent.parent / "docs"
PICTURES = loss_pictures.pictures()


def test_every_loss_has_a_picture_on_its_page():
    drawn = {type(each.losses[each.default]).__name__ for each in PICTURES}
    losses = {name for name in topklass.__all__ if name.endswith("Loss")}
    assert drawn == {name for name in losses if not name.startswith("Linear")}
    for each in PICTURES:
        page = (DOCS / "losses" / f"{each.file}.md").read_text(encoding="utf-8")
        assert f"](../images/losses/{each.file}.svg)" in page
        assert type(each.losses[each.default]).__name__ in page
        assert (DOCS / "images" / "losses" / f"{each.file}.svg").is_file()


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.file)
def test_the_gradient_is_that_of_the_loss(picture):
    """But at kinks, differences of the curve above are the curve below."""
    losses, gradient = loss_pictures.curves(picture.losses[picture.default], picture.target)
    step = loss_pictures.LABEL_SCORES.diff()
    slopes = losses.diff() / step
    middle = (gradient[1:, 0] + gradient[:-1, 0]) / 2
    right = torch.isclose(slopes, middle, rtol=1e-3, atol=1e-3)
    assert right.float().mean() > 0.98
