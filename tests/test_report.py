"""The report: complete, self-contained, safe with any class name, with images if there are any."""

import base64
import re
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from finished_runs import CLASSES, RECIPE, write_run, write_runs
from test_cli import run, write_patterns
from topklass.report import Report, write_report
from topklass.report.colours import COLOURS, PAIRS, styles
from topklass.report.examples import IMAGES, choose, png
from topklass.report.figures import by_class, curves
from topklass.train import LOSSES, compare

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard


class Page(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def values(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


def report(runs: list[Path], path: Path) -> str:
    write_report(compare(runs), path)
    return path.read_text()


def train(monkeypatch, *arguments: str) -> None:
    assert run(monkeypatch, "train", *arguments) == 0


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Two runs on six patterns, whose names are dangerous."""
    data = write_patterns(tmp_path / "toy.npz", noise=60, classes=np.array(CLASSES))
    shared = f"--data {data} --epochs 1 --batch-size 16 --k 2".split()
    folders = []
    for loss in ("cross-entropy", "smooth"):
        folders.append(tmp_path / loss)
        train(monkeypatch, *shared, "--loss", loss, "--folder", str(folders[-1]))
    return folders


def test_compare_command(trained, tmp_path, monkeypatch, capsys):
    output = tmp_path / "pages" / "report.html"
    arguments = [*map(str, trained), str(tmp_path / "nowhere"), "--output", str(output)]
    capsys.readouterr()
    assert run(monkeypatch, "compare", *arguments) == 0
    shown = capsys.readouterr().out
    assert "nowhere holds no run" in shown
    assert "cross-entropy" in shown
    assert "top-2 gain" in shown
    page = Page(output.read_text())
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert 0 < len(images) <= IMAGES
    first = base64.b64decode(images[0]["src"].partition(",")[2])
    assert Image.open(BytesIO(first)).size == (8, 8)
    assert {image["alt"] for image in images} <= {f"test image of {name}" for name in CLASSES}
    assert any(name in page.text for name in CLASSES)
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count("cross-entropy, seed 0") == len(images)
    assert run(monkeypatch, "compare", str(tmp_path / "nowhere")) == 2
    assert "no finished run" in capsys.readouterr().err


def test_images_of_data_that_are_gone_or_changed(trained, tmp_path):
    data = tmp_path / "toy.npz"
    arrays = dict(np.load(data))
    np.savez(data, **{**arrays, "y_test": arrays["y_test"][::-1]})
    assert "is not the same as when it was trained on" in report(trained, tmp_path / "a.html")
    data.unlink()
    page = Page(report(trained, tmp_path / "b.html"))
    assert "There are no test images here" in page.text
    assert "img" not in {tag for tag, _ in page.tags}
    assert len([tag for tag, _ in page.tags if tag == "figure"]) == 5


def test_in_a_notebook(tmp_path):
    """A frame with the page that is written."""
    runs = write_runs(tmp_path, "smooth", [0.4]) + write_runs(tmp_path, "cross-entropy", [0.3])
    (frame,) = Page(Report(compare(runs))._repr_html_()).tags
    assert frame[0] == "iframe"
    assert frame[1]["srcdoc"] == report(runs, tmp_path / "report.html")


def test_self_contained(tmp_path):
    runs = write_runs(tmp_path, "smooth", [0.4, 0.6], tau=0.5)
    runs += write_runs(tmp_path, "cross-entropy", [0.3, 0.5])
    text = report(runs, tmp_path / "report.html")
    page = Page(text)
    for name in ("src", "href", "srcset", "action", "data", "xlink:href"):
        assert all(value.startswith(("#", "data:")) for value in page.values(name)), name
    assert all(found.startswith("#") for found in re.findall(r"url\(([^)]*)\)", text))
    assert "@import" not in text
    assert "http:" not in text
    assert "https:" not in text
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "iframe", "object", "embed", "base", "form"}
    assert ("viewport", "width=device-width, initial-scale=1") in {
        (attributes.get("name"), attributes.get("content")) for _, attributes in page.tags
    }
    policy = next(a["content"] for t, a in page.tags if "http-equiv" in a)
    assert "default-src 'none'" in policy


def test_contents(tmp_path):
    runs = write_runs(tmp_path, "smooth", [0.4, 0.6], tau=0.5)
    runs += write_runs(tmp_path, "cross-entropy", [0.3, 0.5])
    page = Page(report([*runs, tmp_path / "nowhere"], tmp_path / "report.html"))
    words = page.text.replace("\xa0", " ")
    for expected in (
        "2 recipes on toy, 6 classes",
        "Best of 2 recipes: smooth, tau 0.5",
        "nowhere holds no run",
        "50.0 ± 14.1",
        "Top-2 accuracy in validation",
        "Top-1 accuracy in validation",
        "Top-2 accuracy in training",
        "by the number of guesses",
        "from worst to best",
        "about the same number of training images (10)",
        "learning_rate",
        "topklass 1, torch 2; a computer",
    ):
        assert expected in words, expected
    ids = page.values("id")
    assert len(set(ids)) == len(ids)
    used = {v[1:] for v in page.values("href") if v.startswith("#")}
    assert used <= set(ids)
    pictures = [a["aria-label"] for t, a in page.tags if t == "svg" and a.get("role") == "img"]
    assert len(pictures) == 5
    assert any("smooth, tau 0.5: 16.7 % at 1, 50.0 % at 3" in alt for alt in pictures)
    headers = [a for t, a in page.tags if t == "th"]
    assert all(a["scope"] in ("col", "row") for a in headers)


def test_the_same_twice(tmp_path):
    runs = write_runs(tmp_path, "smooth", [0.4, 0.6])
    assert report(runs, tmp_path / "a.html") == report(runs, tmp_path / "b.html")


def test_long_tails(tmp_path):
    counts = [100, 50, 20, 10, 2, 0]
    runs = write_runs(tmp_path, "smooth", [0.4, 0.6], imbalance=50.0, counts=counts)
    picture = by_class(compare(runs))
    assert "by the frequency of the class" in picture.title
    assert " at 0," in picture.svg
    assert " at 100." in picture.svg


def test_settings_are_escaped(tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    runs = [
        write_run(tmp_path / str(n), RECIPE.with_changes({"data_options": {"root": value}}))
        for n, value in enumerate((evil, "[bold]b"))
    ]
    page = Page(report(runs, tmp_path / "report.html"))
    assert "img" not in {tag for tag, _ in page.tags}
    assert evil in page.text


@pytest.mark.parametrize("recipe", [{"k": 1}, {"epochs": 1}, {"k": 3}], ids=str)
def test_corners(tmp_path, recipe):
    """One group, one seed, one epoch, k = 1; several k."""
    runs = write_runs(tmp_path, "cross-entropy", [0.5], **recipe)
    if recipe == {"k": 3}:
        runs += write_runs(tmp_path, "smooth", [0.0], k=2)
    text = report(runs, tmp_path / "report.html")
    assert "nan" not in text.lower().replace("nanum", "")
    assert "means over seeds" not in text


@pytest.mark.parametrize("epochs", [1, 2, 7])
def test_epochs_are_whole_numbers(tmp_path, epochs):
    runs = write_runs(tmp_path, "cross-entropy", [0.5], epochs=epochs)
    texts = re.findall(r">([^<>]+)</text>", curves(compare(runs))[0].svg)
    assert texts[: texts.index("epoch")] == [str(epoch + 1) for epoch in range(epochs)]


def test_choose():
    right = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0], [1, 0, 1, 0, 0, 0, 0, 1]]).bool()
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    chosen, differ = choose(right, labels)
    assert differ
    assert chosen == [1, 2, 4, 5, 6, 7]
    many = torch.rand(3, 600, generator=torch.Generator().manual_seed(0)) < 0.5
    chosen, differ = choose(many, torch.arange(600) // 20)
    assert len(set(chosen)) == IMAGES
    assert len({index // 20 for index in chosen}) == IMAGES
    ways = [tuple(many[:, index].tolist()) for index in chosen]
    assert {ways.count(way) for way in ways} == {2}
    assert (True,) * 3 not in ways
    agreed, differ = choose(torch.tensor([[True, False, True]]), torch.zeros(3))
    assert (agreed, differ) == ([0, 1, 2], False)


@pytest.mark.parametrize(
    ("picture", "size"),
    [
        (torch.zeros(1, 8, 9, dtype=torch.uint8), (9, 8)),
        (torch.zeros(3, 400, 200, dtype=torch.uint8), (80, 160)),
        (Image.new("CMYK", (320, 100)), (160, 50)),
        (Image.new("P", (5, 5)), (5, 5)),
    ],
)
def test_png(picture, size):
    text, coarse = png(picture)
    assert Image.open(BytesIO(base64.b64decode(text))).size == size
    assert coarse == (max(size) < 64)


def test_colours(tmp_path):
    """Every loss has its own; lines stand out from both pages (WCAG 2.2: 3 to 1)."""
    assert list(COLOURS) == list(LOSSES)
    for name, (light, dark) in PAIRS.items():
        if name not in ("page", "rule", "soft"):
            assert contrast(light, PAIRS["page"][0]) > 3
            assert contrast(dark, PAIRS["page"][1]) > 3
    alone = compare(write_runs(tmp_path, "focal", [0.5]))
    runs = write_runs(tmp_path / "x", "focal", [0.5]) + write_runs(tmp_path, "hinge", [0.5])
    runs += write_runs(tmp_path, "hinge", [0.5], margin=2.0)
    several = styles(compare(runs))
    assert len(set(several)) == 3
    assert styles(alone)[0].colour == several[2].colour


def contrast(one: str, other: str) -> float:
    """Of two colours, by WCAG."""
    lights = sorted(map(luminance, (one, other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
