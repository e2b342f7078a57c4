"""What the review of Berrada et al. (2018) asked: their algorithms, standard ones and ours.

Times by the number of classes (their Tables 3 and 4), stability and error by temperature (their
Table 5), and what the published switch to the hard loss does.
"""

import time
from typing import Any

import torch

from benchmarks import study_stability, study_time
from benchmarks.environment import describe, place, write
from benchmarks.others import Others
from benchmarks.rows import digits
from benchmarks.verify import relative_error
from experiments import peers
from topklass.functional import smooth_topk_loss


def main(device: str, quick: bool) -> None:
    start, others = time.perf_counter(), Others()
    where = torch.device(device)
    record = {
        "what": "k = 5, 3·randn logits; times: batch of 256, float32, τ = 1; errors: largest of a "
        "row; by temperature: 384 × 1,000 against extended precision",
        **describe(where),
        "time": study_time.measure(where, quick),
        "stability": study_stability.measure(where, quick),
        "published": published(),
        "cores_used_by_others": others.cores(),
    }
    write(f"study-{place(where)}", record, quick)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)


def published() -> dict[str, Any]:
    """What the switch of the published code does, and its gradient for k = 1."""
    switching = peers.smooth_with_switch(5)
    if switching is None:
        return {}
    lead = 5 * torch.log(torch.tensor(1e3)).item()  # k τ ln 1000
    tied = torch.zeros(1, 1_000)
    target = torch.tensor([0])
    found: dict[str, Any] = {}
    for where, score in {"below": lead - 0.01, "beyond": lead + 0.01}.items():
        tied[0, :5] = score
        found[f"loss_{where}_switch"] = digits(switching(tied, target).item(), 4)
        found[f"exact_{where}_switch"] = digits(smooth_topk_loss(tied, target).item(), 4)
    torch.manual_seed(0)
    scores = torch.randn(16, 100, dtype=torch.float64).requires_grad_()
    labels = torch.randint(100, (16,))
    one_guess = peers.smooth(1)
    assert one_guess is not None
    (gradient,) = torch.autograd.grad(one_guess(scores, labels), scores)
    (expected,) = torch.autograd.grad(smooth_topk_loss(scores, labels, k=1), scores)
    found["gradient_error_for_one_guess"] = digits(relative_error(gradient, expected), 2)
    return found
