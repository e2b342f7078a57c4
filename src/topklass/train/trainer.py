"""Lightning's trainer, set up such that an interruption loses nothing."""

from __future__ import annotations

import csv
import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from topklass._files import write_whole
from topklass.train.divided import divide_like, join_when_saved, local
from topklass.train.file_batches import naming_lost_workers
from topklass.train.files import SafeCheckpoints
from topklass.train.module import Classifier
from topklass.train.processes import Processes, naming_ended_ranks
from topklass.train.progress import Progress
from topklass.train.recipe import Recipe
from topklass.train.sharding import strategy

METRICS = "metrics.csv"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""They stop a training."""
KEEP_EVERY = timedelta(minutes=2)
"""How often a checkpoint is written within an epoch: the most that a power cut may cost."""

EXPECTED_WARNINGS = (
    ".*does not have many workers.*",  # images are in memory
    ".*directory .* exists and is not empty.*",  # of the run that is continued, and its recipe
    ".*is smaller than the logging interval.*",  # logs are of epochs
    ".*It is recommended to use .self.log.*sync_dist=True.*",  # metrics are synchronised already
    ".*LeafSpec.*is deprecated.*",  # between Lightning and PyTorch
)
"""Lightning warns about these, but they are intended here."""
LAUNCHER = "lightning.fabric.strategies.launchers.subprocess_script"


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
        logging.getLogger(LAUNCHER).setLevel(logging.INFO)  # says which process has ended
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


class Interrupted(Exception):
    """Training was asked to stop, and can be continued.

    Args:
        message: for the user.
        number: of the signal.
    """

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.status = 128 + number
        """Exit status of the process, as shells have it."""


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


class AfterEpochs(ModelCheckpoint):
    """A checkpoint after each epoch, and before it a table of all epochs.

    Args:
        table: where to write it; the other arguments are those of ``ModelCheckpoint``.
    """

    def __init__(self, table: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.table = table

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write both."""
        if trainer.is_global_zero:
            write_epochs(self.table, pl_module.epochs)  # type: ignore[arg-type]
        super().on_train_epoch_end(trainer, pl_module)


def write_epochs(path: Path, epochs: Sequence[dict[str, float]]) -> None:
    """Write what was logged in each epoch as CSV."""
    text = StringIO()
    table = csv.DictWriter(text, list(dict.fromkeys(name for row in epochs for name in row)))
    table.writeheader()
    table.writerows(epochs)
    write_whole(path, lambda file: file.write(text.getvalue().encode()))


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
            parts = ([local(each) for each in list] for list in (averaged, current))
            get_ema_multi_avg_fn(now)(*parts, count)  # type: ignore[no-untyped-call]

        super().__init__(multi_avg_fn=update)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep of the average what this process has of the weights, on the same device."""
        assert self._average_model is not None
        divide_like(self._average_model.module, pl_module)
        join_when_saved(self._average_model.module)
        self._average_model.module.to(trainer.strategy.root_device)


class StopAfterStep(Callback):
    """On Ctrl-C or a termination signal: finish the step, write a checkpoint, and end.

    After the last step of an epoch its validation comes first, and the checkpoint that follows it:
    a run that is continued between the two would have no validation of that epoch. A signal to one
    of several processes ends all, after the same step. The same signal again ends at once.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.asked = False
        self.received: list[int] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle signals."""
        set_handlers(dict.fromkeys(SIGNALS, self._ask))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop here if asked to: the previous epoch has left a checkpoint."""
        if self._agreed(trainer):
            self._stop(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Stop here if asked to."""
        if not trainer.is_last_batch and self._agreed(trainer):
            trainer.save_checkpoint(self.checkpoint)
            self._stop(trainer)

    def _agreed(self, trainer: L.Trainer) -> bool:
        """Whether any process was asked: one that stopped alone would leave the others waiting."""
        return trainer.strategy.reduce_boolean_decision(self.asked, all=False)

    def _stop(self, trainer: L.Trainer) -> NoReturn:
        """With the exit status of a termination signal if any process has had one."""
        asked = signal.SIGTERM in self.received
        ended = trainer.strategy.reduce_boolean_decision(asked, all=False)
        raise Interrupted(
            f"stopped after step {trainer.global_step}; continue with --resume",
            signal.SIGTERM if ended else signal.SIGINT,
        )

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self.received.append(number)
        if number in self.received[:-1]:
            raise KeyboardInterrupt


def fit(trainer: L.Trainer, *arguments: Any, **options: Any) -> None:
    """Train; a process that is told to end at once raises :class:`Interrupted`."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    if trainer.world_size > 1:  # no handler of Python runs while PyTorch waits for the other ranks
        set_handlers({signal.SIGINT: signal.SIG_DFL})
    try:
        with quiet(), naming_ended_ranks(trainer), naming_lost_workers(), uncovering_errors():
            trainer.fit(*arguments, **options)
    except (SystemExit, OSError) as end:  # Lightning's after a signal, or its closed logger's
        if isinstance(end, OSError) and not isinstance(end.__context__, KeyboardInterrupt):
            raise
        received = [n for each in _stops(trainer) for n in each.received]
        number = signal.SIGTERM if isinstance(end, SIGTERMException) else signal.SIGINT
        message = "stopped at once; continue from the last checkpoint with --resume"
        raise Interrupted(message, *received[:1] or [number]) from None
    finally:
        set_handlers(handlers)  # Lightning leaves others


@contextmanager
def uncovering_errors() -> Iterator[None]:
    """Raise what happened while Lightning logged; it says that a number cannot be logged."""
    cause = None
    try:
        yield
    except ValueError as error:
        cause = error.__cause__
        if cause is None or "you tried to log" not in str(error):
            raise
    if cause is not None:  # a full disk, or a reader that ended just then
        raise cause


def set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Set handlers of signals, which only the main thread can."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stop_after_step(trainer: L.Trainer) -> None:
    """Stop as after Ctrl-C."""
    for callback in _stops(trainer):
        callback.asked = True


def _stops(trainer: L.Trainer) -> list[StopAfterStep]:
    return [each for each in trainer.callbacks if isinstance(each, StopAfterStep)]  # type: ignore[attr-defined]


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
    at_epoch = AfterEpochs(
        run / METRICS,
        folder,
        "last",
        monitor=None,
        every_n_epochs=1,
        enable_version_counter=False,
    )
    averaging = [] if recipe.ema is None else [MovingAverage(recipe.ema)]
    # Checkpoints are written last: StopAfterStep writes one, Lightning moves the others to the end.
    stop = StopAfterStep(folder / "last.ckpt")
    callbacks = [*averaging, *more, Processes(), stop, best, last, at_epoch]
    if recipe.patience is not None:
        callbacks.append(EarlyStopping(module.monitored, patience=recipe.patience, mode="max"))
    if console is not None:
        callbacks.append(Progress(console, module.steps, recipe.batch_size, recipe.k))
    try:
        return L.Trainer(
            max_epochs=recipe.epochs,
            devices=recipe.devices,
            num_nodes=recipe.nodes,
            strategy=strategy(recipe),
            benchmark=recipe.compile or None,  # of convolutions
            precision=recipe.precision,  # type: ignore[arg-type]
            accelerator="auto",
            callbacks=callbacks,
            plugins=[SafeCheckpoints()],
            logger=TensorBoardLogger(run, "", "tensorboard"),
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=1_000_000,
            use_distributed_sampler=False,
        )
    except MisconfigurationException as error:  # more devices than there are, for example
        raise ValueError(" ".join(str(error).split())) from error
