"""Class weights that come late in training: the schedule of LDAM-DRW."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from topklass._checks import is_integer
from topklass._checks import class_dimension
from topklass.operators.margins import class_weights


class DeferredReweighting(nn.Module):
    """A loss whose classes are weighted from some epoch on (Cao et al. 2019, Algorithm 1).

    Before the epoch ``start`` the criterion is as it was; from then on its ``weight`` is that of
    :func:`topklass.class_weights`, times its own if it has one. ``set_epoch`` tells which epoch it
    is. Whether the weights are on is saved in the state dict.

    Use it for long-tailed data, around a loss with margins per class, and turn the weights on where
    the learning rate is lowered, after about 80 % of the epochs: features learn best from the data
    as they are, and the last layer from weighted classes. Weights are on in ``eval()`` mode too.

    Args:
        criterion: any loss that takes a ``weight`` for each class, of topklass or of
            :mod:`torch.nn`.
        counts: number of training samples of each class.
        start: first epoch, as ``set_epoch`` counts them, in which the classes are weighted.
        beta: see :func:`topklass.class_weights`.

    Example:
        >>> import torch
        >>> counts = torch.tensor([1000, 100, 10])
        >>> criterion = DeferredReweighting(nn.CrossEntropyLoss(), counts, start=160)
        >>> for epoch in (0, 160):
        ...     criterion.set_epoch(epoch)
        ...     print(criterion(torch.eye(3), torch.tensor([1, 1, 2])))
        tensor(0.8848)
        tensor(0.6351)
    """

    class_weights: Tensor

    def __init__(
        self,
        criterion: nn.Module,
        counts: Tensor | Sequence[float],
        start: int,
        beta: float = 0.9999,
    ) -> None:
        super().__init__()
        if not isinstance(criterion, nn.Module) or "weight" not in criterion._buffers:
            raise TypeError(
                f"criterion must be a loss with a weight for each class, "
                f"got {type(criterion).__name__}, which has no buffer named weight"
            )
        _check_epoch("start", start)
        self.criterion = criterion
        self.register_buffer("class_weights", class_weights(counts, beta))
        own = criterion._buffers["weight"]
        if own is not None and own.shape != self.class_weights.shape:
            raise ValueError(
                f"counts must have one value for each class, {tuple(own.shape)} as the "
                f"criterion's weight, got shape {tuple(self.class_weights.shape)}"
            )
        self.start = start
        self.active = start == 0

    def set_epoch(self, epoch: int) -> None:
        """Turn the weights on if ``epoch`` is ``start`` or later, and off if not."""
        _check_epoch("epoch", epoch)
        self.active = epoch >= self.start

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the criterion, with weights if they are on."""
        self._check_classes(*args)
        if not self.active:
            return self.criterion(*args, **kwargs)
        own = self.criterion._buffers["weight"]
        weight = self.class_weights if own is None else self.class_weights * own
        return functional_call(self.criterion, {"weight": weight}, args, kwargs)

    def _check_classes(self, *args: Any) -> None:
        """Find wrong counts in the first step, not in the first one with weights."""
        if not args or not isinstance(args[0], Tensor) or args[0].dim() == 0:
            return
        classes = args[0].shape[class_dimension(args[0])]
        if classes != len(self.class_weights):
            raise ValueError(
                f"there are counts for {len(self.class_weights)} classes, but the input has "
                f"{classes} (torch.bincount(labels, minlength={classes}) counts them all)"
            )

    def get_extra_state(self) -> dict[str, bool]:
        """What the state dict holds beside tensors."""
        return {"active": self.active}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """Take it from a state dict."""
        self.active = state["active"]

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"start={self.start}, active={self.active}"


def _check_epoch(name: str, value: int) -> None:
    """Require the number of an epoch."""
    if not is_integer(value) or value < 0:
        raise ValueError(f"{name} must be an integer from 0 on, got {name}={value!r}")
