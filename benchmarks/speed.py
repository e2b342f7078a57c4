"""Time, memory and verified error of the losses beside cross-entropy and the published code."""

import torch

from benchmarks import speed_cpu, speed_gpu


def main(device: str, quick: bool) -> None:
    if device == "cuda":
        speed_gpu.main(torch.device(device), quick)
    else:
        speed_cpu.main(quick)
