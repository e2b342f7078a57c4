"""The one place that decides between the kernels and the reference.

Kernels serve tensors on a CUDA device; everything else, and whatever a kernel cannot do, goes
through the reference, with the same results.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from topklass._transforms import is_no_subclass, tracing
from topklass.reference.row_blocks import transformed

BACKENDS = ("auto", "kernel", "reference")
OLDEST_TRITON = (3, 4)
OLDEST_CAPABILITY = (8, 0)
LARGEST_K = 32
"""Beyond it power sums, which kernels of polynomials take, lose all their digits."""
LONGEST_LIST = 1024
"""Of the smooth loss: beyond LARGEST_K it has kernels that do without power sums."""
LARGEST_RANK = 64
"""Kernels of order statistics are written out for each rank; beyond it they compile for long."""
MOST_COLUMNS = 65_535 * 1024
"""The second dimension of a grid, times the columns of a tile."""
MOST_ROWS = 2**31 - 2**16
DEVICES = ("cuda",)
"""Where kernels serve without being asked for."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _no_triton() -> str | None:
    """Why the installed Triton, if any, will not do."""
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


NO_TRITON = _no_triton()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run step by step on the CPU, for tests."""

_backend = "auto"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose who computes, in the whole process, until the block ends.

    Concerns the smooth loss, the top-k cross-entropy and the noised loss with class indices, and
    the operators ``log_esp``, ``topk_marginals``, ``noised_topk`` and ``expected_topk``; the other
    losses have one implementation.

    Args:
        name: ``"auto"``: kernels where they can serve (the default); ``"reference"``: plain
            PyTorch; ``"kernel"``: kernels, and an error where they cannot serve.

    Example:
        >>> import torch, topklass
        >>> with topklass.use_backend("reference"):
        ...     loss = topklass.SmoothTopKLoss()(torch.zeros(1, 10), torch.tensor([3]))
    """
    global _backend
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    before, _backend = _backend, name
    try:
        yield
    finally:
        _backend = before


class LossOptions(NamedTuple):
    """What a kernel must know of a loss's options."""

    labels: Tensor
    """(R), int64."""
    weight: Tensor | None
    """One per class, in float32."""
    ignore_index: int
    reduction: str
    plain: Callable[[Tensor], Tensor] | None
    """The same loss of the scores by the reference, for derivatives that no kernel has."""


def kernel_serves(
    scores: Tensor, k: int, obstacle: str | None = None, largest: int = LARGEST_K
) -> bool:
    """Whether a kernel computes; raises if one is demanded and cannot.

    Args:
        scores: what it would compute on.
        k: the number of heads it would keep.
        obstacle: what else the call asks for that no kernel does.
        largest: the largest k of that kernel.
    """
    if _backend == "reference" or (_backend == "auto" and scores.device.type not in DEVICES):
        return False
    obstacle = obstacle or _obstacle(scores, k, largest)
    if obstacle and _backend == "kernel":
        raise RuntimeError(f'use_backend("kernel"): there is no kernel for {obstacle}')
    return obstacle is None


Call = tuple[object, ...]
_served: set[Call] = set()
"""Calls that passed all checks and went to a kernel, by everything about them but values."""
MOST_SERVED = 4096
PLAIN = {int, float, str, type(None)}


def known_call(
    input: object, target: object, parameters: tuple[object, ...], options: Mapping[str, object]
) -> Call | None:
    """What identifies a call whose checks need not be made twice; None if that is too much to say.

    On a GPU a loss of a small batch costs what Python does around it: checks that depend on shapes
    and numbers only are remembered.
    """
    if _backend != "auto" or torch.compiler.is_compiling():
        return None
    if not (isinstance(input, Tensor) and isinstance(target, Tensor)):
        return None
    if input.device.type not in DEVICES or input.dtype not in DTYPES or input.dim() != 2:
        return None
    if target.dtype != torch.int64 or not target.is_contiguous():
        return None
    kinds = tuple(map(type, (*parameters, *options.values())))
    if not (PLAIN.issuperset(kinds) and plain_tensor(input) and plain_tensor(target)):
        return None
    places = (input.device, target.device)
    described = (input.dtype, input.shape, input.stride(), target.shape)
    return *places, *described, kinds, parameters, *options.items()


def was_served(call: Call | None, input: Tensor) -> bool:
    """Whether the same call has passed all checks and a kernel served it."""
    return call is not None and call in _served and not transformed(input)


def loss_options(
    target: Tensor,
    options: Mapping[str, Any],
    plain: Callable[[Tensor], Tensor] | None = None,
) -> LossOptions:
    """The options of a call that is known, with cross-entropy's defaults."""
    ignore_index = options.get("ignore_index", -100)
    return LossOptions(target, None, ignore_index, options.get("reduction", "mean"), plain)


def remember(call: Call | None) -> None:
    """Note that a call has passed all checks and that a kernel serves it."""
    if call is not None:
        if len(_served) >= MOST_SERVED:
            _served.clear()
        _served.add(call)


def _obstacle(scores: Tensor, k: int, largest: int) -> str | None:
    if scores.numel() == 0:
        return "an input without rows or classes"
    if scores.dtype not in DTYPES:
        return f"{scores.dtype}"
    if k > largest:
        return f"k = {k}, only up to {largest}"
    columns = scores.shape[-1]
    longest = max(scores.numel() // columns, *scores.stride())
    if columns > MOST_COLUMNS or longest > MOST_ROWS:
        return f"shape {tuple(scores.shape)}, up to {MOST_ROWS} rows of {MOST_COLUMNS} classes"
    if not plain_tensor(scores):
        return f"a {type(scores).__name__}"
    if transformed(scores):
        return "torch.func, vmap and forward mode"
    if not torch.compiler.is_compiling() and tracing():
        return "torch.jit.trace"
    return _missing(scores.device)


def plain_tensor(tensor: object) -> bool:
    """Whether it is a tensor whose memory a kernel may read: none of the many subclasses."""
    return torch.compiler.is_compiling() or is_no_subclass(tensor)


def _missing(device: torch.device) -> str | None:
    """Why kernels cannot run on a device at all."""
    if NO_TRITON:
        return NO_TRITON
    if torch.version.hip is not None:
        return "ROCm"
    if device.type == "cuda":
        return None if torch.compiler.is_compiling() else _too_old(device)
    if device.type == "cpu" and INTERPRETED:
        return None
    return f"device {device.type}"


@cache
def _too_old(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        needed = ".".join(map(str, OLDEST_CAPABILITY))
        return f"compute capability {capability[0]}.{capability[1]}, below {needed}"
    return None


def check_devices(scores: Tensor, **others: object) -> None:
    """Require that all tensors are where the scores are: a kernel would read foreign memory."""
    for name, other in others.items():
        if isinstance(other, Tensor) and other.device != scores.device:
            raise RuntimeError(
                f"{name} is on {other.device} and the input on {scores.device}: "
                f"move one to the other's device"
            )
