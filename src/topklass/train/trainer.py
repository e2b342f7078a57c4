"""Lightning's trainer, set up such that nothing is lost."""

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
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console

from topklass.train.files import SafeCheckpoints
from topklass.train.module import Classifier
from topklass.train.progress import Progress
from topklass.train.recipe import Recipe
from topklass.train.sharding import strategy

KEEP_EVERY = timedelta(minutes=2)
"""How much work a power cut may cost."""


BESIDE_THE_POINT = (
    ".*does not have many workers.*",  # images are in memory
    ".*directory .* exists and is not empty.*",  # of the run that is continued, and its recipe
    ".*is smaller than the logging interval.*",  # logs are of epochs
    ".*It is recommended to use .self.log.*sync_dist=True.*",  # accuracies agree by themselves
    ".*Both mixed precision and an auto_wrap_policy.*",  # batch norm stays in full precision
    ".*LeafSpec.*is deprecated.*",  # between Lightning and PyTorch
)
"""Warnings of Lightning."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without what Lightning says about things that are as they should be."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in BESIDE_THE_POINT:
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
    """The best checkpoint, also of a run that is continued in another folder than it began in."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; Lightning would forget the best where the folder is another."""
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


class StopAfterStep(Callback):
    """On Ctrl-C or a termination signal: finish the step, write a checkpoint, and end.

    After the last step of an epoch its validation comes first, and the checkpoint that follows it:
    a run that is continued between the two would have no validation of that epoch. A signal to one
    of several processes ends all, after the same step. A second Ctrl-C ends at once.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.asked = False
        self.before: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen to signals, which only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._ask)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop here if that was asked for: the epoch before has left a checkpoint."""
        if self._agreed(trainer):
            self._stop(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Stop here if that was asked for."""
        if not trainer.is_last_batch and self._agreed(trainer):
            trainer.save_checkpoint(self.checkpoint)
            self._stop(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the signals back."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def _agreed(self, trainer: L.Trainer) -> bool:
        """Whether any process was asked: one that stopped alone would leave the others waiting."""
        return trainer.strategy.reduce_boolean_decision(self.asked, all=False)

    def _stop(self, trainer: L.Trainer) -> NoReturn:
        raise Interrupted(f"stopped after step {trainer.global_step}; continue with --resume")

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def stop_after_step(trainer: L.Trainer) -> None:
    """Do as after Ctrl-C."""
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
    callbacks = [best, last, at_epoch, StopAfterStep(folder / "last.ckpt"), *more]
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
