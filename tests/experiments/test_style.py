"""Figures of documents: legible on a phone and on dark pages, labels apart, small files."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import matplotlib
import pytest
from benchmarks.environment import ROOT, read
from benchmarks.gains_plot import differences
from matplotlib.figure import Figure
from matplotlib.text import Text

from experiments.style import LOOK, SMALL, WIDTH, label_ends, save
from topklass.report.colours import PAIRS

IMAGES = sorted((ROOT / "docs" / "images").rglob("*.svg"))
PHONE = 360
"""Pixels."""
LIGHT = {light for light, _ in PAIRS.values()}


def drawn_lines(tmp_path: Path, heights: list[float]) -> tuple[Figure, Path]:
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 3), layout="constrained")
        axes = figure.subplots()
        colour = PAIRS["smooth"][0]
        lines = [axes.plot([0, 1], [0, y], color=colour, label=f"to {y}")[0] for y in heights]
        label_ends(figure, axes, lines)
        return figure, save(figure, tmp_path, "lines", "lines < curves")


def test_labels_are_beside_their_lines_and_apart(tmp_path):
    figure, _ = drawn_lines(tmp_path, [1.0, 0.99, 1.01, 0.2])
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}  # no leaders
    edge = axes.get_window_extent().x1
    assert all(box.x0 > edge for box in boxes.values())
    middles = sorted((box.y0 + box.y1) / 2 for box in boxes.values())
    gaps = [high - low for low, high in pairwise(middles)]
    assert min(gaps) >= SMALL * figure.dpi / 72
    alone = boxes["to 0.2"]
    assert (alone.y0 + alone.y1) / 2 == pytest.approx(axes.transData.transform((1, 0.2))[1], abs=1)
    assert figure.bbox.x1 >= max(box.x1 for box in boxes.values())


def test_a_file_has_both_sets_of_colours_and_a_title(tmp_path):
    _, path = drawn_lines(tmp_path, [1.0])
    text = path.read_text("utf-8")
    assert ET.fromstring(text).findtext("{*}title") == "lines < curves"
    light, dark = PAIRS["smooth"]
    before, after = text.split("@media (prefers-color-scheme: dark)")
    assert f"--smooth: {light};" in before
    assert f"--smooth: {dark};" in after.split("</style>")[0]
    assert "stroke: var(--smooth)" in after


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_images_are_legible_at_the_width_of_a_phone(path):
    """At least 9.5 pixels; no text in a colour of light pages alone; nothing fetched."""
    text = path.read_text("utf-8")
    width = float(re.search(r'viewBox="0 0 ([\d.]+) ', text)[1])
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", text)]
    sizes += [float(size) for size in re.findall(r"font: (?:italic )?([\d.]+)px", text)]
    assert sizes
    assert min(sizes) * PHONE / width > 9.5
    _, body = text.split("</style>", 1)
    for style in re.findall(r"<text[^>]*style=\"([^\"]*)\"", body):
        assert "fill: var(--" in style
    assert not LIGHT & set(re.findall(r"#[0-9a-f]{6}", body))
    assert not re.search(r'(href|src)="(?!#|data:)', text)
    assert len(text) < 200_000


def test_gains_are_differences_of_the_same_seed():
    record = {"rows": []}
    for method, seed, kind, noise, top5 in (
        ("smooth", 0, "block", 0.4, 0.9),
        ("cross-entropy", 0, "block", 0.4, 0.88),
        ("smooth", 1, "block", 0.4, 0.95),  # without another to compare with
        ("smooth", 0, "superclass", 0.0, 0.5),  # without noise, its kind does not matter
        ("cross-entropy", 0, "superclass", 0.0, 0.75),
    ):
        settings, test = {"noise": noise, "noise_kind": kind}, {"micro": [0, 0, 0, 0, top5]}
        record["rows"].append({"method": method, "seed": seed, "settings": settings, "test": test})
    found = differences(record, "block", 5)
    assert found == {0.0: [-25.0], 0.4: [pytest.approx(2)]}
    assert differences(read("reproduce/cifar100-noise-fast"), "block", 5)[0.8]
