"""The share of logits whose gradient is not 0, logged as ``train/gradient``."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import MeanMetric

from topklass.train.module import log_mean, metric_state


class GradientShare(Callback):
    """Logs the mean over an epoch of the share of logits whose gradient is not 0.

    The gradient is read in every step, which ordinary training does not do. Give it to
    ``train(recipe, run, callbacks=[GradientShare()])`` or ``train_all(runs, callbacks=[…])``.
    """

    def __init__(self) -> None:
        self.mean = MeanMetric(nan_strategy="disable")

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Watch the logits that the loss takes in training."""
        self.mean.to(pl_module.device)

        def watch(module: Any, arguments: tuple[Tensor, ...]) -> None:
            if arguments[0].requires_grad:
                arguments[0].register_hook(self._add)  # type: ignore[no-untyped-call]

        self.handle = pl_module.criterion.register_forward_pre_hook(watch)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        """Log the mean with the others of the epoch."""
        if trainer.is_last_batch:
            log_mean(pl_module, "train/gradient", self.mean)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Watch no longer."""
        self.handle.remove()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the mean of an epoch that is not complete, over all processes."""
        checkpoint["gradient_share"] = metric_state(self.mean)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore it, in the first process."""
        if trainer.is_global_zero:
            self.mean.load_state_dict(checkpoint["gradient_share"])

    def _add(self, gradient: Tensor) -> None:
        self.mean.update((gradient != 0).float().mean())
