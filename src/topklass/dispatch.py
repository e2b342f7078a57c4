"""The one place that decides between the kernels and the reference.

Kernels serve tensors on a CUDA device. Everything else, and every call that a kernel cannot serve,
goes through the reference, with the same results.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from topklass._checks import Options, every_class_counts
from topklass._targets import SparseTarget, Target
from topklass._transforms import is_differentiated, is_eager


class Kernel(NamedTuple):
    """A kernel family and the calls that it serves."""

    module: str
    """In ``topklass.kernels``."""
    smallest_k: int
    largest_k: int
    largest_samples: int = 0
    """Noise vectors, for families that draw them."""
    largest_labels: int = 0
    """Labels of a row, for families that take several."""
    compiles: bool = True
    """Whether it serves under ``torch.compile`` and ``torch.export``."""
    every_label: bool = False
    """Whether it serves class probabilities and label smoothing, besides class indices."""
    margins: bool = True
    """Whether it serves margins."""


KERNELS = {
    "smooth_topk_loss": (
        Kernel("smooth", 1, 10),
        Kernel("wide", 11, 32),
        Kernel("long_lists", 33, 1024),
    ),
    "smooth_topk_loss_of_few_classes": (Kernel("wide", 1, 32, largest_labels=16, compiles=False),),
    "smooth_topk_loss_of_every_label": (Kernel("every_label", 1, 10, every_label=True),),
    "list_mixture_of_every_label": (Kernel("every_label", 1, 10, every_label=True, margins=False),),
    "noised_topk_loss": (Kernel("noised", 1, 63, largest_samples=32),),
    "expected_topk_loss": (Kernel("expected", 1, 63),),
    "noised_topk": (Kernel("noised", 1, 64, largest_samples=32, compiles=False),),
    "expected_topk": (Kernel("expected", 1, 64, compiles=False),),
    "log_esp": (Kernel("esp", 1, 16, compiles=False),),
    "topk_marginals": (Kernel("esp", 1, 32, compiles=False),),
    "row_states": (Kernel("smooth", 1, 32, compiles=False),),
    "multiply": (Kernel("scaling", 1, 1, compiles=False),),
}
"""Which kernels there are. Beyond these limits they would lose digits or compile for minutes."""

BACKENDS = ("auto", "kernel", "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_COLUMNS = 65_535 * 512
"""The second dimension of a grid, times the columns of the narrowest tile."""
MOST_ROWS = 2**31 - 2**16
OLDEST_TRITON = (3, 4)
OLDEST_CAPABILITY = (8, 0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run step by step on the CPU, for tests."""


def _missing_triton() -> str | None:
    """Why the installed Triton, if any, does not serve."""
    if find_spec("triton") is None:
        return "an installation without triton"
    try:
        installed = version("triton")
    except PackageNotFoundError:  # under another name: nightly builds, other platforms
        import triton

        installed = triton.__version__
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST_TRITON:
        return f"triton {installed}, older than {'.'.join(map(str, OLDEST_TRITON))}"
    return None


NO_TRITON = _missing_triton()
_backend: ContextVar[str] = ContextVar("topklass_backend", default="auto")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose the implementation in this thread or task until the block ends.

    Applies to the smooth loss, top-k cross-entropy and LDAM, to the noised loss with class indices,
    and to the operators ``log_esp``, ``topk_marginals``, ``noised_topk`` and ``expected_topk``. The
    other losses have one implementation. Functions compiled by ``torch.compile`` do not see it, nor
    does what a backward pass on CUDA computes again in autograd's own threads: they always choose
    automatically.

    Args:
        name: ``"auto"``: kernels where they serve (the default); ``"reference"``: plain PyTorch;
            ``"kernel"``: kernels, and an error where there is none.

    Example:
        >>> import torch, topklass
        >>> with topklass.use_backend("reference"):
        ...     loss = topklass.SmoothTopKLoss()(torch.zeros(1, 10), torch.tensor([3]))
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)


def find_kernel(
    name: str,
    scores: Tensor,
    k: int,
    target: Target | None = None,
    options: Options | None = None,
    *,
    margin: float | Tensor = 0.0,
    samples: int = 0,
    noise: Tensor | None = None,
    optional: bool = False,
) -> Any:
    """The module of the kernels that serve a call, or None for the reference.

    Raises an error where a kernel is demanded and there is none, unless it is optional.

    Args:
        name: a key of :data:`KERNELS`.
        scores: (R, n).
        k: length of the list, or rank.
        target: of a loss.
        options: of a loss.
        margin: of a loss.
        samples: number of noise vectors.
        noise: noise vectors that are given instead of drawn.
        optional: whether the caller may have other kernels.
    """
    backend = "auto" if torch.compiler.is_compiling() else _backend.get()
    if backend == "reference" or (backend == "auto" and scores.device.type != "cuda"):
        return None
    kernels = KERNELS[name]
    obstacle = (
        _obstacle_of_device(scores.device)
        or _obstacle_of_parameters(kernels[-1], k, margin, samples, noise)
        or _obstacle_of_scores(scores, kernels[0].compiles)
        or _obstacle_of_target(kernels[0], target, options)
    )
    if obstacle is None:
        module = next(each.module for each in kernels if each.smallest_k <= k <= each.largest_k)
        return _family(module)
    if backend == "kernel" and not optional:
        raise RuntimeError(f'use_backend("kernel"): there is no kernel for {obstacle}')
    return None


def _family(module: str) -> Any:
    """A kernel family, imported where it serves; compilers trace import statements only."""
    if module == "smooth":
        from topklass.kernels import smooth

        return smooth
    if module == "wide":
        from topklass.kernels import wide

        return wide
    if module == "long_lists":
        from topklass.kernels import long_lists

        return long_lists
    if module == "every_label":
        from topklass.kernels import every_label

        return every_label
    if module == "noised":
        from topklass.kernels import noised

        return noised
    if module == "expected":
        from topklass.kernels import expected

        return expected
    if module == "scaling":
        from topklass.kernels import scaling

        return scaling
    from topklass.kernels import esp

    return esp


def _obstacle_of_parameters(
    last: Kernel, k: int, margin: float | Tensor, samples: int, noise: Tensor | None
) -> str | None:
    if k > last.largest_k:
        return f"k = {k}, only up to {last.largest_k}"
    if noise is not None:
        return "given noise"
    if samples > last.largest_samples:
        return f"samples = {samples}, only up to {last.largest_samples}"
    if is_differentiated(margin):
        return "derivatives by the margin"
    if not last.margins and (isinstance(margin, Tensor) or margin):
        return "margins in lists of several lengths with class probabilities or label smoothing"
    return None


def _obstacle_of_target(
    kernel: Kernel, target: Target | None, options: Options | None
) -> str | None:
    if target is None or options is None:
        return None
    if every_class_counts(target, options) and not kernel.every_label:
        return "class probabilities and label smoothing"
    tensors = target if isinstance(target, SparseTarget) else (target,)
    if isinstance(target, SparseTarget) and kernel.every_label:
        return "a SparseTarget with label smoothing"
    if isinstance(target, SparseTarget) or kernel.largest_labels:
        count = tensors[0].shape[1]
        if not 1 <= count <= kernel.largest_labels:
            return f"{count} labels of a row in one pass"
    for tensor in tensors:
        if is_differentiated(tensor):
            return "derivatives by the class probabilities"
        if not (torch.compiler.is_compiling() or is_eager(tensor)):
            return f"a target that is a {type(tensor).__name__}, or is transformed"
    if is_differentiated(options.weight):
        return "derivatives by the class weights"
    if abs(options.ignore_index) >= 2**31:
        return f"ignore_index={options.ignore_index}, beyond 32 bits"
    return None


def _obstacle_of_scores(scores: Tensor, compiles: bool) -> str | None:
    if torch.compiler.is_compiling():
        if not compiles:
            return "this operator under torch.compile"
    elif not is_eager(scores):
        return f"a transformed or traced {type(scores).__name__}"
    elif scores.numel() == 0:
        return "logits without rows or classes"
    if scores.dtype not in DTYPES:
        return f"{scores.dtype}"
    columns = scores.shape[-1]
    rows = 1 if torch.compiler.is_compiling() else scores.numel() // columns
    if columns > MOST_COLUMNS or max((rows, *scores.stride())) > MOST_ROWS:
        return f"shape {tuple(scores.shape)}, up to {MOST_ROWS} rows of {MOST_COLUMNS} classes"
    return None


def _obstacle_of_device(device: torch.device) -> str | None:
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        return f"device {device.type}"
    if NO_TRITON:
        return NO_TRITON
    if torch.version.hip is not None:
        return "ROCm"
    if device.type == "cuda" and not torch.compiler.is_compiling():
        return _old_capability(device)
    return None


@cache
def _old_capability(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        needed = ".".join(map(str, OLDEST_CAPABILITY))
        return f"compute capability {capability[0]}.{capability[1]}, below {needed}"
    return None
