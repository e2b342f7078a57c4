"""Lists for image files: those of the network, without the data it was trained on."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import topklass
from image_folders import write_folder
from test_cli import npz, run, settings  # noqa: F401 a fixture
from topklass.train import Recipe, load_run, predict, train
from topklass.train.engine import predictions
from topklass.train.prediction import explain_probabilities, image_files, network_input, scale_of
from topklass.train.signature import Signature

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard
SMALL = Signature(tuple("abcdef"), 1, 8, 8, None, (0.5,), (0.2,))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on image files, whose folder is gone; logits of its test images, and copies of them."""
    base = tmp_path_factory.mktemp("trained")
    folder = write_folder(base / "toy")
    recipe = Recipe(
        data=str(folder), k=2, epochs=1, batch_size=18, crop=12, learning_rate=0.02, workers=1
    )
    train(recipe, base / "run")
    loaded = load_run(base / "run")
    logits = predictions(loaded.recipe, loaded.network, loaded.dataset.test)
    shutil.move(folder / "test", base / "images")
    shutil.rmtree(folder)
    return base / "run", base / "images", logits


def test_lists_are_those_of_the_network(trained):
    folder, images, logits = trained
    lists = predict(folder, [images])
    top = topklass.predict_topk(logits, 2, temperature=5.0)
    assert [guesses.path for guesses in lists] == sorted(map(str, images.rglob("*.png")))
    names = [tuple(f"class {label}" for label in row) for row in top.labels.tolist()]
    assert [guesses.classes for guesses in lists] == names
    shown = torch.tensor([guesses.probabilities for guesses in lists])
    torch.testing.assert_close(shown, top.probabilities, atol=1e-5, rtol=1e-5)


def test_length_of_the_lists(trained):
    folder, images, logits = trained
    guesses = predict(folder, sorted(images.rglob("*.png"))[:1], k=4)[0]
    assert guesses.classes == tuple(f"class {i}" for i in logits[0].topk(4).indices.tolist())
    with pytest.raises(ValueError, match="k"):
        predict(folder, [images], k=0)
    with pytest.raises(ValueError, match="k"):
        predict(folder, [images], k=7)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("size", [(8, 8), (1, 1), (300, 40)])
def test_any_mode_and_size(tmp_path, mode, size):
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    Image.new(mode, size).save(path)
    from topklass.data.files import read_image

    picture = read_image(path)
    assert network_input(picture, SMALL).shape == (1, 8, 8)
    large = Signature(tuple("abcdef"), 3, 12, 12, 14, (0.5,) * 3, (0.2,) * 3)
    assert network_input(picture, large).shape == (3, 12, 12)


def test_small_images_are_seen_as_they_are():
    pixels = torch.randint(0, 256, (8, 8), dtype=torch.uint8)
    picture = Image.fromarray(pixels.numpy()).convert("RGB")
    assert torch.equal(network_input(picture, SMALL)[0], pixels)
    wide = picture.crop((-8, 0, 16, 8))  # black on both sides, which is cut off
    assert torch.equal(network_input(wide, SMALL)[0], pixels)


def test_a_run_on_small_images(monkeypatch, capsys, npz, tmp_path):  # noqa: F811 a fixture
    folder = tmp_path / "run"
    assert run(monkeypatch, "train", *settings(npz), "--folder", str(folder)) == 0
    loaded = load_run(folder)
    logits = predictions(loaded.recipe, loaded.network, loaded.dataset.test)
    pixels = np.load(npz)["x_test"]
    (tmp_path / "images").mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "images" / f"{number:03}.png")
    npz.unlink()
    capsys.readouterr()
    assert run(monkeypatch, "predict", str(folder), str(tmp_path / "images"), "--json") == 0
    record = json.loads(capsys.readouterr().out)
    names = [[str(label) for label in row] for row in logits.topk(2).indices.tolist()]
    assert [row["classes"] for row in record] == names
    assert record[0]["path"].endswith("000.png")
    image = str(tmp_path / "images" / "000.png")
    assert run(monkeypatch, "predict", str(folder), image, "--k", "3") == 0
    shown = capsys.readouterr().out
    assert "probability of belonging to the top 3" in shown
    assert shown.count(" %") == 3


def test_probabilities_of_each_loss():
    logits = torch.randn(4, 6)

    def probabilities_of(**settings: object) -> torch.Tensor:
        recipe = Recipe(k=2).with_changes(settings)
        return topklass.predict_topk(logits, 2, **scale_of(recipe, 6)).probabilities

    def largest(probabilities: torch.Tensor) -> torch.Tensor:
        return probabilities.sort(descending=True).values[:, :2]

    expected = {
        "cross-entropy": logits.softmax(1),
        "focal": logits.softmax(1),
        "ldam": logits.softmax(1),
        "smooth": topklass.topk_marginals(logits / 2, 2),
        "short-list": topklass.topk_marginals(logits / 5, 2),
        "topk-cross-entropy": topklass.topk_marginals(logits, 2),
        "noised": topklass.topk_marginals(logits, 2),
        "hinge": topklass.topk_marginals(logits, 2),
    }
    for loss, probabilities in expected.items():
        torch.testing.assert_close(probabilities_of(loss=loss), largest(probabilities))
    on_cosines = {
        "ldam": (30 * logits).softmax(1),
        "noised": topklass.topk_marginals(60 * logits, 2),
    }
    for loss, probabilities in on_cosines.items():
        torch.testing.assert_close(
            probabilities_of(loss=loss, head="cosine"), largest(probabilities)
        )
    sharper = largest(topklass.topk_marginals(logits / (2 * 0.3), 2))
    torch.testing.assert_close(probabilities_of(loss="smooth", tau=0.3), sharper)
    torch.testing.assert_close(probabilities_of(loss="smooth", tau=0.3, match=False), sharper)
    listed = largest(topklass.topk_marginals(logits, 2))
    torch.testing.assert_close(probabilities_of(loss="topk-cross-entropy", first_guess=0.5), listed)
    scaled = largest((10 * logits).softmax(1))
    torch.testing.assert_close(probabilities_of(loss="ldam", scale=10.0), scaled)
    assert explain_probabilities(Recipe(loss="ldam"), 5) == "probability of being the class"


def test_files_and_folders(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "folder.png").mkdir()
    for name in ("b/2.PNG", "b/1.jpg", "b/c/3.webp", "b/notes.txt", "a.dat"):
        (tmp_path / name).touch()
    found = image_files([tmp_path / "b", str(tmp_path / "a.dat")])
    assert found == [str(tmp_path / n) for n in ("b/1.jpg", "b/2.PNG", "b/c/3.webp", "a.dat")]
    (tmp_path / "d").mkdir()
    with pytest.raises(FileNotFoundError, match="has no images"):
        image_files([tmp_path / "d"])


def test_errors(monkeypatch, capsys, trained, tmp_path):
    folder, images, _ = trained
    assert run(monkeypatch, "predict", str(tmp_path), str(images)) == 2
    assert "there is no run in" in capsys.readouterr().err
    assert run(monkeypatch, "predict", str(folder), str(tmp_path / "none.png")) == 2
    assert "there is no image" in capsys.readouterr().err
    (tmp_path / "bad.png").write_bytes(b"bad")
    assert run(monkeypatch, "predict", str(folder), str(images), str(tmp_path / "bad.png")) == 2
    error = capsys.readouterr().err
    assert "bad.png cannot be read as an image" in error
    assert "Traceback" not in error


def test_check(monkeypatch, capsys, tmp_path):
    folder = write_folder(tmp_path / "toy", train=2, others=1)
    assert run(monkeypatch, "check", str(folder)) == 0
    assert "0 images cannot be read" in capsys.readouterr().out
    (folder / "train" / "class 4" / "1.png").write_bytes(b"bad")
    assert run(monkeypatch, "check", str(folder)) == 1
    shown = capsys.readouterr().out
    assert "1.png cannot be read" in shown
    assert "1 images cannot be read" in shown


def test_train_a_folder(monkeypatch, capsys, tmp_path):
    folder = write_folder(tmp_path / "toy", train=4, others=2)
    arguments = f"--data {folder} --epochs 1 --batch-size 6 --k 2 --crop 12 --workers 0".split()
    assert run(monkeypatch, "train", *arguments, "--folder", str(tmp_path / "run")) == 0
    assert run(monkeypatch, "evaluate", str(tmp_path / "run")) == 0
    assert "average over 10 crops" in capsys.readouterr().out
    (folder / "train" / "class 4" / "1.png").write_bytes(b"bad")
    assert run(monkeypatch, "train", *arguments, "--folder", str(tmp_path / "other")) == 2
    assert "--resume; `topklass check` finds all such files" in capsys.readouterr().err
