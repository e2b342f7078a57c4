"""Kernels as custom operators: torch.compile and torch.export see one call and copy nothing."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from topklass._lists import Lists
from topklass.kernels import every_label, expected, long_lists, noised, smooth

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
N = 7
slow = pytest.mark.slow


class Loss(NamedTuple):
    """The parameters of all losses."""

    k: int = 2
    margin: float | Tensor = 0.5
    tau: float = 0.7
    epsilon: float = 0.0
    samples: int = 3
    scale: float = 2.0
    generator: None = None

    def lists(self) -> Lists:
        return Lists((self.k,), (1.0,), self.k * self.tau, self.tau, self.margin / self.tau)


class Options(NamedTuple):
    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.1


each_family = pytest.mark.parametrize(
    "family",
    [smooth, noised, *(pytest.param(f, marks=slow) for f in (long_lists, expected, every_label))],
    ids=lambda family: family.__name__.rpartition(".")[2],
)


def epsilon(family: Any) -> float:
    """Noise for what integrates over it; none where it would differ from call to call."""
    return 0.5 if family is expected else 0.0


def problem(rows: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(rows, N)
    target = torch.arange(rows) % N
    target[-1] = -100
    return logits, target


def eager(
    family: Any, logits: Tensor, target: Tensor, loss: Loss, options: Options
) -> tuple[Tensor, Tensor]:
    """The loss of ``exp(logits)`` and its gradient by the logits."""
    scores = logits.exp()
    value, saved = family.forward(scores, target, loss, options, True)
    outgoing = torch.ones_like(value)
    gradient = family.backward(outgoing, scores, target, saved, loss, options)
    return value, gradient * scores


def value_and_gradient(function: Any, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = function(leaf, target)
    (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    return value.detach(), gradient


def graphs() -> tuple[Any, list[torch.fx.GraphModule]]:
    """A backend that runs graphs as they are, and the graphs that it is given."""
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    return aot_autograd(fw_compiler=keep, bw_compiler=keep), found


@each_family
@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=slow)])
def test_compile(family, reduction):
    """One graph for all batches, without copies; the gradient goes through what comes before."""
    loss = Loss(margin=torch.rand(N), epsilon=epsilon(family))
    options = Options(torch.rand(N), reduction=reduction)
    torch._dynamo.reset()
    backend, found = graphs()

    def function(logits: Tensor, target: Tensor) -> Tensor:
        return family.traced(logits.exp(), target, loss, options)

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for rows in (3, 5):
        logits, target = problem(rows)
        for ours, plain in zip(
            value_and_gradient(compiled, logits, target),
            eager(family, logits, target, loss, options),
            strict=True,
        ):
            torch.testing.assert_close(ours, plain)
    assert len(found) == 2  # forward and backward pass
    called = [str(node.target) for graph in found for node in graph.graph.nodes]
    assert not any("clone" in name or "copy" in name for name in called)
    assert sum(name.startswith("topklass") for name in called) == 2


@each_family
def test_export(family):
    """Any batch, and gradients."""
    loss, options = Loss(epsilon=epsilon(family)), Options()

    class Module(nn.Module):
        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            return family.traced(logits.exp(), target, loss, options)

    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(
        Module(), problem(3), dynamic_shapes={"logits": {0: batch}, "target": {0: batch}}
    ).module()
    for rows in (2, 5):
        logits, target = problem(rows)
        for ours, plain in zip(
            value_and_gradient(exported, logits, target),
            eager(family, logits, target, loss, options),
            strict=True,
        ):
            torch.testing.assert_close(ours, plain)


@each_family
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty_batch(family, reduction):
    """As cross-entropy of no rows: NaN, 0 or nothing, and an empty gradient."""
    logits, target = torch.empty(0, N), torch.empty(0, dtype=torch.long)
    loss, options = Loss(epsilon=epsilon(family)), Options(reduction=reduction)
    value, gradient = value_and_gradient(
        lambda x, y: family.traced(x, y, loss, options), logits, target
    )
    expected_value = torch.nn.functional.cross_entropy(logits, target, reduction=reduction)
    torch.testing.assert_close(value, expected_value, equal_nan=True)
    assert gradient.shape == (0, N)


@slow
@each_family
@pytest.mark.filterwarnings("ignore")
def test_opcheck(family):
    """PyTorch's own tests of a custom operator: schema, autograd, shapes without data."""
    scores, target = problem(3)
    scores.requires_grad_()
    given = {
        smooth: ("smooth_loss", (scores, target, None, 2, 0.7, 0.5, None, -100, "mean")),
        long_lists: (
            "smooth_loss_of_long_lists",
            (scores, target, None, 2, 0.7, 0.5, None, -100, "mean"),
        ),
        every_label: (
            "every_label_loss",
            (scores, target, None, None, [1, 2], [0.2, 0.8], [0.7, 2.0, 0.0, 0.1], -100, "mean"),
        ),
        noised: (
            "noised",
            (scores, target, None, torch.tensor([1]), 3, 3, 0.0, 0.5, 2.0, None, -100, "none"),
        ),
        expected: (
            "expected",
            (scores, target, None, 3, 0.5, 0.5, 2.0, None, -100, "mean", True),
        ),
    }
    name, arguments = given[family]
    torch.library.opcheck(
        getattr(torch.ops.topklass, name).default,
        arguments,
        # Its tracing test compares all outputs, also parts of buffers that nobody writes.
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
