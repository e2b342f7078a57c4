"""Every kernel compiles for the GPUs of today, on a machine that has none.

Public functions run on tensors without memory, and what they would launch is compiled.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import topklass
import topklass.functional as TF
from topklass import dispatch

pytestmark = [
    pytest.mark.skipif(
        bool(dispatch.NO_TRITON) or dispatch.INTERPRETED, reason="needs Triton's compiler"
    ),
    pytest.mark.filterwarnings("ignore:.*FP_FUSION:UserWarning"),
]
STACK = 2048
"""Bytes of a thread that may lie outside registers."""
LONG_STACK = 4096
"""The same beyond k = 32: the exact loss takes 2,312 at k = 49 with Triton 3.6."""
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
Launch = tuple[Any, dict[str, Any], dict[str, Any], int]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """What is launched: kernels, their arguments, constants and warps. None of it runs."""
    from triton.runtime.jit import JITFunction

    result: list[Launch] = []

    def record(kernel: Any, *values: Any, num_warps: int, **_: Any) -> None:
        given = list(zip(kernel.params, values, strict=True))
        arguments = {p.name: value for p, value in given if not p.is_constexpr}
        constants = {p.name: value for p, value in given if p.is_constexpr}
        result.append((kernel, arguments, constants, num_warps))

    monkeypatch.setattr(JITFunction, "run", record)
    monkeypatch.setattr(dispatch, "_missing", lambda device: None)
    with topklass.use_backend("kernel"):
        yield result


def compiled(launch: Launch, capability: int, aligned: bool = True) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel, arguments, constants, warps = launch
    signature, attributes = dict.fromkeys(kernel.arg_names, "constexpr"), {}
    for place, parameter in enumerate(kernel.params):
        value = arguments.get(parameter.name)
        if isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if aligned and not parameter.do_not_specialize_on_alignment:
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif value is not None:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            assert isinstance(value, float) or parameter.do_not_specialize, parameter.name
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return compile(source, target=target, options={"num_warps": warps})


def stack(binary: bytes, folder: Path) -> int:
    """Bytes of local memory that each thread takes, for registers that it has not."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return 0
    (folder / "cubin").write_bytes(binary)
    command = [tool, "--dump-resource-usage", folder / "cubin"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.search(r"STACK:(\d+)", report)[1])


def scores(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and labels that have a shape, and no memory."""
    leaf = torch.empty(rows, n, dtype=dtype, device="meta", requires_grad=True)
    return leaf, torch.empty(rows, dtype=torch.int64, device="meta")


def loss(
    function: Callable[..., Tensor],
    k: int,
    rows: int,
    n: int,
    dtype: torch.dtype,
    reduction: str = "mean",
    per_class: str = "",
) -> None:
    """A loss and its gradient, with "margin", "weight" or both for each class."""
    options = {name: torch.empty(n, device="meta") for name in per_class.split()}
    value = function(*scores(rows, n, dtype), k, reduction=reduction, **options)
    value.backward(torch.empty_like(value))


def check(launches: list[Launch], capability: int, folder: Path, most: int = STACK) -> None:
    assert len(launches) > 1
    for launch in launches:
        binary = compiled(launch, capability).asm["cubin"]
        assert binary.startswith(b"\x7fELF")
        assert stack(binary, folder) <= most, launch


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compile in truth, and leave nothing behind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


# Every kernel for both capabilities; large k, which take long, for one of them.

fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
BOTH, OLD, NEW = (80, 90), (80,), (90,)
SMOOTH = [
    (BOTH, 1, 2, 33_000, bf16, "sum", "margin weight"),
    (BOTH, 5, 256, 100, bf16, "none", "weight"),
    (BOTH, 5, 64, 1000, fp32, "mean", "margin"),
    (BOTH, 5, 8, 33_000, fp16),
    (BOTH, 10, 64, 1001, fp16, "sum"),
    (NEW, 10, 2, 1_000_000, fp32, "none", "margin"),
    (OLD, 11, 256, 33, fp32, "mean", "weight"),
    (NEW, 20, 64, 1000, fp32, "none", "margin weight"),
    (OLD, 20, 8, 4100, bf16, "sum"),
    (OLD, 32, 64, 1000, bf16),
    (NEW, 32, 2, 33_000, fp32),
    (BOTH, 50, 256, 100, bf16, "mean", "weight"),
    (NEW, 33, 8, 33_000, fp32, "none", "margin"),
    (OLD, 1000, 64, 1001, fp16, "sum"),
]
NOISED = [
    (BOTH, 5, 8, 33_000, fp16),
    (OLD, 1, 256, 100, fp32, "none", "margin weight"),
    (NEW, 10, 64, 1001, bf16, "sum", "margin"),
    (NEW, 63, 256, 100, bf16),
]
EXACT = [
    (BOTH, 5, 256, 100, bf16),
    (OLD, 1, 8, 33_000, fp16, "none", "margin weight"),
    (NEW, 63, 64, 1000, fp32, "sum", "margin"),
]
OPERATORS = [
    (BOTH, 5, 8, 33_000, bf16),
    (OLD, 1, 256, 100, fp32),
    (NEW, 11, 64, 1000, fp16),
    (OLD, 16, 64, 1000, fp32),
]


def each(cases: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """A test for each case and each of its capabilities."""
    flat = [(capability, case) for capabilities, *case in cases for capability in capabilities]
    names = ["-".join(map(str, ("sm", c, *case))).replace("torch.", "") for c, case in flat]
    return pytest.mark.parametrize(("capability", "case"), flat, ids=names)


@each(SMOOTH)
def test_smooth_loss(capability, case, launches, tmp_path):
    loss(TF.smooth_topk_loss, *case)
    check(launches, capability, tmp_path)


def test_scores_that_are_not_aligned(launches):
    loss(TF.smooth_topk_loss, 5, 8, 33_000, fp32)
    for launch in launches:
        assert compiled(launch, 90, aligned=False).asm["cubin"]


@each(NOISED)
def test_noised_loss(capability, case, launches, tmp_path):
    loss(TF.noised_topk_loss, *case)
    check(launches, capability, tmp_path)


@each(EXACT)
def test_exact_noised_loss(capability, case, launches, tmp_path):
    loss(partial(TF.noised_topk_loss, samples=None), *case)
    check(launches, capability, tmp_path, LONG_STACK if case[0] > 32 else STACK)


@each(OPERATORS)
def test_operators(capability, case, launches, tmp_path):
    k, *shape = case
    with torch.no_grad():
        topklass.log_esp(scores(*shape)[0], k)
        topklass.topk_marginals(scores(*shape)[0], k)
    check(launches, capability, tmp_path)


@pytest.mark.parametrize(("capability", "samples"), [(80, 1), (90, 32)])
def test_noised_operator(capability, samples, launches, tmp_path):
    value = topklass.noised_topk(scores(8, 1000, fp32)[0], 5, samples=samples)
    value.backward(torch.empty_like(value))
    check(launches, capability, tmp_path)


EXPECTED = [(BOTH, 6, 256, 100, bf16), (OLD, 1, 8, 33_000, fp16), (NEW, 32, 64, 1000, fp32)]


@each(EXPECTED)
def test_expected_operator(capability, case, launches, tmp_path):
    k, *shape = case
    topklass.expected_topk(scores(*shape)[0], k).sum().backward()
    with torch.no_grad():
        topklass.expected_topk(scores(*shape)[0], k)
    check(launches, capability, tmp_path)
