"""CIFAR in the official formats, written small; broken and malicious files."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from topklass.data import read_cifar
from topklass.data.safe_pickle import as_tensor, read_pickle

FINE = [f"fine_{index}" for index in range(10)]
COARSE = ["one", "two"]
OF_CLASS = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0, 1])


def samples(per_class: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(per_class)
    labels = rng.permutation(np.repeat(np.arange(10), per_class))
    return rng.integers(0, 256, (10 * per_class, 3072), dtype=np.uint8), labels


def write(path: Path, content: object) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.fixture
def pickles(tmp_path: Path) -> Path:
    for name, per_class in (("train", 5), ("test", 2)):
        data, labels = samples(per_class)
        content = {
            b"filenames": [b"a.png"] * len(data),
            b"batch_label": b"part 1 of 1",
            b"fine_labels": labels.tolist(),
            b"coarse_labels": OF_CLASS[labels].tolist(),
            b"data": data,
        }
        write(tmp_path / name, content)
    write(tmp_path / "meta", {"fine_label_names": FINE, "coarse_label_names": COARSE})
    return tmp_path


@pytest.fixture
def binaries(tmp_path: Path) -> Path:
    for name, per_class in (("train", 5), ("test", 2)):
        data, labels = samples(per_class)
        records = np.concatenate([OF_CLASS[labels][:, None], labels[:, None], data], 1)
        (tmp_path / f"{name}.bin").write_bytes(records.astype(np.uint8).tobytes())
    (tmp_path / "fine_label_names.txt").write_text("\n".join(FINE) + "\n")
    (tmp_path / "coarse_label_names.txt").write_text("\n".join(COARSE) + "\n")
    return tmp_path


@pytest.mark.parametrize("layout", ["pickles", "binaries"])
def test_cifar_100(layout, request):
    dataset = read_cifar(request.getfixturevalue(layout))
    assert dataset.classes == tuple(FINE)
    assert dataset.superclasses["coarse"].names == tuple(COARSE)
    assert dataset.superclasses["coarse"].of_class.tolist() == OF_CLASS.tolist()
    assert dataset.validation is None
    for name, per_class in (("train", 5), ("test", 2)):
        data, labels = samples(per_class)
        split = dataset.splits[name]
        assert split.labels.tolist() == labels.tolist()
        assert torch.equal(split.images, torch.from_numpy(data).view(-1, 3, 32, 32))


def test_the_folder_around_it_is_enough(pickles, tmp_path_factory):
    around = tmp_path_factory.mktemp("around")
    (around / "cifar-100-python").symlink_to(pickles)
    assert len(read_cifar(around).train) == 50


def test_cifar_10(tmp_path):
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        data, labels = samples(number + 1)
        write(tmp_path / name, {b"labels": labels.tolist(), b"data": data})
    write(tmp_path / "batches.meta", {b"label_names": [name.encode() for name in FINE]})
    dataset = read_cifar(tmp_path)
    assert dataset.classes == tuple(FINE)
    assert dataset.counts.tolist() == [15] * 10
    assert dataset.train.labels[10:30].tolist() == samples(2)[1].tolist()
    assert dataset.superclasses == {}


def test_pickles_of_python_2(tmp_path):
    """As Python 2 wrote them: strings of bytes, NumPy under its old name, the oldest protocols."""
    raw = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\n"
        b"q\x04K\x00\x85q\x05U\x01bq\x06\x87q\x07Rq\x08(K\x01K\x01K\x03\x86q\tcnumpy\ndtype\nq\n"
        b"U\x02u1q\x0bK\x00K\x01\x87q\x0cRq\r(K\x03U\x01|q\x0eNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tq\x0fb\x89U\x03\x01\xff\x03q\x10tq\x11bU\x06labelsq\x12]q\x13K\x07au."
    )
    (tmp_path / "file").write_bytes(raw)
    content = read_pickle(tmp_path / "file")
    assert content["labels"] == [7]
    assert as_tensor(content["data"]).tolist() == [[1, 255, 3]]


# Broken files


def test_missing_files_are_named(pickles):
    (pickles / "meta").unlink()
    with pytest.raises(FileNotFoundError, match="lacks meta: expected the files train, test, meta"):
        read_cifar(pickles)


def test_another_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cifar-100-binary: train\.bin, test\.bin"):
        read_cifar(tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 50, 0.5, 0.999])
def test_truncated_pickles(pickles, kept):
    file = pickles / "train"
    content = file.read_bytes()
    file.write_bytes(content[: kept if kept >= 1 else int(kept * len(content))])
    with pytest.raises(ValueError, match=r"train is corrupt, or not a file of CIFAR"):
        read_cifar(pickles)


@pytest.mark.parametrize("name", ["train.bin", "test.bin"])
@pytest.mark.parametrize("lost", [1, 3074, 3075, None])
def test_truncated_binaries(binaries, name, lost):
    file = binaries / name
    content = file.read_bytes()
    file.write_bytes(b"" if lost is None else content[:-lost])
    with pytest.raises(ValueError, match=rf"{name} is (corrupt or truncated|incomplete)"):
        read_cifar(binaries)


def test_binaries_with_labels_that_there_are_not(binaries):
    file = binaries / "train.bin"
    content = bytearray(file.read_bytes())
    content[1] = 200
    file.write_bytes(content)
    with pytest.raises(ValueError, match="labels must be from 0 to 9, got 200"):
        read_cifar(binaries)


def test_binaries_with_contradicting_superclasses(binaries):
    file = binaries / "train.bin"
    content = bytearray(file.read_bytes())
    content[0] = 1 - content[0]
    file.write_bytes(content)
    with pytest.raises(ValueError, match="more than one superclass"):
        read_cifar(binaries)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": np.zeros((50, 3000), np.uint8)}, "3072 bytes of data for each of its 50 labels"),
        ({"data": np.zeros((49, 3072), np.uint8)}, r"found shape \(49, 3072\)"),
        ({"data": np.zeros((50, 3072))}, "must hold uint8"),
        ({"data": np.zeros((3072, 50), np.uint8).T}, "must hold uint8 by rows"),
        ({"data": [1, 2]}, "train: there must be an array, found list"),
        ({"fine_labels": [99] * 50}, "is corrupt"),
        ({"fine_labels": None}, "train: fine_labels must be a list of class indices"),
        ({"fine_labels": ["0"] * 50}, "train: fine_labels must be a list of class indices"),
        ({"fine_labels": [10**20] * 50}, "train: fine_labels must be a list of class indices"),
        ({"fine_labels": [[0]] * 50}, "train: fine_labels must be a list of class indices"),
    ],
)
def test_pickles_with_other_content(pickles, change, message):
    data, labels = samples(5)
    labels = labels.tolist()
    content = {"data": data, "fine_labels": labels, "coarse_labels": OF_CLASS[labels].tolist()}
    write(pickles / "train", content | change)
    with pytest.raises(ValueError, match=message):
        read_cifar(pickles)


# Malicious files


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "function",
    [os.mkdir, exec, getattr, np.load, torch.load],
    ids=lambda f: f.__name__ + f.__module__,
)
def test_nothing_is_executed(pickles, function, protocol):
    trace = pickles / "trace"
    argument = f"open({str(trace)!r}, 'w')" if function is exec else str(trace)
    attack = {"data": [Call(function, argument)], "fine_labels": [0], "coarse_labels": [0]}
    (pickles / "train").write_bytes(pickle.dumps(attack, protocol=protocol))
    with pytest.raises(ValueError, match="which is not executed"):
        read_cifar(pickles)
    assert not trace.exists()


def test_the_attack_would_work_without_protection(tmp_path):
    pickle.loads(pickle.dumps(Call(os.mkdir, str(tmp_path / "trace"))))
    assert (tmp_path / "trace").is_dir()


def test_a_pickle_without_a_dictionary(tmp_path):
    write(tmp_path / "file", [1, 2])
    with pytest.raises(ValueError, match="must hold a dictionary, found list"):
        read_pickle(tmp_path / "file")


def test_arrays_with_a_wrong_number_of_bytes(tmp_path):
    array = np.zeros((2, 3), np.uint8)
    content = pickle.dumps({"data": array}, protocol=2).replace(b"K\x02K\x03", b"K\x04K\x03")
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="cannot have 6 bytes"):
        as_tensor(read_pickle(tmp_path / "file")["data"])
