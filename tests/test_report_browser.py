"""The report in a real browser: offline, without errors, nothing wider than a phone."""

import re
from pathlib import Path

import pytest
import torch

from browser import ask, browse, needs_browser
from finished_runs import CLASSES, write_runs
from topklass.report import examples as grid
from topklass.report import write_report
from topklass.train import compare

POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
PHONE, DESK = 360, 1200
MEASURE = """
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(each => { each.open = true; });
  const box = each => each.getBoundingClientRect();
  const page = document.documentElement;
  const wide = [...document.querySelectorAll("body *")].filter(
    each => !each.closest("svg") && !each.closest("thead")
      && (box(each).right > innerWidth + 0.5 || each.scrollWidth > each.clientWidth + 1
          && getComputedStyle(each).display !== "inline"));
  parent.postMessage({
    width: innerWidth,
    scrolls: page.scrollWidth,
    wide: wide.map(each => each.outerHTML.slice(0, 200)),
    figures: [...document.querySelectorAll("figure > svg")].map(
      each => [box(each).width, box(each).height, box(each.querySelector("g")).width]),
    images: [...document.querySelectorAll("img")].map(each => each.naturalWidth),
    colour: getComputedStyle(document.body).backgroundColor,
    line: getComputedStyle(document.querySelector("figure path[style*='--smooth']")).stroke,
    text: document.body.innerText,
    loaded: performance.getEntriesByType("resource").map(each => each.name),
  }, "*");
});
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three groups with names and images of all kinds."""
    folder = tmp_path_factory.mktemp("report")
    runs = write_runs(folder, "smooth", [0.4, 0.6], tau=0.5, noise=0.2, head="cosine")
    runs += write_runs(folder, "cross-entropy", [0.3, 0.5], noise=0.2)
    long = {"root": "b" * 90}
    runs += write_runs(folder, "noised-imbalanced", [0.7], imbalance=12.0, data_options=long)
    picture, coarse = grid.png(torch.zeros(1, 8, 8, dtype=torch.uint8))
    guesses = [grid.Guess(name, 0.2, place == 1) for place, name in enumerate(CLASSES)]
    shown = [grid.Example(picture, coarse, name, [guesses] * 3) for name in CLASSES]
    with pytest.MonkeyPatch.context() as patched:
        made = grid.Examples(["smooth, tau 0.5", "cross-entropy", "n" * 60], shown, "Chosen.")
        patched.setattr("topklass.report.page.examples", lambda comparison: made)
        write_report(compare([*runs, folder / "nowhere"]), folder / "report.html")
    return folder / "report.html"


def measured(page: Path, folder: Path, width: int, *options: str) -> dict:
    """What a script finds on a copy of the page in a window of that width."""
    text, removed = POLICY.subn("", page.read_text())
    assert removed == 1
    return ask(text, MEASURE, folder, width, *options)


pytestmark = [pytest.mark.slow, needs_browser]


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_layout(page, tmp_path, width):
    found = measured(page, tmp_path, width)
    assert found["width"] == width
    assert found["scrolls"] <= width
    assert found["wide"] == []
    assert len(found["figures"]) == 5
    assert all(min(sizes) > 100 for sizes in found["figures"])
    assert found["images"] == [8] * len(CLASSES)
    assert found["loaded"] == [] or all(name.startswith("data:") for name in found["loaded"])
    for name in CLASSES:
        assert name in found["text"]


def test_light_and_dark(page, tmp_path):
    light = measured(page, tmp_path, PHONE)
    dark = measured(page, tmp_path, PHONE, "--blink-settings=preferredColorScheme=0")
    assert (light["colour"], dark["colour"]) == ("rgb(255, 255, 255)", "rgb(22, 24, 29)")
    assert (light["line"], dark["line"]) == ("rgb(0, 103, 163)", "rgb(88, 180, 240)")


def test_no_errors(page, tmp_path):
    """As it is, with its own policy: no message of the console, and no script of a class name."""
    shown, said = browse(page.as_uri(), tmp_path, f"--screenshot={tmp_path / 'shot.png'}")
    assert "CONSOLE" not in said, said
    assert "<script" not in shown
    assert "Top-2 test accuracy" in shown
