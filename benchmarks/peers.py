"""The published losses, where their packages are installed (``pip install 'topklass[bench]'``)."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def smooth(k: int, tau: float = 1.0, *, per_row: bool = False) -> Loss | None:
    """The smooth loss of Berrada et al. (2018), in difftopk's copy of the published code."""
    if not available("difftopk"):
        return None
    from difftopk import SmoothTopKLoss

    @cache
    def module(classes: int, device: str) -> SmoothTopKLoss:
        return SmoothTopKLoss(num_classes=classes, k=k, tau=tau, device=device)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        criterion = module(logits.shape[1], str(logits.device))
        result: Tensor = (criterion.fn_smooth if per_row else criterion)(logits, target)
        return result

    return loss


def smooth_with_switch(k: int, classes: int) -> Loss | None:
    """The same with the published switch to the hard loss."""
    if not available("difftopk"):
        return None
    from difftopk import SmoothHardTopKLoss

    criterion: Loss = SmoothHardTopKLoss(num_classes=classes, k=k, tau=1.0)
    return criterion


def noised(k: int, epsilon: float, samples: int) -> Loss | None:
    """The noised loss of Garcin et al. (2022), in its authors' package."""
    if not available("pytopk"):
        return None
    from pytopk import BalNoisedTopK

    criterion: Loss = BalNoisedTopK(k=k, epsilon=epsilon, n_sample=samples)
    return criterion


@cache
def available(package: str) -> bool:
    found = find_spec(package) is not None
    if not found:
        print(f"{package} is not installed (pip install 'topklass[bench]'): left out", flush=True)
    return found
