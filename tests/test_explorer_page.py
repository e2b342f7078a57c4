"""The explorer as a page: its address holds its state, it follows the pointer, it is offline."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from browser import ask, browse, needs_browser

pytestmark = [pytest.mark.slow, needs_browser]

PAGE = Path(__file__).parent.parent / "docs" / "explorer" / "index.html"
PHONE, DESK = 360, 1280
ROUND_TRIP = """
const { encode, decode } = explorer;
const random = (seed => () => (seed = (seed * 48271) % 2147483647) / 2147483647)(7);
const whole = (low, high) => low + Math.floor(random() * (high - low + 1));
const states = explorer.EXAMPLES.map(({ state }) => state);
for (let i = 0; i < 300; i++) {
  const n = whole(3, 12), label = whole(0, n - 1), free = explorer.math.others(n, label);
  const side = () => {
    const names = Object.keys(explorer.LOSSES), loss = names[whole(0, names.length - 1)];
    const settings = { loss, ...explorer.LOSSES[loss].settings, k: whole(1, n - 1) };
    if (settings.also) settings.also = free.filter(() => random() < 0.3);
    if (settings.tau) settings.tau = 0.001 + random();
    return settings;
  };
  const scores = Array.from({ length: n }, () => 20 * random() - 10);
  const corners = [free[1], free[0]];
  states.push({ scores, label, corners, range: 5, first: side(), second: side() });
}
parent.postMessage(states.map(state => {
  const { state: read, errors } = decode(encode(state));
  return { errors, same: JSON.stringify(read) === JSON.stringify(state) };
}), "*");
"""


def test_address_holds_the_state(tmp_path):
    found = ask(PAGE.read_text("utf-8"), ROUND_TRIP, tmp_path, DESK)
    assert len(found) > 300
    assert all(each == {"errors": [], "same": True} for each in found), found


BROKEN = {
    "scores=1,2": "scores=1,2: expected 3 to 12 numbers",
    "scores=1,,2,3": "scores=1,,2,3: expected 3 to 12 numbers",
    "scores=1,2,Infinity": "scores=1,2,Infinity: expected 3 to 12 numbers",
    "label=Z": "label=Z: expected a class from A to F",
    "label=AB": "label=AB: expected a class",
    "scores=1,2,3&label=D": "label=D: expected a class from A to C",
    "corners=A,B": "corners=A,B: expected two classes",
    "range=7": "range=7: expected one of 0.5, 1",
    "first=toString": "first=toString: expected one of cross-entropy, smooth",
    "first=smooth&first.k=6": "first.k=6: expected a whole number from 1 to 5",
    "first=smooth&first.tau=warm": "first.tau=warm: expected a number from 0.001 to 100",
    "second=hinge&second.margin=": "second.margin=: expected a number from 0 to 5",
    "first=hinge&first.tau=1": "first.tau: ignored; there are scores, label, corners",
    "nonsense": "nonsense: ignored; there are scores, label",
    "scores=%": "the address has a %",
    "first=<img src=x onerror=alert(1)>": "first=<img src=x onerror=alert(1)>: expected one of",
}


def test_broken_addresses_say_what_is_wrong(tmp_path):
    script = """parent.postMessage(BROKEN.map(hash => {
      location.hash = hash;
      load();
      return {
        text: one("#errors").innerText,
        shown: one("#first .value output").textContent,
        images: document.images.length,
        sound: explorer.decode(explorer.encode(explorer.state())).errors,
      };
    }), "*");"""
    script = script.replace("BROKEN", json.dumps(list(BROKEN)))
    found = ask(PAGE.read_text("utf-8"), script, tmp_path, DESK)
    for each, expected in zip(found, BROKEN.values(), strict=True):
        assert expected in each["text"]
        assert re.fullmatch(r"\d+\.\d{4}", each["shown"])
        assert each["sound"] == []
        assert each["images"] == 0


DRAG = """
const outputs = [...document.querySelectorAll(".value output")];
const values = () => outputs.map(each => Number(each.textContent));
const rest = () => new Promise(resolve => setTimeout(resolve, 400));
const point = (type, element, x, y) => {
  const box = element.getBoundingClientRect();
  element.dispatchEvent(new PointerEvent(type, { bubbles: true, pointerId: 1,
    clientX: box.left + x * box.width, clientY: box.top + y * box.height }));
};
const drag = (element, ...points) => {
  point("pointerdown", element, ...points[0]);
  points.forEach(each => point("pointermove", element, ...each));
  point("pointerup", element, ...points.at(-1));
  point("pointermove", element, 0.5, 0.5); // no longer followed
};
(async () => {
  const seen = [];
  const see = () => {
    const scores = [...explorer.state().scores];
    seen.push({ values: values(), scores, hash: location.hash });
  };
  see();
  drag(one("#scores"), [0.05, 0.5], [0.4, 0.06]);
  await rest();
  see();
  const arrow = new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true });
  document.activeElement.dispatchEvent(arrow);
  await rest();
  see();
  drag(one("#second .triangle"), [0.5, 0.5], [0, 1]);
  await rest();
  see();
  one("#copy").click();
  seen.at(-1).link = one("#link").value;
  parent.postMessage(seen, "*");
})();
"""


def test_dragging(tmp_path):
    """A bar, an arrow key, and the dot of a triangle; each is in the address afterwards."""
    address = "#scores=0,2,1,-1&label=A&range=5&first=smooth&second=hinge&second.k=2"
    found = ask(PAGE.read_text("utf-8"), DRAG, tmp_path, DESK, address=address)
    start, bar, key, dot = found
    assert bar["scores"] == [4.95, 2, 1, -1]
    assert key["scores"] == [4.85, 2, 1, -1]
    assert dot["scores"][0] == pytest.approx((4.85 + 2 + 1) / 3 - 20 / 3, abs=0.02)
    assert dot["scores"][1] == pytest.approx((4.85 + 2 + 1) / 3 + 40 / 3, abs=0.02)
    assert dot["scores"][3] == -1
    for before, after in pairwise(found):
        assert after["hash"] != before["hash"]
        assert f"scores={','.join(f'{x:g}' for x in after['scores'])}&" in after["hash"]
    assert bar["values"][0] < start["values"][0]
    assert (start["values"][1], bar["values"][1]) == (2.0, 0.0)
    assert dot["values"][1] > 1
    assert dot["link"] == (tmp_path / "page.html").as_uri() + dot["hash"]


MEASURE = """
scrollTo(0, 1000);
setTimeout(() => parent.postMessage({
  scrolled: scrollY,
  stuck: one("#scores").getBoundingClientRect().top,
  width: innerWidth,
  scrolls: document.documentElement.scrollWidth,
  colour: getComputedStyle(document.body).backgroundColor,
  loaded: performance.getEntriesByType("resource").map(each => each.name),
  charts: [...document.querySelectorAll(".bars, canvas")].map(each => {
    const { left, right, width, height } = each.getBoundingClientRect();
    return [left, innerWidth - right, width - 200, height - 60];
  }),
}, "*"), 500);
"""
TWELVE = (
    f"#scores={','.join(map(str, range(-6, 6)))}&first=noised&second=multi-label&second.also=B,C"
)


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_layout(tmp_path, width):
    found = ask(PAGE.read_text("utf-8"), MEASURE, tmp_path, width, address=TWELVE)
    assert found["width"] == width
    assert found["scrolls"] <= width
    assert found["loaded"] == []
    assert found["scrolled"] > 400
    assert 0 <= found["stuck"] < 100  # the scores stay in sight
    assert len(found["charts"]) == 7
    assert all(min(each) > 0 for each in found["charts"])


def test_light_and_dark(tmp_path):
    text = PAGE.read_text("utf-8")
    light = ask(text, MEASURE, tmp_path, PHONE)
    dark = ask(text, MEASURE, tmp_path, PHONE, "--blink-settings=preferredColorScheme=0")
    assert (light["colour"], dark["colour"]) == ("rgb(247, 248, 249)", "rgb(18, 20, 25)")


def test_no_requests_and_no_errors(tmp_path):
    """From a file, as it is: its policy forbids requests, and it names no host."""
    text = PAGE.read_text("utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(|fetch\(|XMLHttp|import\(|\ssrc=", text)
    shown, said = browse(PAGE.as_uri() + TWELVE, tmp_path)
    assert "CONSOLE" not in said, said
    assert "class L" in shown
