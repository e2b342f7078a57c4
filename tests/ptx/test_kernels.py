"""The kernels' PTX against the reference: tests of the interpreter, run by the emulator."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import topklass

from .launch import Settings, emulated

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TESTS = [
    "test_wide_states.py::test_largest_scores_and_sums_of_the_others[40-11]",
    "test_few_classes_kernel.py::test_hard_rows",
    "test_few_classes_kernel.py::test_absent_labels",
    "test_every_label_kernel.py::test_short_lists",
    "test_every_label_kernel.py::test_margins_of_classes_and_reductions[mean-probabilities]",
    "test_expected_kernel.py::test_random_scores[2-7-1-0.5]",
    "test_expected_kernel.py::test_ties[1]",
    "test_exact_loss_kernel.py::test_absent_classes_and_labels",
    "test_exact_loss_kernel.py::test_chunks_of_rows[mean]",
    "test_noised_kernel.py::test_fewer_than_k_present",
    "test_noised_kernel.py::test_nan_of_one_row[mean]",
    "test_smooth_kernel_absence.py::test_fewer_than_k_rivals_present[8-3]",
    "test_class_chunks.py::test_a_target_that_is_no_class",
    "test_long_list_kernel.py::test_absent_classes_and_labels",
    "test_operator_kernels.py::test_nan_stays_in_its_row[9-log_esp]",
    "test_operator_kernels.py::test_nan_stays_in_its_row[9-topk_marginals]",
]


def test_every_family():
    """In a process of its own: what the interpreter runs is collected in no other."""
    tests = [f"tests/interpreted/{test}" for test in TESTS]
    plugins = ["-p", "tests.ptx.plugin", "-p", "no:cacheprovider"]
    options = ["-q", "--ptx-capability=90", "--ptx-perturb=2"]
    command = [sys.executable, "-m", "pytest", *plugins, *options, *tests]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr[-5000:]


def test_many_classes_near_the_kth():
    """Noise for those above a threshold: mean and shares are the expectation and its gradient."""
    rows, n, k, samples = 8, 400, 3, 8
    scores = torch.linspace(0, 1, n).expand(rows, n).clone().requires_grad_()
    with emulated(Settings(seed=1)) as emulator, topklass.use_backend("kernel"):
        generator = torch.Generator().manual_seed(2)
        values = topklass.noised_topk(scores, k, 0.5, samples, generator=generator)
        values.sum().backward()
    assert [launch.kernel for launch in emulator.launches] == [
        "noised_kernel",
        "noised_gradient_kernel",
    ]
    leaf = torch.linspace(0, 1, n).double().requires_grad_()
    mean = topklass.expected_topk(leaf, k, 0.5)
    mean.backward()
    assert abs(values.mean() - mean) < 4 * values.std() / math.sqrt(rows)
    assert 0.3 < values.std() * math.sqrt(samples) / one_sample_deviation(n, k) < 3
    torch.testing.assert_close(scores.grad.sum(1), torch.ones(rows))
    found, expected = (g.unflatten(-1, (4, -1)).sum(-1) for g in (scores.grad.mean(0), leaf.grad))
    errors = (expected * (1 - expected) / (rows * samples)).sqrt()
    assert ((found - expected).abs() < 4 * errors + 1e-3).all()


def one_sample_deviation(n: int, k: int) -> float:
    noised = torch.linspace(0, 1, n) + 0.5 * torch.randn(1000, n)
    return noised.topk(k).values[:, -1].std().item()
