"""What produced a number: processor, versions and commit."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
"""Of the checkout, if topklass is used from one."""


def processor() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of Python and of the packages that make the numbers."""
    import topklass

    found = {
        "python": platform.python_version(),
        "topklass": topklass.__version__,
        "torch": torch.__version__,
    }
    for package in ("lightning", "torchvision", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """TOPKLASS_COMMIT if it is set; else that of the checkout, marked if its code was changed."""
    if given := os.environ.get("TOPKLASS_COMMIT"):
        return given
    head = _git("rev-parse", "--short", "HEAD")
    if not head:
        return "unknown"
    return head + ("+changes" if _git("status", "--porcelain", "--", "src", "experiments") else "")


def _git(*arguments: str) -> str:
    """What git prints, or nothing without git or a repository."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return ""
    run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return run.stdout.strip()
