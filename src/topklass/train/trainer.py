"""Lightning's trainer, set up such that an interruption loses nothing."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from topklass.train.files import SafeCheckpoints
from topklass.train.module import Classifier
from topklass.train.progress import Progress
from topklass.train.recipe import Recipe
from topklass.train.sharding import strategy

KEEP_EVERY = timedelta(minutes=2)
"""How often a checkpoint is written within an epoch: the most that a power cut may cost."""

EXPECTED_WARNINGS = (
    ".*does not have many workers.*",  # images are in memory
    ".*directory .* exists and is not empty.*",  # of the run that is continued, and its recipe
    ".*is smaller than the logging interval.*",  # logs are of epochs
    ".*It is recommended to use .self.log.*sync_dist=True.*",  # metrics are synchronised already
    ".*Both mixed precision and an auto_wrap_policy.*",  # batch norm stays in full precision
    ".*LeafSpec.*is deprecated.*",  # between Lightning and PyTorch
)
"""Lightning warns about these, but they are intended here."""


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Lightning's messages about what is intended."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


class Interrupted(Exception):
    """Training was asked to stop, and a checkpoint was written."""


class Best(ModelCheckpoint):
    """The best checkpoint, also of a run that is continued after it was moved."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best; Lightning would forget it in another folder."""
        folder = Path(str(self.dirpath))
        moved = {str(folder / Path(p).name): v for p, v in state_dict["best_k_models"].items()}
        paths = {
            name: state_dict[name] and str(folder / Path(state_dict[name]).name)
            for name in ("best_model_path", "kth_best_model_path")
        }
        here = {"dirpath": self.dirpath, "best_k_models": moved, **paths}
        super().load_state_dict({**state_dict, **here})


class WithinEpochs(ModelCheckpoint):
    """Checkpoints by the clock, but not between the last step of an epoch and its validation."""

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        """Save if it is time."""
        if not trainer.is_last_batch:
            super().on_train_batch_end(trainer, *rest)


class MovingAverage(WeightAveraging):
    """An exponential moving average of the weights, which is validated, tested and kept.

    After n steps its decay is min(decay, (1 + n) / (10 + n)), so that it soon forgets the initial
    weights. Statistics of batch normalisation are averaged as well; counts are copied.

    Args:
        decay: of the average.
    """

    def __init__(self, decay: float) -> None:
        def update(averaged: list[Tensor], current: list[Tensor], count: Tensor) -> None:
            counts = not averaged[0].is_floating_point()  # called for each type
            now = 0.0 if counts else min(decay, (1 + int(count)) / (10 + int(count)))
            get_ema_multi_avg_fn(now)(averaged, current, count)  # type: ignore[no-untyped-call]

        super().__init__(multi_avg_fn=update)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Keep the average on the device of training, but not the count, which each step reads."""
        self._device = trainer.strategy.root_device
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            self._average_model.n_averaged = self._average_model.n_averaged.cpu()


class StopAfterStep(Callback):
    """On Ctrl-C or a termination signal: finish the step, write a checkpoint, and end.

    After the last step of an epoch its validation comes first, and the checkpoint that follows it:
    a run that is continued between the two would have no validation of that epoch. A signal to one
    of several processes ends all, after the same step. The same signal again ends at once.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.asked = False
        self.received: set[int] = set()
        self.previous: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle signals, which only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self._ask)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop here if asked to: the previous epoch has left a checkpoint."""
        if self._agreed(trainer):
            self._stop(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Stop here if asked to."""
        if not trainer.is_last_batch and self._agreed(trainer):
            trainer.save_checkpoint(self.checkpoint)
            self._stop(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the previous handlers."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}

    def _agreed(self, trainer: L.Trainer) -> bool:
        """Whether any process was asked: one that stopped alone would leave the others waiting."""
        return trainer.strategy.reduce_boolean_decision(self.asked, all=False)

    def _stop(self, trainer: L.Trainer) -> NoReturn:
        raise Interrupted(f"stopped after step {trainer.global_step}; continue with --resume")

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number in self.received:
            raise KeyboardInterrupt
        self.received.add(number)
        self.asked = True


def stop_after_step(trainer: L.Trainer) -> None:
    """Stop as after Ctrl-C."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StopAfterStep):
            callback.asked = True


def make_trainer(
    recipe: Recipe,
    run: Path,
    module: Classifier,
    console: Console | None,
    more: Sequence[Callback] = (),
) -> L.Trainer:
    """A trainer that logs to ``run``, and keeps the best and the last checkpoint there."""
    folder = run / "checkpoints"
    best = Best(folder, "best", monitor=module.monitored, mode="max", enable_version_counter=False)
    last = WithinEpochs(
        folder, "last", monitor=None, train_time_interval=KEEP_EVERY, enable_version_counter=False
    )
    at_epoch = ModelCheckpoint(
        folder, "last", monitor=None, every_n_epochs=1, enable_version_counter=False
    )
    averaging = [] if recipe.ema is None else [MovingAverage(recipe.ema)]
    # Checkpoints are written last: StopAfterStep writes one, Lightning moves the others to the end.
    callbacks = [*averaging, *more, StopAfterStep(folder / "last.ckpt"), best, last, at_epoch]
    if recipe.patience is not None:
        callbacks.append(EarlyStopping(module.monitored, patience=recipe.patience, mode="max"))
    if console is not None:
        callbacks.append(Progress(console, module.steps, recipe.batch_size, recipe.k))
    return L.Trainer(
        max_epochs=recipe.epochs,
        devices=recipe.devices,
        num_nodes=recipe.nodes,
        strategy=strategy(recipe.strategy),
        benchmark=recipe.compile or None,  # of convolutions
        precision=recipe.precision,  # type: ignore[arg-type]
        accelerator="auto",
        callbacks=callbacks,
        plugins=[SafeCheckpoints()],
        logger=[CSVLogger(run, "", ""), TensorBoardLogger(run, "", "tensorboard")],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1_000_000,
        use_distributed_sampler=False,
    )
