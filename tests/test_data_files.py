"""Pictures in files: names in one piece, 16 bits."""

import pickle

import pytest
import torch
from PIL import Image

from topklass.data import ImageFiles
from topklass.data.files import read_image


def test_names(tmp_path):
    paths = [tmp_path / "a.png", tmp_path / "Ω und ß.png", tmp_path / "c.png"]
    for level, path in enumerate(paths):
        Image.new("L", (2, 2), level).save(path)
    files = pickle.loads(pickle.dumps(ImageFiles(paths)))
    assert files.paths == list(map(str, paths))
    assert [files[index].getpixel((0, 0))[0] for index in (0, 1, 2, -1, -3)] == [0, 1, 2, 2, 0]
    assert len(list(files)) == len(files) == 3
    assert files.take(torch.tensor([2, 0, 2])).paths == [str(paths[i]) for i in (2, 0, 2)]
    for wrong in (3, -4):
        with pytest.raises(IndexError):
            files[wrong]
    assert ImageFiles([]).paths == []


def test_names_that_are_no_unicode():
    assert ImageFiles(["caf\udce9/1.png", "b.png"]).paths == ["caf\udce9/1.png", "b.png"]


@pytest.mark.parametrize("level", [0, 255, 256, 30_000, 65_535])
def test_16_bits(tmp_path, level):
    Image.new("I;16", (2, 2), level).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").getpixel((0, 0)) == (level // 256,) * 3
