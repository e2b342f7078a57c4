"""Where and with what a measurement was made."""

import platform
import subprocess
from pathlib import Path

import torch

import topkit

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, str]:
    """Hardware, versions and commit, for the record."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "../src"], capture_output=True, text=True
    )
    return {
        "processor": processor(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "topkit": topkit.__version__,
        "commit": commit.stdout.strip() + ("+changes" if changed.stdout.strip() else ""),
    }


def processor() -> str:
    """Name of the CPU and its vector instructions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
