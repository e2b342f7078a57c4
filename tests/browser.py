"""Pages in headless Chromium: what they look like after their scripts, without any network."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
needs_browser = pytest.mark.skipif(not BROWSER, reason="there is no Chromium to open the page with")
FRAME = """<!doctype html><meta charset="utf-8"><pre id="found"></pre>
<script>
addEventListener("message", event => { found.textContent += JSON.stringify(event.data) + "\\n"; });
</script>
<iframe src="SOURCE" style="border: 0" width="WIDTH" height="800"></iframe>
"""


def browse(url: str, folder: Path, *options: str) -> tuple[str, str]:
    """What the browser made of a page, and what it said."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--no-first-run", "--disable-extensions", f"--user-data-dir={folder / 'profile'}"]
    command += ["--enable-logging=stderr", "--v=0", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--virtual-time-budget=5000", *options, "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


def ask(text: str, script: str, folder: Path, width: int, *options: str, address: str = "") -> Any:
    """What a script on a page posts to its parent, in a window of that width.

    The window is a frame: the browser's own is never narrower than 500 pixels.
    """
    (folder / "page.html").write_text(
        text.replace("</body>", f"<script>{{{script}}}</script></body>"), encoding="utf-8"
    )
    frame = FRAME.replace("WIDTH", str(width)).replace("SOURCE", f"page.html{address}")
    (folder / "frame.html").write_text(frame, encoding="utf-8")
    shown, said = browse((folder / "frame.html").as_uri(), folder, *options)
    posted = re.search(r'<pre id="found">(.+?)</pre>', shown, re.S)
    assert posted is not None, said[-2000:] + shown[:2000]
    return json.loads(unescape(posted[1]))
