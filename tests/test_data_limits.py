"""Small files that describe much: an error, before memory is taken."""

import io
import os
import struct
import zipfile
import zlib
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from fuzz.memory_peak import RESET, memory_peak
from fuzz.pickle_bombs import BOMBS, ENCODE, pickled
from test_data_readers import write_npz
from topklass.data import from_map_style, read_npz
from topklass.data.files import read_image
from topklass.data.limits import VARIABLE, decoded_limit
from topklass.data.safe_pickle import as_tensor, read_pickle

MIB = 2**20
LITTLE = 64 * MIB


def test_the_measure():
    with memory_peak() as peak:
        assert bytearray(80 * MIB)
    assert not RESET.exists() or 75 * MIB < peak.grown < 100 * MIB


# Labels


@pytest.mark.parametrize(
    "changes",
    [
        {"y_test": np.array([0, 1, 2, 10**12])},
        {"y_train": np.arange(12) * 10**9},
        {"classes": np.zeros(30 * MIB, np.uint8)},
        {"superclass": np.array([0, 0, 1, 10**12])},
        {"coarse_train": np.full(12, 10**12)},
        {"y_test": np.zeros(30 * MIB, np.uint8)},
        {"superclass": np.array([0, 0, 1, 1]), "superclasses": np.zeros(30 * MIB, np.uint8)},
    ],
    ids=["test", "train", "classes", "superclass", "coarse", "too many", "superclasses"],
)
def test_nothing_is_as_large_as_a_label(tmp_path, changes):
    write_npz(tmp_path / "toy.npz", **changes)
    with memory_peak() as peak, pytest.raises(ValueError, match=r"toy\.npz: "):
        read_npz(tmp_path / "toy.npz")
    assert peak.grown < LITTLE


def test_labels_of_data_from_python():
    pairs = [(torch.zeros(3, 4, 4, dtype=torch.uint8), label) for label in (0, 10**12)]
    with memory_peak() as peak, pytest.raises(ValueError, match="2 different labels, from 0 to 1"):
        from_map_style(pairs, pairs)
    assert peak.grown < LITTLE


# Arrays


def compressed(path, size):
    np.savez_compressed(path, x_train=np.zeros(size, np.uint8))


def test_a_compressed_bomb(tmp_path, monkeypatch):
    path = tmp_path / "toy.npz"
    compressed(path, 9 * MIB)
    monkeypatch.setenv(VARIABLE, "8")
    with pytest.raises(ValueError, match=rf"toy\.npz takes 10 MiB .* than 8 MiB; .*{VARIABLE}"):
        read_npz(path)
    monkeypatch.setenv(VARIABLE, "10")
    with pytest.raises(ValueError, match="lacks y_train"):
        read_npz(path)


def test_files_in_proportion_may_be_of_any_size(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    write_npz(tmp_path / "toy.npz", x_test=np.zeros((4, 800, 800, 3), np.uint8), x_train=None)
    with pytest.raises(ValueError, match="lacks x_train"):
        read_npz(tmp_path / "toy.npz")


def test_a_declared_size_that_is_wrong(tmp_path):
    """Of the archive, and of the header of an array."""
    path = tmp_path / "toy.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", b"")
        archive.filelist[0].file_size = 10**13
    with memory_peak() as peak, pytest.raises(ValueError, match=r"toy\.npz .*MiB"):
        read_npz(path)
    assert peak.grown < LITTLE
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        content, {"descr": "|u1", "fortran_order": False, "shape": (2**30, 2)}
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", content.getvalue() + bytes(8))
    message = rf"toy\.npz .*x_train\.npy of shape .* should have {2**31} bytes, not 8"
    with memory_peak() as peak, pytest.raises(ValueError, match=message):
        read_npz(path)
    assert peak.grown < LITTLE


@pytest.mark.parametrize(
    ("changed", "value"), [(6, 1), (8, 99)], ids=["encrypted", "unknown compression"]
)
def test_archives_that_zipfile_cannot_read(tmp_path, changed, value):
    path = tmp_path / "toy.npz"
    write_npz(path)
    content = bytearray(path.read_bytes())
    begin = content.index(b"PK\x01\x02")  # the first entry of the directory
    content[changed] = content[begin + changed + 2] = value
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"toy\.npz is broken, or not a \.npz"):
        read_npz(path)


def test_an_array_instead_of_an_archive(tmp_path):
    with open(tmp_path / "toy.npz", "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match=r"toy\.npz is broken.*not a zip file"):
        read_npz(tmp_path / "toy.npz")


@pytest.mark.parametrize("given", ["many", "-1", "0", "1.5", "²"])
def test_a_limit_that_is_no_number(monkeypatch, given):
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ValueError, match=f"{VARIABLE} must be a number of MiB"):
        decoded_limit()


# Pictures


def png_of(width, height):
    """A file that declares a size, and has no pixels."""

    def chunk(kind, content):
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))


def test_a_picture_out_of_proportion(tmp_path, monkeypatch):
    path = tmp_path / "large.png"
    path.write_bytes(png_of(50_000, 50_000))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    with (
        memory_peak() as peak,
        pytest.raises(ValueError, match=rf"large\.png takes too much .*{VARIABLE}"),
    ):
        read_image(path)
    assert peak.grown < LITTLE
    monkeypatch.setenv(VARIABLE, "20000")
    with pytest.raises(ValueError, match=r"large\.png cannot be read as an image: .*truncated"):
        read_image(path)


def test_the_limit_of_pictures(tmp_path, monkeypatch):
    Image.new("RGB", (700, 500)).save(tmp_path / "a.png")
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(ValueError, match=r"a\.png takes 2 MiB .* more than 1 MiB"):
        read_image(tmp_path / "a.png")
    monkeypatch.setenv(VARIABLE, "2")
    assert read_image(tmp_path / "a.png").size == (700, 500)


def test_no_other_program_is_started(tmp_path, monkeypatch):
    """Pillow reads PostScript with Ghostscript, which is a programming language."""
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: started.append(1))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", "EPS")
    with pytest.raises(ValueError, match=r"a\.jpg cannot be read as an image"):
        read_image(tmp_path / "a.jpg")
    assert not started


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png .* not a file"):
        read_image(tmp_path / "a.png")


# Pickles


@pytest.mark.parametrize("content", BOMBS.values(), ids=list(BOMBS))
def test_pickles_that_describe_much(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with memory_peak() as peak, suppress(ValueError):
        as_tensor(read_pickle(tmp_path / "file").get("data"))
    assert peak.grown < LITTLE


def test_the_reader_itself_cannot_be_changed(tmp_path):
    name = b"X\x04\x00\x00\x00text"
    (tmp_path / "file").write_bytes(pickled(b"U\x01a", ENCODE, b"N}", name, b"K\x01s\x86b"))
    with pytest.raises(ValueError, match="objects that no file of CIFAR has"):
        read_pickle(tmp_path / "file")
