"""On a CUDA device: the CPU's results by kernels, and no waiting for the device."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode

import topklass
import topklass.functional as TF
from losses_table import LOSSES, Loss
from synchronisation import no_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CLASSES = 300


def run(loss: Loss, device: str, dtype: torch.dtype, kind: str, k: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    input = (3 * torch.randn(40, CLASSES, generator=generator)).to(device, dtype).requires_grad_()
    target = torch.randint(CLASSES, (40,), generator=generator)
    if kind == "probabilities":
        target = torch.rand(40, CLASSES, generator=generator)
    elif kind == "few":
        few = torch.randint(CLASSES, (40, 3), generator=generator)
        shares = torch.rand(40, 3, generator=generator)
        target = topklass.SparseTarget(few.to(device), shares.to(device))
    else:
        target[::7] = -100
    arguments = loss.arguments(CLASSES, k, per_class=True) | loss.fixed(input.shape)
    arguments = {n: to(v, device) for n, v in arguments.items()}
    weight = torch.linspace(0.5, 2, CLASSES, device=device)
    target = target.to(device) if isinstance(target, Tensor) else target
    smoothing = 0.1 if kind == "smoothed" else 0.0
    value = loss.function(input, target, weight=weight, label_smoothing=smoothing, **arguments)
    value.backward()
    return [value.detach().cpu().float(), input.grad.cpu().float()]


def to(value: object, device: str) -> object:
    return value.to(device, torch.float32) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("k", [1, 5, 20, 40])
@pytest.mark.parametrize("kind", ["indices", "smoothed", "probabilities", "few"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_same_as_cpu(loss, dtype, kind, k):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    results = zip(run(loss, "cuda", dtype, kind, k), run(loss, "cpu", dtype, kind, k), strict=True)
    values, gradients = results
    # Half precision has ties, which devices may break differently: the gradient of a hinge moves.
    compared = [values, gradients] if loss.smooth or dtype == torch.float32 else [values]
    for ours, reference in compared:
        scale = reference.abs().max()
        torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance * scale.item())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("k", [5, 20, 40])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_no_synchronisation(loss, k, label_smoothing):
    """But for the first call, which makes what later ones share."""
    input = torch.randn(40, CLASSES, device="cuda", requires_grad=True)
    target = torch.randint(CLASSES, (40,), device="cuda")
    few = topklass.SparseTarget(target.unsqueeze(1).expand(40, 2), torch.rand(40, 2, device="cuda"))
    arguments = loss.arguments(CLASSES, k)

    def run() -> None:
        for given in (target, few):
            loss.function(input, given, **arguments, label_smoothing=label_smoothing).backward()

    run()
    with no_synchronisation():
        run()


@pytest.mark.parametrize(
    "operator", [topklass.log_esp, topklass.topk_marginals, topklass.noised_topk]
)
@pytest.mark.parametrize("k", [5, 40])
@no_synchronisation()
def test_operators_without_synchronisation(operator, k):
    scores = torch.randn(8, CLASSES, device="cuda", requires_grad=True)
    operator(scores, k).sum().backward()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_autocast(loss):
    input = torch.randn(8, CLASSES, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(CLASSES, (8,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        value = loss.function(input, target, **loss.arguments(CLASSES))
    assert value.dtype == torch.float32
    value.backward()
    assert input.grad.dtype == torch.bfloat16


def test_a_module_moves_with_its_tensors():
    module = topklass.SmoothTopKLoss(margin=[1.0] * CLASSES, weight=torch.ones(CLASSES)).cuda()
    target = torch.randint(CLASSES, (8,), device="cuda")
    assert module(torch.randn(8, CLASSES, device="cuda"), target).is_cuda


# Kernels: precision

ROUNDING = 1.2e-7  # of the result to float32, twice
TINY = 1e-36
KS = (1, 5, 10, 20, 32, 50)
SHAPES = ((256, 100), (64, 1000), (8, 33_000), (2, 1_000_000))
KERNEL_LOSSES = [*map(topklass.SmoothTopKLoss, (5, 20, 50)), topklass.NoisedTopKLoss(5)]


def name(value: object) -> str:
    return f"{type(value).__name__}-{value.k}" if isinstance(value, nn.Module) else str(value)


each_loss = pytest.mark.parametrize("criterion", KERNEL_LOSSES, ids=name)


def without_noise(criterion: nn.Module, **options: object) -> nn.Module:
    """The same loss with other options, and the same result in every call."""
    if isinstance(criterion, topklass.NoisedTopKLoss) and criterion.samples is not None:
        options["epsilon"] = 0.0
    if isinstance(criterion, topklass.NoisedTopKLoss):
        options["samples"] = criterion.samples
    return type(criterion)(criterion.k, **options)


def problem(rows: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    logits = (3 * torch.randn(rows, n, device="cuda")).to(dtype).requires_grad_()
    return logits, torch.randint(n, (rows,), device="cuda")


def value_and_gradient(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Tensor]:
    value = function(*inputs)
    (gradient,) = torch.autograd.grad(value, inputs[0], torch.ones_like(value))
    return value.detach(), gradient


def smooth(
    logits: Tensor, target: Tensor | topklass.SparseTarget, k: int, tau: float, backend: str
) -> tuple[Tensor, Tensor]:
    with topklass.use_backend(backend):
        return value_and_gradient(
            lambda *inputs: TF.smooth_topk_loss(*inputs, k, tau, reduction="none"),
            logits.detach().requires_grad_(),
            target,
        )


def largest_errors(ours: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> Tensor:
    """Relative errors of loss and gradient, the largest of all rows."""
    (loss, gradient), (exact_loss, exact_gradient) = ours, exact
    losses = (loss - exact_loss).abs() / (exact_loss + TINY)
    gradients = (gradient - exact_gradient).norm(dim=1) / (exact_gradient.norm(dim=1) + TINY)
    return torch.stack([losses.max(), gradients.max()])


@pytest.mark.parametrize("logits", ["random", "zero", "ties", "shifted"])
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_at_most_twice_that_of_the_reference(shape, k, logits):
    scores, target = problem(*shape)
    scores = scores.detach()
    if logits == "zero":
        scores = torch.zeros_like(scores)
    elif logits == "ties":  # k ties and the rest just below
        scores = -1e-3 * (torch.rand_like(scores).argsort(1) >= k).float()
    elif logits == "shifted":
        scores = scores + 1000
    for tau in (1.0, 0.01):
        exact = smooth(scores.double(), target, k, tau, "reference")
        kernel, reference = (
            largest_errors(smooth(scores, target, k, tau, backend), exact)
            for backend in ("kernel", "reference")
        )
        assert (kernel <= 2 * reference + ROUNDING).all(), (kernel, reference)


@pytest.mark.parametrize("m", [2, 16])
@pytest.mark.parametrize("k", [1, 5, 20, 32])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_few_classes_are_the_dense_target(shape, k, m):
    scores, _ = problem(*shape)
    target = topklass.SparseTarget(scores.topk(m).indices, torch.rand(len(scores), m).cuda())
    wide = topklass.SparseTarget(target.indices, target.weights.double()).to_dense(shape[1])
    exact = smooth(scores.double(), wide, k, 1.0, "reference")
    assert (largest_errors(smooth(scores, target, k, 1.0, "kernel"), exact) < 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_half_precision_is_computed_in_float32(shape, dtype):
    scores, target = problem(*shape, dtype)
    loss, gradient = smooth(scores, target, 5, 1.0, "kernel")
    single, single_gradient = smooth(scores.float(), target, 5, 1.0, "kernel")
    assert torch.equal(loss, single.to(dtype))
    torch.testing.assert_close(gradient, single_gradient.to(dtype), rtol=1e-2, atol=1e-7)
    assert (gradient == single_gradient.to(dtype)).float().mean() > 0.999


@pytest.mark.parametrize("layout", ["transposed", "rows", "columns", "misaligned", "expanded"])
def test_layouts(layout):
    base = torch.randn(64, 1003, device="cuda")
    scores = {
        "transposed": torch.randn(1003, 64, device="cuda").T,
        "rows": torch.randn(128, 1003, device="cuda")[::2],
        "columns": torch.randn(64, 2006, device="cuda")[:, ::2],
        "misaligned": torch.randn(64 * 1003 + 1, device="cuda")[1:].view(64, 1003),
        "expanded": base[:1].expand(64, 1003),
    }[layout]
    target = torch.randint(1003, (128,), device="cuda")[::2]
    for k in (5, 20):
        for ours, copied in zip(
            smooth(scores, target, k, 1.0, "kernel"),
            smooth(scores.contiguous().clone(), target.contiguous(), k, 1.0, "kernel"),
            strict=True,
        ):
            torch.testing.assert_close(ours, copied, rtol=1e-6, atol=1e-9)
        aligned = smooth(base, target, k, 1.0, "kernel")  # after what was compiled for others
        exact = smooth(base.double(), target, k, 1.0, "reference")
        torch.testing.assert_close(aligned[1].double(), exact[1], rtol=1e-4, atol=1e-6)


def test_masked_and_ignored():
    scores, target = problem(6, 5000)
    scores = scores.detach()
    scores[0] = math.nan
    target[0] = -100
    scores[1, scores[1].argsort()[:-3]] = -math.inf
    target[1] = scores[1].argmax()
    scores[2, target[2]] = -math.inf
    scores[3, 7] = math.nan
    target[3] = 1
    loss, gradient = smooth(scores, target, 5, 1.0, "kernel")
    assert loss[:2].tolist() == [0.0, 0.0]
    assert torch.equal(gradient[:2], torch.zeros_like(gradient[:2]))
    assert loss[2] == math.inf
    assert loss[3].isnan()
    expected = smooth(scores[4:], target[4:], 5, 1.0, "reference")
    torch.testing.assert_close(loss[4:], expected[0])
    torch.testing.assert_close(gradient[4:], expected[1], rtol=1e-5, atol=1e-8)


# Kernels: how they are launched


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@no_synchronisation()
def test_kernels_do_not_synchronise(criterion, reduction, shape):
    logits, target = problem(*shape)
    criterion = type(criterion)(criterion.k, reduction=reduction)
    with topklass.use_backend("kernel"):
        value_and_gradient(criterion, logits, target)


def capture(criterion, logits, target):
    """A CUDA graph of forward and backward pass, and the tensors that it fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            value_and_gradient(criterion, logits, target)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = value_and_gradient(criterion, logits, target)
    return graph, captured


@each_loss
def test_cuda_graph(criterion):
    logits, target = problem(64, 1000)
    criterion = without_noise(criterion)
    graph, captured = capture(criterion, logits, target)
    for _ in range(3):
        with torch.no_grad():
            logits.copy_(3 * torch.randn_like(logits))
            target.copy_(torch.randint_like(target, 1000))
        graph.replay()
        expected = value_and_gradient(criterion, logits, target)
        for ours, eager in zip(captured, expected, strict=True):
            assert torch.equal(ours, eager)


def test_a_cuda_graph_draws_new_noise():
    criterion = topklass.NoisedTopKLoss(5, epsilon=1.0, reduction="none")
    logits, target = problem(64, 1000)
    graph, (loss, _) = capture(criterion, logits, target)
    graph.replay()
    first = loss.clone()
    graph.replay()
    assert not torch.equal(loss, first)


@each_loss
def test_streams(criterion):
    """Work waits for what its own stream has to do before, and for nothing else."""
    logits, target = problem(64, 1000)
    criterion = without_noise(criterion)
    expected = value_and_gradient(criterion, logits, target)
    late = torch.zeros_like(logits)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
        late.data.copy_(logits.data)
        ours = value_and_gradient(criterion, late.requires_grad_(), target)
    torch.cuda.current_stream().wait_stream(side)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


each_traced_loss = pytest.mark.parametrize(
    "criterion", [*KERNEL_LOSSES, topklass.NoisedTopKLoss(5, samples=None)], ids=name
)


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


def test_batches_and_targets_anywhere_in_memory_compile_nothing_new():
    """Numbers of rows and the alignment of targets, weights and margins do not matter."""
    from topklass.kernels.smooth import gradient, row_constants

    def versions() -> list[int]:
        kernels = row_constants.smooth_loss_kernel, gradient.gradient_kernel
        return [len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels]

    target, weight = (torch.ones(64, device="cuda", dtype=t) for t in (torch.long, torch.float))
    TF.smooth_topk_loss(problem(17, 40)[0], target[:17], 3, weight=weight[:40]).backward()
    before = versions()
    for rows in (1, 2, 16, 32, 33):
        logits, _ = problem(rows, 40)
        TF.smooth_topk_loss(logits, target[1 : rows + 1], 3, weight=weight[3:43]).backward()
    assert versions() == before


@pytest.mark.filterwarnings("ignore")
def test_compiled_noise_is_new_in_each_call():
    torch._dynamo.reset()
    criterion = topklass.NoisedTopKLoss(5, epsilon=1.0, reduction="none")
    compiled = torch.compile(criterion, fullgraph=True)
    logits, target = problem(64, 1000)
    assert not torch.equal(compiled(logits, target), compiled(logits, target))


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_under_autocast(criterion, dtype):
    criterion = without_noise(criterion)
    logits, target = problem(64, 1000, dtype)
    with torch.autocast("cuda", dtype=dtype), topklass.use_backend("kernel"):
        loss, gradient = value_and_gradient(criterion, logits, target)
    expected, _ = value_and_gradient(criterion, logits.float(), target)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss, expected)


@each_loss
def test_memory(criterion):
    """One gradient tensor with the gradient, none without."""
    logits, target = problem(2048, 32_000)
    size = logits.numel() * logits.element_size()

    def peak(function: Callable[[], object]) -> float:
        function()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / size

    assert peak(lambda: value_and_gradient(criterion, logits, target)) < 1.1
    with torch.no_grad():
        assert peak(lambda: criterion(logits, target)) < 0.1


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_determinism(k, shape):
    scores, target = problem(*shape)
    criterion = topklass.SmoothTopKLoss(k)
    first = value_and_gradient(criterion, scores, target)
    for _ in range(3):
        again = value_and_gradient(criterion, scores, target)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@each_loss
def test_tensors_of_another_device(criterion):
    criterion = without_noise(criterion)
    logits, target = problem(64, 1000)
    here = value_and_gradient(criterion, logits, target)
    there = value_and_gradient(
        criterion, logits.detach().to("cuda:1").requires_grad_(), target.to("cuda:1")
    )
    assert torch.cuda.current_device() == 0
    for a, b in zip(here, there, strict=True):
        assert b.device.index == 1
        assert torch.equal(a, b.to("cuda:0"))


def test_second_derivatives():
    logits, target = problem(4, 50)
    results = []
    for backend in ("kernel", "reference"):
        with topklass.use_backend(backend):
            loss = TF.smooth_topk_loss(logits, target, 3, reduction="none")
        (gradient,) = torch.autograd.grad(loss.sum(), logits, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), logits)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-7)


# Kernels: noise


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


@pytest.mark.parametrize("shape", [*SHAPES, (5000, 40)], ids=str)
def test_noise_is_that_of_the_seed(shape):
    scores, target = problem(*shape)

    def draw(seed: int) -> list[Tensor]:
        with topklass.use_backend("kernel"):
            operator = value_and_gradient(
                lambda s: topklass.noised_topk(s, 5, samples=10, generator=generator(seed)), scores
            )
            loss = value_and_gradient(
                lambda s: TF.noised_topk_loss(
                    s, target, 5, epsilon=1.0, generator=generator(seed), reduction="none"
                ),
                scores,
            )
        return [*operator, *loss]

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("k", "samples"), [(1, 5), (6, 1), (6, 10), (6, 32), (32, 10)])
def test_gradient_of_noised_topk_counts_samples(shape, k, samples):
    scores, _ = problem(*shape)
    with topklass.use_backend("kernel"):
        _, gradient = value_and_gradient(lambda s: topklass.noised_topk(s, k, 1.0, samples), scores)
    counts = gradient * samples
    assert (counts >= 0).all()
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-4)
    assert torch.equal(counts.round().sum(1), torch.full_like(counts[:, 0], samples))


@pytest.mark.parametrize(
    ("row", "k"),
    [
        (torch.linspace(-2, 2, 30), 5),
        (torch.zeros(30), 1),
        (torch.zeros(3000), 6),
        (torch.arange(30.0).where(torch.arange(30) < 25, -math.inf), 3),
    ],
    ids=["even", "zero", "many zeros", "masked"],
)
def test_noise_is_normal(row, k):
    """Mean and spread of the k-th largest, and how often each class is it, as in the reference."""
    rows = row.cuda().expand(20_000 if len(row) < 100 else 2000, -1)
    leaf = rows.clone().requires_grad_()
    results = []
    for backend in ("kernel", "reference"):
        with topklass.use_backend(backend):
            results.append(
                value_and_gradient(lambda s: topklass.noised_topk(s, k, 1.0, samples=4), leaf)
            )
    (ours, shares), (reference, reference_shares) = results
    count = len(rows)
    error = ((ours.var() + reference.var()) / count).sqrt()
    assert (ours.mean() - reference.mean()).abs() < 5 * error
    assert abs(ours.std() / reference.std() - 1) < 10 / math.sqrt(count)
    mean, expected = shares.mean(0), reference_shares.mean(0)
    errors = ((shares.var(0) + reference_shares.var(0)) / count).sqrt()
    assert ((mean - expected).abs() <= 6 * errors + 1e-12).all()


def test_noise_of_rows_and_samples_is_independent():
    zeros = torch.zeros(4000, 1, device="cuda")
    with topklass.use_backend("kernel"):
        one = topklass.noised_topk(zeros, 1, samples=1)
        many = topklass.noised_topk(zeros, 1, samples=16)
    assert len(one.unique()) > 3900
    assert abs(one.std() - 1) < 0.1
    assert abs(many.std() - 1 / 4) < 0.025


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_noised_loss_without_noise_is_the_calibrated_hinge(shape):
    scores, target = problem(*shape)
    target[0] = -100
    options = {"weight": torch.rand(shape[1], device="cuda"), "margin": 0.5}
    with topklass.use_backend("kernel"):
        ours = value_and_gradient(
            lambda s: TF.noised_topk_loss(s, target, 5, epsilon=0.0, **options), scores
        )
    expected = value_and_gradient(
        lambda s: TF.calibrated_topk_hinge_loss(s, target, 5, **options), scores
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
