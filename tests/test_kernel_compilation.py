"""Every kernel compiles for current GPUs, on a machine that has none.

The families run on tensors without memory, and what they would launch is compiled.
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from topklass import SparseTarget, dispatch

pytestmark = [
    pytest.mark.skipif(
        bool(dispatch.NO_TRITON) or dispatch.INTERPRETED, reason="needs Triton's compiler"
    ),
    pytest.mark.filterwarnings("ignore:.*FP_FUSION:UserWarning"),
]
STACK = 2048
"""Bytes of a thread that may lie outside registers."""
SHARED = {80: 163 * 2**10, 90: 227 * 2**10}
"""Bytes of shared memory that a program may have, by compute capability."""
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
slow = pytest.mark.slow


class Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]
    warps: int


class Loss(NamedTuple):
    """The parameters of all losses."""

    k: int
    margin: float | Tensor = 1.0
    tau: float = 1.0
    epsilon: float = 0.2
    samples: int | None = 10
    scale: float = 1.0
    generator: None = None


class Options(NamedTuple):
    reduction: str
    weight: Tensor | None = None
    ignore_index: int = -100


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Launch]:
    """What is launched; none of it runs, and nothing compiled is left behind."""
    from triton.runtime.jit import JITFunction

    result: list[Launch] = []

    def record(kernel: Any, *values: Any, num_warps: int, **_: Any) -> None:
        arguments = dict(zip(kernel.arg_names, values, strict=True))
        result.append(Launch(kernel, arguments, num_warps))

    monkeypatch.setattr(JITFunction, "run", record)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return result


def compiled(launch: Launch, capability: int, aligned: bool = True) -> Any:
    """The binary for a compute capability; ``aligned``: for pointers to multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants, attributes = {}, {}

    def kind(value: Any, path: tuple[int, ...], parameter: Any) -> Any:
        """The type of an argument as Triton writes it; notes constants and alignment."""
        if value is None or parameter.is_constexpr:
            constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            kinds = [kind(v, (*path, i), parameter) for i, v in enumerate(value)]
            return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
        if isinstance(value, Tensor):
            if aligned and not parameter.do_not_specialize_on_alignment:
                attributes[path] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype]
        if isinstance(value, float):
            return "fp32"
        assert len(path) == 1, f"{parameter.name}: Triton specialises integers in tuples"
        assert parameter.do_not_specialize, f"{parameter.name} recompiles for every value"
        return "i32"

    signature = {
        p.name: kind(launch.arguments[p.name], (i,), p) for i, p in enumerate(launch.kernel.params)
    }
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return compile(source, target=target, options={"num_warps": launch.warps})


def stack(binary: bytes, folder: Path) -> int:
    """Bytes of local memory that each thread takes, for lack of registers."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return 0
    (folder / "cubin").write_bytes(binary)
    command = [tool, "--dump-resource-usage", folder / "cubin"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.search(r"STACK:(\d+)", report)[1])


def scores(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    """Logits that have a shape, and no memory."""
    return torch.empty(rows, n, dtype=dtype, device="meta")


def loss(
    family: Any,
    k: int,
    rows: int,
    n: int,
    dtype: torch.dtype,
    reduction: str = "mean",
    per_class: str = "",
    **parameters: Any,
) -> None:
    """A loss and its gradient, with "margin", "weight" or both for each class."""
    logits, labels = scores(rows, n, dtype), torch.empty(rows, dtype=torch.int64, device="meta")
    given = {name: torch.empty(n, device="meta") for name in per_class.split()}
    parameters = Loss(k, given.get("margin", 1.0), **parameters)
    options = Options(reduction, given.get("weight"))
    value, saved = family.forward(logits, labels, parameters, options, True)
    family.backward(torch.empty_like(value), logits, labels, saved, parameters, options)


def check(launches: list[Launch], capability: int, folder: Path) -> None:
    assert len(launches) > 1
    for launch in launches:
        kernel = compiled(launch, capability)
        binary = kernel.asm["cubin"]
        assert binary.startswith(b"\x7fELF")
        assert stack(binary, folder) <= STACK, launch
        assert kernel.metadata.shared <= SHARED[capability], launch


def cases(quick: list[tuple[Any, ...]], thorough: list[tuple[Any, ...]]) -> Callable[..., Any]:
    """One test for each capability and case; a name of capabilities comes first."""
    capabilities = {"both": (80, 90), "old": (80,), "new": (90,)}
    marked = [
        pytest.param(c, case, marks=marks, id="-".join(map(str, (c, *case))).replace("torch.", ""))
        for group, marks in ((quick, ()), (thorough, slow))
        for name, *case in group
        for c in capabilities[name]
    ]
    return pytest.mark.parametrize(("capability", "case"), marked)


@cases(
    quick=[
        ("new", 5, 64, 1000, fp32, "mean", "margin"),
        ("old", 5, 8, 33_000, fp16, "none", "weight"),
    ],
    thorough=[
        ("both", 1, 2, 33_000, bf16, "sum", "margin weight"),
        ("both", 5, 256, 100, bf16, "none", "weight"),
        ("both", 10, 64, 1001, fp16, "sum"),
        ("new", 10, 2, 1_000_000, fp32, "none", "margin"),
    ],
)
def test_smooth_loss(capability, case, launches, tmp_path):
    from topklass.kernels.smooth import launch as family

    loss(family, *case)
    check(launches, capability, tmp_path)


@cases(
    quick=[],
    thorough=[
        ("old", 11, 256, 33, fp32, "mean", "weight"),
        ("new", 20, 64, 1000, fp32, "none", "margin weight"),
        ("old", 20, 8, 4100, bf16, "sum"),
        ("old", 32, 64, 1000, bf16),
        ("new", 32, 2, 33_000, fp32),
    ],
)
def test_longer_lists(capability, case, launches, tmp_path):
    from topklass.kernels.wide import launch as family

    loss(family, *case)
    check(launches, capability, tmp_path)


@slow
@pytest.mark.parametrize(
    ("capability", "k", "m", "n"),
    [(90, 1, 2, 33), (80, 5, 3, 1000), (90, 5, 2, 33_000), (90, 20, 16, 1000)],
)
def test_targets_of_a_few_classes(capability, k, m, n, launches, tmp_path):
    from topklass.kernels.wide import launch as family

    logits, parameters = scores(64, n, fp32), Loss(k)
    labels = torch.empty(64, m, dtype=torch.int64, device="meta")
    target = SparseTarget(labels, torch.empty(64, m, device="meta"))
    value, saved = family.forward(logits, target, parameters, Options("mean"), True)
    family.backward(value, logits, target, saved, parameters, Options("mean"))
    value, states = family.losses_of_labels(logits, labels, parameters)
    family.gradient_of_labels(value, logits, labels, states, parameters)
    check(launches, capability, tmp_path)


@cases(
    quick=[("new", 33, 8, 33_000, fp32, "none", "margin")],
    thorough=[
        ("both", 50, 256, 100, bf16, "mean", "weight"),
        ("old", 1000, 64, 1001, fp16, "sum"),
    ],
)
def test_long_lists(capability, case, launches, tmp_path):
    from topklass.kernels.long_lists import launch as family

    loss(family, *case)
    check(launches, capability, tmp_path)


@cases(
    quick=[],
    thorough=[
        ("new", {1: 0.2, 5: 0.8}, 64, 1000, fp32, "labels"),
        ("old", {1: 0.2, 5: 0.8}, 8, 33_000, bf16, "labels weight"),
        ("both", {1: 1.0}, 256, 100, fp16, "labels"),
        ("both", {5: 1.0}, 8192, 32_000, fp32, "labels margin"),
        ("both", {10: 1.0}, 8, 33_000, fp32, "chances margin weight"),
        ("new", {3: 0.5, 10: 0.5}, 65_536, 1000, fp32, "chances"),
    ],
)
def test_every_label(capability, case, launches, tmp_path):
    every_label(*case)
    assert len(launches) == 5
    check(launches, capability, tmp_path)


def every_label(k: dict[int, float], rows: int, n: int, dtype: torch.dtype, given: str) -> None:
    """Label smoothing, or class probabilities, and the gradient."""
    from topklass._checks import Options as AllOptions
    from topklass.functional.topk_cross_entropy import ListMixture
    from topklass.kernels.every_label import launch as family

    each = {name: torch.empty(n, device="meta") for name in ("margin", "weight") if name in given}
    lists = ListMixture(tuple(k), tuple(k.values()), 1.0, each.get("margin", 0.0))
    labels = torch.empty(rows, dtype=torch.int64, device="meta")
    target = labels if "labels" in given else scores(rows, n, torch.float32)
    options = AllOptions(each.get("weight"), -100, "mean", 0.1)
    value, saved = family.forward(scores(rows, n, dtype), target, lists, options, True)
    logits = scores(rows, n, dtype)
    family.backward(torch.empty_like(value), logits, target, saved, lists, options)


@slow
def test_scores_that_are_not_aligned(launches):
    from topklass.kernels.smooth import launch as family

    loss(family, 5, 8, 33_000, fp32)
    for launch in launches:
        assert compiled(launch, 90, aligned=False).asm["cubin"]


@cases(
    quick=[("new", 5, 8, 33_000, fp16)],
    thorough=[
        ("old", 5, 8, 33_000, fp16),
        ("old", 1, 256, 100, fp32, "none", "margin weight"),
        ("new", 10, 64, 1001, bf16, "sum", "margin"),
        ("new", 63, 256, 100, bf16),
    ],
)
def test_noised_loss(capability, case, launches, tmp_path):
    from topklass.kernels.noised import launch as family

    loss(family, *case)
    check(launches, capability, tmp_path)


@cases(
    quick=[("new", 5, 256, 100, bf16)],
    thorough=[
        ("old", 5, 256, 100, bf16),
        ("old", 1, 8, 33_000, fp16, "none", "margin weight"),
        ("old", 33, 64, 1000, fp32),
        ("new", 63, 64, 1000, fp32, "sum", "margin"),
    ],
)
def test_exact_noised_loss(capability, case, launches, tmp_path):
    from topklass.kernels.expected import launch as family

    loss(family, *case, samples=None)
    check(launches, capability, tmp_path)


@cases(
    quick=[("new", 5, 8, 33_000, bf16)],
    thorough=[
        ("old", 5, 8, 33_000, bf16),
        ("old", 1, 256, 100, fp32),
        ("new", 11, 64, 1000, fp16),
        ("old", 16, 64, 1000, fp32),
    ],
)
def test_polynomials(capability, case, launches, tmp_path):
    from topklass.kernels.esp.launch import log_esp, topk_marginals

    k, *shape = case
    log_esp(scores(*shape), k)
    topk_marginals(scores(*shape), k)
    check(launches, capability, tmp_path)


@slow
@pytest.mark.parametrize(("capability", "samples"), [(80, 1), (90, 32)])
def test_noised_operator(capability, samples, launches, tmp_path):
    from topklass.kernels.noised.launch import noised_topk, noised_topk_gradient

    logits = scores(8, 1000, fp32)
    value, saved = noised_topk(logits, 5, 1.0, samples, None)
    noised_topk_gradient(torch.empty_like(value), logits, saved)
    check(launches, capability, tmp_path)


@cases(
    quick=[],
    thorough=[
        ("both", 6, 256, 100, bf16),
        ("old", 1, 8, 33_000, fp16),
        ("new", 32, 64, 1000, fp32),
    ],
)
def test_expected_operator(capability, case, launches, tmp_path):
    from topklass.kernels.expected.launch import expected_topk

    k, *shape = case
    expected_topk(scores(*shape), k, 1.0, True)
    expected_topk(scores(*shape), k, 1.0, False)
    check(launches, capability, tmp_path)


def test_scaling(launches, tmp_path):
    from topklass.kernels.scaling import multiply

    for dtype in (fp32, bf16):
        multiply(scores(256, 4096, dtype), torch.empty((), device="meta"))
    check(launches, 90, tmp_path)
