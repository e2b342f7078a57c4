"""Table 5 of Berrada et al. (2018): what stays finite, and how exact, at which temperature.

1,000 classes and k = 5, as there, but 384 rows in place of 128, because the worst row varies, and
3·randn in place of a network's scores; the gradient beside the loss, against extended precision.
"""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import exact
from benchmarks.methods import Rows, methods
from benchmarks.rows import digits

K, SAMPLES, CLASSES = 5, 384, 1_000
TEMPERATURES = (1e2, 1e1, 1e0, 1e-1, 1e-2, 1e-3, 1e-4)
DTYPES = (torch.float32, torch.float64)


def measure(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """One row a method, precision and temperature."""
    torch.manual_seed(0)
    wide = 3 * torch.randn(SAMPLES, 100 if quick else CLASSES).float().to(device)
    labels = torch.randint(wide.shape[1], (SAMPLES,), device=device)
    rows = []
    for tau in TEMPERATURES:
        expected = exact.smooth_loss(wide, labels, K, tau)  # float32 numbers are float64 numbers
        for method in methods(device):
            for dtype in DTYPES:
                loss = method.loss(K, tau)
                if loss is not None:
                    found = compare(loss, wide.to(dtype).requires_grad_(), labels, expected)
                    precision = {torch.float32: "single", torch.float64: "double"}[dtype]
                    where = {"method": method.name, "precision": precision, "tau": tau}
                    rows.append(where | found)
        print(f"τ = {tau:g}", flush=True)
    return rows


def compare(
    loss: Rows, scores: Tensor, labels: Tensor, expected: tuple[exact.Array, exact.Array]
) -> dict[str, float | None]:
    """Shares of rows with a finite loss and gradient, and the largest errors of these rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the published code
        value = loss(scores, labels)
        (gradient,) = torch.autograd.grad(value.sum(), scores)
    ours, slopes = value.detach().cpu().numpy(), gradient.cpu().numpy()
    exact_loss, exact_gradient = expected
    finite_loss, finite_gradient = np.isfinite(ours), np.isfinite(slopes).all(1)
    with np.errstate(all="ignore"):
        loss_error = np.abs(ours / exact_loss - 1)
        off = np.linalg.norm(slopes - exact_gradient, axis=1)
        gradient_error = off / np.linalg.norm(exact_gradient, axis=1)
    return {
        "finite_losses": finite_loss.mean().item(),
        "finite_gradients": finite_gradient.mean().item(),
        "loss_error": largest(loss_error[finite_loss]),
        "gradient_error": largest(gradient_error[finite_gradient]),
        "median_gradient_error": median(gradient_error[finite_gradient]),
    }


def median(errors: exact.Array) -> float | None:
    return digits(float(np.median(errors)), 2) if errors.size else None


def largest(errors: exact.Array) -> float | None:
    return digits(float(errors.max()), 2) if errors.size else None
