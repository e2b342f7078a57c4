"""Every loss works with what PyTorch does to functions and modules."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.functional import hessian, jacobian

import topklass
from contract_cases import C, every_kind, every_loss, every_smooth_loss, name
from losses_table import LOSSES, Loss, problem
from synchronisation import no_synchronisation
from topklass.reference import row_blocks
from topklass.reference.power_sums import LARGEST_K

# PyTorch's own forward mode still uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

NOISED = [loss for loss in LOSSES if loss.parameters.get("samples")]
every_noised_loss = pytest.mark.parametrize("loss", NOISED, ids=name)
every_k = pytest.mark.parametrize(
    "k", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 13))]
)


def a_case(loss: Loss, kind: str = "indices", k: int = 2, reduction: str = "sum"):
    """Logits (3, k + 4), and the loss as a function of them alone, with every option in use."""
    classes = k + 4
    logits, target = problem((3, classes), kind)
    arguments = loss.arguments(classes, k, per_class=True) | loss.fixed(logits.shape)
    arguments["weight"] = torch.rand(classes, dtype=torch.float64)
    if kind == "indices":
        arguments["ignore_index"] = int(target[2])
        target[:2] = (target[2] + 1) % classes
    return logits, lambda x: loss(x, target, **arguments, reduction=reduction)


def gradient(function, logits: Tensor) -> Tensor:
    leaf = logits.detach().clone().requires_grad_()
    return torch.autograd.grad(function(leaf).sum(), leaf)[0]


# Derivatives


@every_loss
@every_kind
@every_k
def test_gradient(loss, kind, k):
    logits, function = a_case(loss, kind, k, reduction="none")
    assert gradcheck(function, logits.requires_grad_(), check_forward_ad=True)


@every_kind
def test_gradient_by_the_tree(kind, monkeypatch):
    monkeypatch.setattr("topklass.reference.power_sums.LARGEST_K", dict.fromkeys(LARGEST_K, 1))
    monkeypatch.setattr("topklass.reference.power_sums.LARGEST_K_OF_LABELS", 1)
    logits, function = a_case(LOSSES[0], kind, reduction="none")
    assert gradcheck(function, logits.requires_grad_(), check_forward_ad=True)
    assert gradgradcheck(function, logits, fast_mode=True)


@pytest.mark.parametrize("n", [3, 4, 5, 6, 9])
def test_gradient_with_a_middle(n, monkeypatch):
    """Twice as many scores outside of the power sums as the list has, or all there are."""
    monkeypatch.setattr("topklass.reference.power_sums.LARGEST_K_IN_FLOAT32", 1)
    logits = torch.randn(3, n, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 1, n - 1])

    def function(s):
        return topklass.functional.smooth_topk_loss(s, target, 2, 0.5, reduction="none")

    assert gradcheck(function, logits, check_forward_ad=True)
    assert gradgradcheck(function, logits)


@every_smooth_loss
@every_kind
@every_k
def test_second_derivative(loss, kind, k):
    logits, function = a_case(loss, kind, k, reduction="none")
    assert gradgradcheck(function, logits.requires_grad_())


@every_smooth_loss
@every_kind
def test_second_derivative_with_absent_classes(loss, kind):
    logits = torch.randn(2, C, dtype=torch.float64)
    target = torch.tensor([0, 1])
    if kind == "probabilities":
        target = F.one_hot(target, C).double()
    arguments = loss.arguments()

    def masked(x: Tensor) -> Tensor:
        return loss(x.masked_fill(torch.arange(C) == 3, -math.inf), target, **arguments)

    assert gradgradcheck(masked, logits.requires_grad_())


@every_smooth_loss
@every_kind
def test_hessian(loss, kind):
    logits, function = a_case(loss, kind)
    expected = hessian(function, logits)
    assert expected.abs().max() > 1e-5
    torch.testing.assert_close(torch.func.hessian(function)(logits), expected)


@every_noised_loss
@every_kind
@pytest.mark.parametrize(
    "second_order",
    [
        torch.func.hessian,
        lambda f: torch.func.jacrev(torch.func.jacrev(f)),
        lambda f: lambda x: hessian(f, x),
        lambda f: lambda x: twice(f, x),
    ],
    ids=["func.hessian", "jacrev of jacrev", "autograd.hessian", "create_graph"],
)
def test_no_second_derivative_of_sampled_noise(loss, kind, second_order):
    logits, function = a_case(loss, kind)
    with pytest.raises(RuntimeError, match="no second derivative"):
        second_order(function)(logits)


def twice(function, logits: Tensor) -> Tensor:
    """The gradient of a loss with a penalty on its gradient."""
    leaf = logits.clone().requires_grad_()
    value = function(leaf)
    (first,) = torch.autograd.grad(value, leaf, create_graph=True)
    return torch.autograd.grad(value + first.square().sum(), leaf)[0]


# torch.func


@every_loss
@every_kind
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_vmap_gives_gradients_of_samples(loss, kind, label_smoothing):
    logits, target = problem((4, C), kind)
    arguments = loss.arguments(per_class=True) | {"label_smoothing": label_smoothing}
    arguments["weight"] = torch.rand(C, dtype=torch.float64)
    if kind == "indices":
        target[1] = -100
    fixed = loss.fixed(logits.shape)

    def of_sample(x: Tensor, y: Tensor, fixed: dict[str, Tensor]) -> Tensor:
        return loss(x, y, **arguments, **fixed, reduction="sum")

    actual = torch.vmap(torch.func.grad(of_sample))(logits, target, fixed)
    expected = gradient(lambda x: loss(x, target, **arguments, **fixed, reduction="sum"), logits)
    torch.testing.assert_close(actual, expected)


@every_loss
def test_vmap_over_models(loss):
    """Logits of several models for the same targets."""
    inputs, target = torch.randn(3, 4, C, dtype=torch.float64), torch.tensor([0, 1, 2, 2])
    arguments = loss.arguments() | loss.fixed((4, C))
    actual = torch.vmap(lambda x: loss(x, target, **arguments))(inputs)
    expected = torch.stack([loss(x, target, **arguments) for x in inputs])
    torch.testing.assert_close(actual, expected)


@every_loss
@every_kind
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobian(loss, kind, strategy):
    """One batched backward pass, as ``is_grads_batched=True`` makes it."""
    logits, function = a_case(loss, kind, reduction="none")
    actual = jacobian(function, logits, vectorize=True, strategy=strategy)
    torch.testing.assert_close(actual, jacobian(function, logits))


# torch.compile


def check_compiled(module, logits, target, backend, **fixed):
    """One graph for any number of rows, with the values and gradients of eager mode."""
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for rows in (len(logits), len(logits) - 1):
        leaf = logits[:rows].detach().requires_grad_()
        noise = {n: t[:rows] for n, t in fixed.items()}
        value = compiled(leaf, target[:rows], **noise)
        expected = module(leaf, target[:rows], **noise)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(
            torch.autograd.grad(value, leaf), torch.autograd.grad(expected, leaf)
        )


QUICK = ("smooth", "hinge")
INDUCTOR = ("smooth", "noised")


@pytest.mark.filterwarnings("ignore")  # the compiler warns, differently in every version
@pytest.mark.parametrize(
    ("loss", "backend"),
    [
        pytest.param(x, "aot_eager", marks=[] if x.name in QUICK else pytest.mark.slow, id=x.name)
        for x in LOSSES
    ]
    + [
        pytest.param(x, "inductor", marks=pytest.mark.slow, id=f"{x.name}-inductor")
        for x in LOSSES
        if x.name in INDUCTOR
    ],
)
def test_compile(loss, backend):
    logits, target = problem((5, C), dtype=torch.float32)
    target[1] = -100
    fixed = {n: t.float() for n, t in loss.fixed(logits.shape).items()}
    check_compiled(loss.module(**loss.arguments()), logits, target, backend, **fixed)


@pytest.mark.filterwarnings("ignore")  # the compiler warns, differently in every version
@pytest.mark.slow
def test_compile_class_probabilities():
    logits, target = problem((5, C), "probabilities", dtype=torch.float32)
    module = topklass.SmoothTopKLoss(2, weight=torch.rand(C), label_smoothing=0.1)
    check_compiled(module, logits, target, "aot_eager")


@pytest.mark.filterwarnings("ignore")  # the compiler warns, differently in every version
@pytest.mark.slow
@pytest.mark.parametrize("k", [13, 33])
def test_compile_long_lists(k):
    logits, target = problem((5, k + 4), dtype=torch.float32)
    check_compiled(topklass.SmoothTopKLoss(k), logits, target, "aot_eager")


# Devices


@every_loss
@pytest.mark.parametrize(
    ("kind", "k", "label_smoothing"),
    [("indices", 2, 0.0), ("indices", 33, 0.0), ("indices", 33, 0.1), ("probabilities", 2, 0.1)],
)
def test_reads_no_values_off_the_cpu(loss, kind, k, label_smoothing):
    """Tensors on "meta" have no values: whatever would wait for a device raises."""
    classes = k + 4
    module = loss.module(
        **loss.arguments(classes, k, per_class=True),
        weight=torch.ones(classes),
        label_smoothing=label_smoothing,
    ).to("meta")
    logits = torch.empty(3, classes, device="meta", requires_grad=True)
    target = torch.empty(3, dtype=torch.long, device="meta")
    if kind == "probabilities":
        target = torch.empty(3, classes, device="meta")
    value = module(logits, target)
    assert value.device.type == "meta"
    value.backward()
    assert logits.grad.shape == logits.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_loss
@every_kind
@pytest.mark.parametrize("k", [2, 30])
def test_cuda_does_not_wait(loss, kind, k):
    classes = k + 4
    logits, target = problem((5, classes), kind, torch.float32)
    arguments = loss.arguments(classes, k, per_class=True) | {"weight": torch.rand(classes)}
    fixed = loss.fixed(logits.shape)
    expected = gradient(lambda x: loss(x, target, **arguments, **fixed), logits)
    cuda = {n: v.cuda() if isinstance(v, Tensor) else v for n, v in (arguments | fixed).items()}
    logits, target = logits.cuda().requires_grad_(), target.cuda()
    with no_synchronisation():
        (actual,) = torch.autograd.grad(loss(logits, target, **cuda), logits)
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-6)


# Memory


@every_loss
@every_kind
def test_strides_do_not_matter(loss, kind):
    k, classes = 2, 6
    logits, target = problem((4, classes), kind)
    arguments = loss.arguments(classes, k, per_class=True) | loss.fixed(logits.shape)
    arguments["weight"] = torch.rand(classes, dtype=torch.float64)

    def transposed(t: Tensor) -> Tensor:
        return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else strided(t)

    def strided(t: Tensor) -> Tensor:
        wide = torch.full([2 * n for n in t.shape], 7, dtype=t.dtype)
        wide[(slice(None, None, 2),) * t.dim()] = t
        return wide[(slice(None, None, 2),) * t.dim()]

    def run(layout) -> tuple[Tensor, Tensor]:
        laid = {n: layout(v) if isinstance(v, Tensor) else v for n, v in arguments.items()}
        leaf = layout(logits).requires_grad_()
        value = loss(leaf, layout(target), **laid, reduction="none")
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    expected = run(lambda t: t.clone())
    assert not transposed(logits).is_contiguous()
    torch.testing.assert_close(run(transposed), expected)
    torch.testing.assert_close(run(strided), expected)


@every_loss
def test_expanded_logits(loss):
    """One row for all samples, or one score for all classes: stride 0."""
    target = torch.tensor([0, 1, 2])
    for small in (torch.randn(1, C, dtype=torch.float64), torch.randn(3, 1, dtype=torch.float64)):
        dense, expanded = small.repeat(3 // len(small), C // small.shape[1]), small.expand(3, C)
        torch.testing.assert_close(
            gradient(lambda x: loss(x.expand(3, C), target, **loss.arguments()), small),
            gradient(lambda x: loss(x, target, **loss.arguments()), dense).sum_to_size(small.shape),
        )
        assert expanded.stride() != dense.stride()


@every_loss
@pytest.mark.parametrize(
    ("kind", "k", "label_smoothing"),
    [("indices", 2, 0.0), ("indices", 13, 0.0), ("indices", 2, 0.1), ("probabilities", 2, 0.0)],
)
def test_changes_nothing_of_the_caller(loss, kind, k, label_smoothing):
    classes = k + 4
    logits, target = problem((3, classes), kind)
    arguments = loss.arguments(classes, k, per_class=True) | loss.fixed(logits.shape)
    arguments["weight"] = torch.rand(classes, dtype=torch.float64)
    if kind == "indices":
        target[0] = -100
    logits.requires_grad_()
    given = [logits, target, *(v for v in arguments.values() if isinstance(v, Tensor))]
    before = [(t._version, t.detach().clone()) for t in given]
    loss(logits, target, **arguments, label_smoothing=label_smoothing).backward()
    for tensor, (version, values) in zip(given, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, values)


# Randomness


@every_noised_loss
def test_generator(loss):
    logits, target = problem((5, C))
    module = loss.module(**loss.arguments())
    state = torch.get_rng_state()
    first, again, other = (
        module(logits, target, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert first == again
    assert first != other


@every_noised_loss
def test_global_seed(loss):
    logits, target = problem((5, C))
    module = loss.module(**loss.arguments())
    values = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        values.append(module(logits, target))
    assert values[0] == values[1] != values[2]


# Modules


@every_loss
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copy(loss, copied):
    logits, target = problem((3, C))
    options = {"weight": torch.rand(C), "reduction": "sum", "label_smoothing": 0.1}
    module = loss.module(**loss.arguments(per_class=True), **options)
    twin = copied(module)
    fixed = loss.fixed(logits.shape)
    assert torch.equal(twin(logits, target, **fixed), module(logits, target, **fixed))
    assert repr(twin) == repr(module)


@every_loss
def test_state_dict(loss):
    logits, target = problem((3, C))
    arguments = loss.arguments(per_class=True)
    module = loss.module(**arguments, weight=torch.rand(C, dtype=torch.float64))
    blank = {n: torch.zeros_like(v) if isinstance(v, Tensor) else v for n, v in arguments.items()}
    other = loss.module(**blank, weight=torch.ones(C, dtype=torch.float64))
    expected = {"weight", "margin"} if loss.takes_margin else {"weight"}
    assert set(module.state_dict()) == expected
    other.load_state_dict(module.state_dict())
    fixed = loss.fixed(logits.shape)
    assert torch.equal(other(logits, target, **fixed), module(logits, target, **fixed))
    assert not loss.module(**loss.arguments()).state_dict()


@every_loss
def test_to(loss):
    module = loss.module(**loss.arguments(per_class=True), weight=torch.rand(C))
    tensors = {"weight", "margin"} if loss.takes_margin else {"weight"}
    assert {n for n, _ in module.named_buffers()} == tensors
    assert all(b.dtype == torch.bfloat16 for b in module.to(torch.bfloat16).buffers())
    value = module(torch.randn(3, C, dtype=torch.bfloat16), torch.tensor([0, 1, 2]))
    assert value.dtype == torch.bfloat16
    assert all(b.device.type == "meta" for b in module.to("meta").buffers())
    assert not list(module.parameters())


@pytest.mark.parametrize("loss", [x for x in LOSSES if x.takes_margin], ids=name)
def test_margins_as_a_list(loss):
    logits, target = problem((3, C), dtype=torch.float32)
    arguments = loss.arguments(per_class=True)
    margins = arguments["margin"].float()
    fixed = loss.fixed(logits.shape)
    listed = loss.module(**(arguments | {"margin": margins.tolist()}))
    tensor = loss.module(**(arguments | {"margin": margins}))
    assert torch.equal(listed(logits, target, **fixed), tensor(logits, target, **fixed))


@every_loss
def test_repr(loss):
    arguments = loss.arguments() | {
        "ignore_index": -7,
        "reduction": "sum",
        "label_smoothing": 0.25,
    }
    shown = repr(loss.module(**arguments))
    assert shown.startswith(loss.module.__name__ + "(")
    for parameter, value in arguments.items():
        assert f"{parameter}={value!r}" in shown


@pytest.mark.parametrize("kind", ["smoothing", "mask"])
def test_tangents_of_margins_in_blocks(monkeypatch, kind):
    """Blocks of rows differentiate the scores alone: a dual margin must not go through them."""
    logits, target = problem((6, C))

    def loss(margin: Tensor) -> Tensor:
        if kind == "smoothing":
            return topklass.functional.smooth_topk_loss(
                logits, target, 2, 0.8, margin, label_smoothing=0.1
            )
        return topklass.functional.multilabel_smooth_topk_loss(logits, logits > 1, 2, 0.8, margin)

    def tangent() -> Tensor:
        margin = torch.full((C,), 0.5, dtype=torch.float64)
        return torch.func.jvp(loss, (margin,), (torch.ones_like(margin),))[1]

    def dual_tangent() -> Tensor | None:
        with forward_ad.dual_level():
            margin = torch.full((C,), 0.5, dtype=torch.float64)
            return forward_ad.unpack_dual(
                loss(forward_ad.make_dual(margin, torch.ones_like(margin)))
            ).tangent

    expected = tangent()
    monkeypatch.setitem(row_blocks.GRAPH_ELEMENTS, "cpu", 1)
    torch.testing.assert_close(dual_tangent(), expected)
