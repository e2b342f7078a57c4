"""Who computes: kernels or the reference."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import topklass
from topklass import dispatch
from topklass.functional import noised_topk_loss, smooth_topk_loss, topk_cross_entropy

LOGITS, TARGET = torch.randn(3, 40), torch.tensor([0, 1, 2])
SPARSE = topklass.SparseTarget(TARGET.unsqueeze(1), torch.ones(3, 1))


def refused(match: str) -> AbstractContextManager[object]:
    return pytest.raises(RuntimeError, match=f"no kernel for .*{match}")


@pytest.fixture
def kernels_demanded(monkeypatch):
    """Kernels, as if there were a device that they serve."""
    monkeypatch.setattr(dispatch, "_obstacle_of_device", lambda device: None)
    with topklass.use_backend("kernel"):
        yield


@pytest.mark.skipif(dispatch.INTERPRETED, reason="the interpreter serves the CPU")
@pytest.mark.parametrize(
    "function",
    [
        lambda: smooth_topk_loss(LOGITS, TARGET),
        lambda: noised_topk_loss(LOGITS, TARGET),
        lambda: topklass.log_esp(LOGITS, 3),
        lambda: topklass.topk_marginals(LOGITS, 3),
        lambda: topklass.noised_topk(LOGITS, 3),
    ],
    ids=["smooth", "noised", "log_esp", "marginals", "noised_topk"],
)
def test_no_kernels_for_the_cpu(function):
    with topklass.use_backend("kernel"), refused("device cpu"):
        function()
    function()
    with topklass.use_backend("reference"):
        function()


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("float64", {"logits": LOGITS.double()}),
        ("k = 1025", {"logits": torch.zeros(3, 1030), "k": 1025}),
        ("k = 11, only up to 10", {"target": LOGITS.softmax(1), "k": 11}),
        ("derivatives by the class prob", {"target": LOGITS.softmax(1).requires_grad_()}),
        ("margin", {"margin": torch.ones(40, requires_grad=True)}),
        ("weight", {"weight": torch.ones(40, requires_grad=True)}),
        ("ignore_index", {"ignore_index": -(2**40)}),
        ("without rows", {"logits": LOGITS[:0], "target": TARGET[:0]}),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_what_the_smooth_loss_has_no_kernel_for(match, arguments, kernels_demanded):
    with refused(match):
        smooth_topk_loss(**({"logits": LOGITS, "target": TARGET} | arguments))


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("k = 11, only up to 10", {"k": 11}),
        ("k = 11, only up to 10", {"k": {1: 0.5, 11: 0.5}}),
        ("margins in lists of several lengths", {"k": {1: 0.5, 5: 0.5}, "margin": 0.5}),
        ("a SparseTarget with label smoothing", {"target": SPARSE}),
    ],
)
def test_what_label_smoothing_has_no_kernel_for(match, arguments, kernels_demanded):
    with refused(match):
        topk_cross_entropy(LOGITS, **({"target": TARGET, "label_smoothing": 0.1} | arguments))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by forward mode
def test_no_kernels_for_transformations(kernels_demanded):
    def loss(x: Tensor) -> Tensor:
        return smooth_topk_loss(x, TARGET)

    for transformed in (torch.func.grad(loss), lambda x: torch.func.vmap(loss)(x[None])):
        with refused("transformed"):
            transformed(LOGITS)
    with forward_ad.dual_level(), refused("transformed"):
        loss(forward_ad.make_dual(LOGITS, LOGITS))


def test_losses_without_kernels_do_not_care(kernels_demanded):
    topklass.functional.topk_hinge_loss(LOGITS, TARGET)
    topklass.functional.focal_loss(LOGITS, TARGET)


@pytest.mark.parametrize("backend", ["nonsense", "", "Kernel", None])
def test_unknown_backend(backend):
    with pytest.raises(ValueError, match="auto, kernel, reference"), topklass.use_backend(backend):
        pass
    assert dispatch._backend.get() == "auto"


def test_the_choice_ends_with_its_block():
    with topklass.use_backend("reference"):
        with topklass.use_backend("kernel"):
            assert dispatch._backend.get() == "kernel"
        assert dispatch._backend.get() == "reference"
        with pytest.raises(KeyError), topklass.use_backend("kernel"):
            raise KeyError
        assert dispatch._backend.get() == "reference"
    assert dispatch._backend.get() == "auto"


def test_the_choice_is_that_of_the_thread():
    with topklass.use_backend("kernel"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(dispatch._backend.get).result() == "auto"


@pytest.mark.filterwarnings("ignore")  # the compiler warns, differently in every version
def test_compiled_functions_do_not_see_it():
    """Else the choice of the first call would be baked into the graph."""
    torch._dynamo.reset()
    compiled = torch.compile(smooth_topk_loss, fullgraph=True, backend="eager")
    expected = smooth_topk_loss(LOGITS, TARGET)
    with topklass.use_backend("kernel"):
        torch.testing.assert_close(compiled(LOGITS, TARGET), expected)
    torch.testing.assert_close(compiled(LOGITS, TARGET), expected)


def test_as_a_decorator():
    @topklass.use_backend("reference")
    def chosen() -> str:
        return dispatch._backend.get()

    assert (chosen(), chosen(), dispatch._backend.get()) == ("reference", "reference", "auto")


@pytest.mark.parametrize(
    ("installed", "obstacle"), [("3.3.1", "older than 3.4"), ("3.4.0", None), ("4.0.0+git", None)]
)
def test_versions_of_triton(installed, obstacle, monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: True)
    monkeypatch.setattr(dispatch, "version", lambda name: installed)
    found = dispatch._missing_triton()
    assert found is None if obstacle is None else obstacle in found


def test_without_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert "without triton" in dispatch._missing_triton()


def test_triton_under_another_name(monkeypatch):
    """Builds of other platforms install the module, but no distribution called triton."""

    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(dispatch, "version", unknown)
    monkeypatch.setattr("triton.__version__", "3.4.0+nightly")
    assert dispatch._missing_triton() is None
