"""What one sees of a training run: a line for each epoch, and a bar."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress(Callback):
    """Rich progress of a run, on the first process only.

    Args:
        console: where to write: a line for each epoch, and on a terminal a bar.
        steps: steps of the whole training.
        batch_size: images of a step.
        k: length of the list whose accuracy is shown beside top-1.
    """

    def __init__(self, console: Console, steps: int, batch_size: int, k: int) -> None:
        self.console, self.steps, self.batch_size, self.k = console, steps, batch_size, k
        self.bar: Bar | None = None
        self.began, self.first = 0.0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the bar."""
        if not trainer.is_global_zero:
            return
        self.began, self.first = time.perf_counter(), trainer.global_step
        self.bar = Bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:,.0f} images/s"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task(
            "", total=self.steps, completed=trainer.global_step, epoch="", speed=0.0
        )
        self.bar.start()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(
                self.task,
                completed=trainer.global_step,
                epoch=f"{trainer.current_epoch + 1}/{trainer.max_epochs}",
                speed=self._speed(trainer),
            )

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the results of the epoch."""
        results = summary(trainer.callback_metrics, self.k)  # all processes agree on them here
        if self.bar is None:
            return
        epoch = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
        speed = f"{self._speed(trainer):,.0f} images/s"
        self.console.print(f"{epoch}  {results}  {speed}", soft_wrap=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the bar."""
        self._stop()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Remove the bar."""
        self._stop()

    def _speed(self, trainer: L.Trainer) -> float:
        done = trainer.global_step - self.first
        return done * self.batch_size / max(1e-9, time.perf_counter() - self.began)

    def _stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def summary(metrics: Any, k: int) -> str:
    """Losses and accuracies in a line."""
    parts = []
    for name, title in (("train/loss", "loss"), ("validation/loss", "validation loss")):
        if name in metrics:
            parts.append(f"{title} {float(metrics[name]):.3f}")
    for each in dict.fromkeys((1, k)):
        if f"validation/top{each}" in metrics:
            parts.append(f"top-{each} {100 * float(metrics[f'validation/top{each}']):.1f} %")
    return "  ".join(parts)
