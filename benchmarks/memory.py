"""Peak memory of a step."""

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import Step


def peak(step: Step, logits: Tensor) -> float:
    """Largest memory held at once during the step beyond what was held before, in logits' sizes."""
    logits.grad = None
    measure = peak_on_gpu if logits.is_cuda else peak_on_cpu
    return round(measure(step) / (logits.numel() * logits.element_size()), 3)


def peak_on_gpu(step: Step) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_on_cpu(step: Step) -> int:
    """The largest sum of allocations and releases so far, in the profiler's record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    recorded = profiler.profiler
    assert recorded is not None
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    held = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        largest = max(largest, held)
    return largest
