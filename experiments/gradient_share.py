"""What a loss does to the logits in training, by epoch."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import MeanMetric

from topklass.train.module import log_mean, metric_state


class GradientShare(Callback):
    """Logs means over an epoch, read in every step, which ordinary training does not do.

    - ``train/gradient``: the share of logits whose gradient is not 0.
    - ``train/active``: the share of images with such a logit.
    - ``train/pushed``: how many classes the gradient pushes down, see :func:`pushed_classes`.
    - ``train/spread``: the standard deviation of an image's logits.

    Give it to ``train(recipe, run, callbacks=[GradientShare()])`` or ``train_all(runs,
    callbacks=[…])``.
    """

    def __init__(self) -> None:
        names = ("gradient", "active", "pushed", "spread")
        self.means = {name: MeanMetric(nan_strategy="disable") for name in names}

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Watch the logits that the loss takes in training."""
        for mean in self.means.values():
            mean.to(pl_module.device)

        def watch(module: Any, arguments: tuple[Tensor, ...]) -> None:
            if arguments[0].requires_grad:
                self.means["spread"].update(arguments[0].detach().float().std(1))
                arguments[0].register_hook(self._add)  # type: ignore[no-untyped-call]

        self.handle = pl_module.criterion.register_forward_pre_hook(watch)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        """Log the means with the others of the epoch."""
        if trainer.is_last_batch:
            for name, mean in self.means.items():
                log_mean(pl_module, f"train/{name}", mean)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Watch no longer."""
        self.handle.remove()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the means of an epoch that is not complete, over all processes."""
        checkpoint["gradient_share"] = {
            name: metric_state(mean) for name, mean in self.means.items()
        }

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore those that were saved, in the first process; the others begin anew."""
        if trainer.is_global_zero:
            saved = checkpoint.get("gradient_share", {})
            for name in self.means.keys() & saved.keys():
                self.means[name].load_state_dict(saved[name])

    def _add(self, gradient: Tensor) -> None:
        nonzero = gradient != 0
        active = nonzero.any(1).float()
        self.means["gradient"].update(nonzero.float().mean())
        self.means["active"].update(active)
        self.means["pushed"].update(pushed_classes(gradient.float()), active)


def pushed_classes(gradient: Tensor) -> Tensor:
    """How many classes a gradient pushes down, by their shares: the exponential of the entropy.

    Args:
        gradient: (N, C), of a loss by logits; its positive part is what pushes down.

    Returns:
        (N), from 1 to C; 1 for a row without gradient.

    Example:
        >>> pushed_classes(torch.tensor([[-1.0, 0.5, 0.5, 0.0], [-1.0, 0.0, 0.0, 1.0]]))
        tensor([2., 1.])
    """
    positive = gradient.clamp(min=0)
    shares = positive / positive.sum(1, keepdim=True).clamp(min=torch.finfo(gradient.dtype).tiny)
    entropy: Tensor = torch.special.entr(shares).sum(1)
    return entropy.exp()
