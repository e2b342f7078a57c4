"""Where and with what a measurement was made."""

import json
from pathlib import Path
from typing import Any

import torch

from topklass._provenance import commit, processor, versions

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def place(device: torch.device) -> str:
    """How results of this device are named: ``cpu`` or ``gpu``."""
    return "gpu" if device.type == "cuda" else device.type


def write(name: str, record: dict[str, Any], quick: bool = False) -> None:
    """Keep a record under ``results/``, unless it was only a trial."""
    if quick:
        print(f"{name}: a trial, nothing written", flush=True)
        return
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    new = path.with_suffix(".new")  # whoever is cut off here leaves the old record
    new.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    new.replace(path)
    print(f"wrote {path.name}", flush=True)


def read(name: str) -> dict[str, Any] | None:
    """The record of that name, or None if it was never measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def describe(device: torch.device) -> dict[str, str]:
    """Hardware, versions and commit, for the record."""
    found = versions()
    record = {
        "processor": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        **{name: found[name] for name in ("python", "torch", "topklass")},
        "commit": commit(),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        record |= {
            "gpu": gpu,
            "cuda": str(torch.version.cuda),
            "triton": found.get("triton", "none"),
        }
    return record
