"""Models that are exported, traced or compiled see plain operations, right for any batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import topklass
from contract_cases import name
from losses_table import CLASSES, LOSSES, Loss, problem
from topklass.functional import topk_accuracy
from topklass.reference import power_sums

# Exporters and tracers warn, differently in every version of PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore")

C = CLASSES
FEW = 5
QUICK = ("smooth", "hinge", "expected")


def quick_or_slow(*values: object) -> list[object]:
    """All losses with all these values; in the quick part three losses with the first one."""
    return [
        pytest.param(
            loss,
            value,
            marks=[] if loss.name in QUICK and value == values[0] else pytest.mark.slow,
            id=f"{loss.name}-{value}",
        )
        for loss in LOSSES
        for value in values
    ]


def many(loss: Loss) -> int:
    """Rows that are more than one block of eager mode holds."""
    return 3_000 if loss.name == "expected" else 20_000


class Model(nn.Module):
    """A linear layer and a loss, whose noise is an input, too."""

    def __init__(self, loss: Loss, **arguments: object) -> None:
        super().__init__()
        self.linear = nn.Linear(3, C)
        self.loss = loss.module(**loss.arguments(), **arguments)

    def forward(self, features: Tensor, target: Tensor, noise: Tensor | None = None) -> Tensor:
        logits = self.linear(features)
        if noise is None:
            return self.loss(logits, target)
        return self.loss(logits, target, noise=noise)


def batch(loss: Loss, rows: int, ignored: bool = False) -> tuple[Tensor, ...]:
    """Features, targets, and noise if the loss takes any."""
    features, target = torch.randn(rows, 3), torch.randint(C, (rows,))
    if ignored:
        target[::3] = -100
    return features, target, *(noise.float() for noise in loss.fixed((rows, C)).values())


def assert_same(first: nn.Module, second: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Both modules have the same value and the same gradients by the weights."""
    results = []
    for module in (first, second):
        value = module(*inputs)
        results.append((value, *torch.autograd.grad(value, list(module.parameters()))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


# torch.export


def exported(module: nn.Module, inputs: tuple[Tensor, ...], strict: bool) -> nn.Module:
    rows = {0: torch.export.Dim("rows", max=2**31)}  # PyTorch 2.6 wants a bound
    shapes = (rows,) * len(inputs)
    return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=strict).module()


@pytest.mark.parametrize(("loss", "strict"), quick_or_slow(False, True))
def test_export_of_a_model_with_a_loss(loss, strict):
    """Another batch, much larger and with ignored labels, has the loss and gradient of eager."""
    model = Model(loss)
    program = exported(model, batch(loss, FEW), strict)
    for rows in (2, many(loss)):
        assert_same(program, model, batch(loss, rows, ignored=True))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_all_options(strict):
    loss = LOSSES[0]
    model = Model(loss, weight=torch.rand(C), label_smoothing=0.1, ignore_index=2, reduction="sum")
    program = exported(model, batch(loss, FEW), strict)
    assert_same(program, model, batch(loss, 1_000))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_drawn_noise(strict):
    """Nothing that is drawn is baked into the program. It draws other numbers, of the same law."""
    module = topklass.NoisedTopKLoss(2)
    program = exported(module, problem((FEW, C), dtype=torch.float32), strict)
    logits, target = problem((1_000, C), dtype=torch.float32)
    values = []
    for function in (program, module, program):
        torch.manual_seed(3)
        values.append(function(logits, target))
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0.01)
    assert values[0] == values[2] != program(logits, target)


OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "topk_marginals": lambda scores: topklass.topk_marginals(scores, 3),
    "log_esp": lambda scores: topklass.log_esp(scores, 3),
    "expected_topk": lambda scores: topklass.expected_topk(scores, 3),
    "noised_topk": lambda scores: topklass.noised_topk(scores, 3, epsilon=0.0),
    "predict_topk": lambda scores: tuple(topklass.predict_topk(scores, 3)),
    "topk_accuracy": lambda scores: topk_accuracy(scores, torch.zeros_like(scores[:, 0]).long(), 3),
}


class Operator(nn.Module):
    """An operator of scores as a module."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, scores: Tensor) -> object:
        return self.function(scores)


@pytest.mark.parametrize(
    ("operator", "strict"),
    [
        pytest.param(
            operator,
            strict,
            marks=[] if operator == "topk_marginals" and not strict else pytest.mark.slow,
        )
        for operator in OPERATORS
        for strict in (False, True)
    ],
)
def test_export_of_operators(operator, strict):
    module = Operator(OPERATORS[operator])
    program = exported(module, (torch.randn(FEW, C),), strict)
    for rows in (2, 20_000):
        scores = torch.randn(rows, C)
        torch.testing.assert_close(program(scores), module(scores))


# make_fx


@pytest.mark.parametrize(("loss", "mode"), quick_or_slow("symbolic", "real", "fake"))
def test_make_fx(loss, mode):
    """A graph of the loss and its gradient; a symbolic one serves other batches."""
    arguments = loss.arguments()

    def value_and_gradient(logits: Tensor, target: Tensor, *noise: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.detach().requires_grad_()
        fixed = {"noise": noise[0]} if noise else {}
        value = loss.function(logits, target, **arguments, **fixed)
        return value.detach(), torch.autograd.grad(value, logits)[0]

    def inputs(rows: int) -> tuple[Tensor, ...]:
        logits, target = problem((rows, C))
        target[1] = -100
        return logits, target, *loss.fixed(logits.shape).values()

    graph = make_fx(value_and_gradient, tracing_mode=mode)(*inputs(FEW))
    for rows in (FEW, 1_000) if mode == "symbolic" else (FEW,):
        given = inputs(rows)
        torch.testing.assert_close(graph(*given), value_and_gradient(*given))


@pytest.mark.parametrize(
    ("operator", "mode"),
    [
        pytest.param(
            operator,
            mode,
            marks=[] if (operator, mode) == ("topk_marginals", "real") else pytest.mark.slow,
        )
        for operator in ("topk_marginals", "log_esp", "expected_topk", "noised_topk")
        for mode in ("symbolic", "real", "fake")
    ],
)
def test_make_fx_of_operators(operator, mode):
    function = OPERATORS[operator]

    def gradient(scores: Tensor) -> Tensor:
        scores = scores.detach().requires_grad_()
        return torch.autograd.grad(function(scores).square().sum(), scores)[0]

    graph = make_fx(gradient, tracing_mode=mode)(torch.randn(FEW, C))
    scores = torch.randn(FEW, C)
    torch.testing.assert_close(graph(scores), gradient(scores))


# torch.jit.trace


@pytest.mark.parametrize("loss", LOSSES, ids=name)
def test_trace(loss):
    """Traced with some labels, right for other batches, and for ignored labels."""
    module = Model(loss)
    traced = torch.jit.trace(module, batch(loss, FEW))
    for rows in (1, 9, many(loss)):
        inputs = batch(loss, rows, ignored=rows > 1)
        results = []
        for model in (traced, module):
            value = model(*inputs)
            (gradient,) = torch.autograd.grad(value, module.linear.weight)
            results.append((value, gradient))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


# Tensors that stand in for others


def test_composite_compliance():
    """PyTorch's own check that its subclasses of tensors pass through the loss, in any argument."""
    checks = pytest.importorskip("torch.testing._internal.composite_compliance")
    arguments = (*problem((FEW, C)), 2)
    arguments[0].requires_grad_()
    smooth = topklass.functional.smooth_topk_loss
    checks.check_with_mode(smooth, arguments, {}, torch.testing.assert_close)
    checks.check_all_permutations(smooth, arguments, {}, torch.testing.assert_close)
    checks.check_backward_formula(smooth, arguments, {}, assert_equal_fn=torch.testing.assert_close)
    checks.check_forward_ad_formula(
        smooth, arguments, {}, assert_equal_fn=torch.testing.assert_close
    )


# Where power sums are not accurate, a tree of products takes over.


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_the_tree(monkeypatch, strict):
    """Marginals, lists and label smoothing of any batch, as of k = 33 on."""
    monkeypatch.setitem(power_sums.LARGEST_K, torch.float32, 0)
    loss = topklass.SmoothTopKLoss(3, label_smoothing=0.2)

    def everything(scores: Tensor) -> tuple[Tensor, ...]:
        value = loss(scores, torch.zeros_like(scores[:, 0]).long())
        return topklass.topk_marginals(scores, 3), *topklass.predict_topk(scores, 3), value

    module = Operator(everything)
    program = exported(module, (torch.randn(FEW, C),), strict)
    scores = torch.randn(40, C)
    torch.testing.assert_close(program(scores), module(scores))


def test_trace_of_the_multi_label_loss():
    loss = topklass.MultiLabelSmoothTopKLoss(2)
    targets = torch.tensor([[0, 1], [2, -100], [3, 3]])
    traced = torch.jit.trace(loss, (torch.randn(3, C), targets))
    logits, targets = torch.randn(4, C), torch.tensor([[5, 5], [1, -100], [-100, -100], [0, 4]])
    torch.testing.assert_close(traced(logits, targets), loss(logits, targets))
