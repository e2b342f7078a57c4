"""On a CUDA device: kernels under torch.compile and torch.export."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode

import topklass
import topklass.functional as TF
from cuda_cases import NEEDS_GPU, each_traced_loss, problem, value_and_gradient, without_noise

pytestmark = NEEDS_GPU


@each_traced_loss
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_compile(criterion, reduction):
    criterion = without_noise(criterion, reduction=reduction)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: criterion(2 * x, y), fullgraph=True)
    for rows in (64, 64, 32):
        logits, target = problem(rows, 1000)
        ours = value_and_gradient(compiled, logits, target)
        eager = value_and_gradient(lambda x, y: criterion(2 * x, y), logits, target)
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@each_traced_loss
@pytest.mark.filterwarnings("ignore")
def test_compiled_graphs(criterion):
    """One for each pass and all batches, in which a kernel is one call that copies nothing."""
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        found.append(graph)
        return graph.forward

    criterion = without_noise(criterion)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(
        lambda x, y: criterion(x.exp(), y), backend=backend, fullgraph=True, dynamic=True
    )
    for shape in ((64, 100), (300, 100), (5000, 100)):
        logits, target = problem(*shape)
        ours = value_and_gradient(compiled, logits, target)
        eager = value_and_gradient(lambda x, y: criterion(x.exp(), y), logits, target)
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert len(found) == 2
    called = [str(node.target) for graph in found for node in graph.graph.nodes]
    assert sum(target.startswith("topklass") for target in called) == 2
    assert not any("clone" in target or "copy" in target for target in called)


@each_traced_loss
@pytest.mark.filterwarnings("ignore")
def test_compiled_losses_leave_their_input_alone(criterion):
    torch._dynamo.reset()
    logits, target = problem(64, 1000)
    scores = logits.exp()  # whose gradient needs it as it is
    torch.compile(criterion, fullgraph=True)(scores, target).backward()
    assert scores._version == target._version == 0


@each_traced_loss
@pytest.mark.filterwarnings("ignore")
def test_compiled_for_cuda_graphs(criterion):
    criterion = without_noise(criterion)
    torch._dynamo.reset()
    compiled = torch.compile(criterion, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        logits, target = problem(64, 1000)
        torch.compiler.cudagraph_mark_step_begin()
        ours = [result.clone() for result in value_and_gradient(compiled, logits, target)]
        for a, b in zip(ours, value_and_gradient(criterion, logits, target), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@each_traced_loss
@pytest.mark.filterwarnings("ignore")
def test_export(criterion):
    """Of any batch, callable with gradients."""

    class Model(nn.Module):
        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            return criterion(logits.exp(), target)

    criterion = without_noise(criterion)
    batch = torch.export.Dim("batch", min=2)
    given = tuple(tensor.detach() for tensor in problem(16, 100))
    shapes = {"logits": {0: batch}, "target": {0: batch}}
    exported = torch.export.export(Model(), given, dynamic_shapes=shapes).module()
    for rows in (2, 300, 5000):
        logits, target = problem(rows, 100)
        ours = value_and_gradient(exported, logits, target)
        eager = value_and_gradient(Model(), logits, target)
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_tensors_without_memory():
    with FakeTensorMode():
        logits, target = problem(2, 9)
        assert TF.smooth_topk_loss(logits, target, 3).shape == ()
        assert topklass.noised_topk(logits, 3).shape == (2,)


@pytest.mark.filterwarnings("ignore")
def test_compiled_noise_is_new_in_each_call():
    torch._dynamo.reset()
    criterion = topklass.NoisedTopKLoss(5, epsilon=1.0, reduction="none")
    compiled = torch.compile(criterion, fullgraph=True)
    logits, target = problem(64, 1000)
    assert not torch.equal(compiled(logits, target), compiled(logits, target))
