"""Several runs, some at the same time; finished ones are skipped, interrupted ones continued."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from topklass._checks import check_count
from topklass.train.details import RESULT, read_result
from topklass.train.engine import train
from topklass.train.progress import summary
from topklass.train.recipe import Recipe, changes, load_recipe
from topklass.train.restore import RECIPE
from topklass.train.terminal import hide_failed_writes
from topklass.train.trainer import Interrupted, stop_after_step

STOPPED = 130
"""Exit status of a process that was asked to stop."""
ERROR = "error.txt"
"""The traceback of a run that failed, in its folder."""


def train_all(
    runs: Mapping[Path, Recipe],
    names: Mapping[Path, str] | None = None,
    *,
    at_once: int = 1,
    console: Console | None = None,
    finished: Callable[[Path], object] = lambda folder: None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train by each recipe, in other processes, which train one run after another.

    A finished run with this recipe is left as it is, an interrupted one is continued. Ctrl-C stops
    all after their current step, with checkpoints. A run that fails or is killed does not end the
    others; if it fails, its folder has the traceback in ``error.txt``.

    Args:
        runs: recipes by folder.
        names: what each is called in the display, instead of the settings in which it differs.
        at_once: how many runs train at the same time; they share the cores.
        console: where to show progress; None for silence.
        finished: called with the folder of each run when its training ends.
        callbacks: more of Lightning's, for every run; they are pickled.
    """
    check_count("at_once", at_once)
    left = {folder: recipe for folder, recipe in runs.items() if not is_finished(folder, recipe)}
    if console is not None and len(left) < len(runs):
        console.print(f"{len(runs) - len(left)} of {len(runs)} runs are finished already.")
    names = names or dict(zip(left, differences(list(left.values())), strict=True))
    threads = max(1, torch.get_num_threads() // at_once)
    waiting = list(left)
    free: list[_Worker] = []
    active: dict[Connection, _Run] = {}
    failed: dict[Path, str] = {}
    with _make_bar(console) as bar:
        try:
            while waiting or active:
                while waiting and len(active) < at_once:
                    folder = waiting.pop(0)
                    worker = free.pop() if free else _start(threads, callbacks)
                    task = bar.add_task(names[folder], total=1.0, results="")
                    active[worker.connection] = _Run(folder, worker, task)
                    _give(worker, left[folder], folder)
                for connection in cast("list[Connection]", wait(list(active))):
                    folder, worker, task = active[connection]
                    message = _receive(connection)
                    if isinstance(message, Progress):
                        bar.update(task, completed=message.share, results=message.results)
                        continue
                    bar.remove_task(task)
                    if message is None:  # the process has ended
                        worker.process.join()
                        del active[connection]
                        if worker.process.exitcode == STOPPED:
                            raise KeyboardInterrupt
                        failed[folder] = "killed, perhaps for lack of memory"
                        continue
                    free.append(active.pop(connection).worker)
                    if message.error:
                        failed[folder] = message.error
                        continue
                    finished(folder)
                    to_go = f"({len(waiting) + len(active)} to go)"
                    line = f"{names[folder]}: {result_line(folder)}  {to_go}"
                    bar.console.print(line, soft_wrap=True, markup=False)
        except KeyboardInterrupt:
            raise Interrupted("stopped; the same command continues from there") from None
        finally:
            workers = [*free, *(run.worker for run in active.values())]
            for worker in workers:
                worker.process.terminate()  # a signal, upon which a run writes a checkpoint
            for worker in workers:
                worker.process.join()
    raise_failed(failed, len(runs))


def raise_failed(failed: Mapping[Path, object], runs: int) -> None:
    """Raise an error that tells which of so many runs failed, and why, if any did."""
    if failed:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in failed.items())
        raise ChildProcessError(f"{len(failed)} of {runs} runs failed: {reasons}")


def is_finished(folder: Path, recipe: Recipe) -> bool:
    """Whether a folder has the result of a recipe; that of another recipe is an error."""
    if not (folder / RECIPE).exists():
        return False
    found = load_recipe(folder / RECIPE)
    if differing := changes(found, recipe):
        raise FileExistsError(
            f"{folder} has a run of another recipe, {differing}: move it away, or choose another "
            "folder"
        )
    return (folder / RESULT).exists()


def differences(recipes: list[Recipe]) -> list[str]:
    """The settings in which recipes differ.

    Example:
        >>> differences([Recipe(seed=0, loss="smooth"), Recipe(seed=1, loss="noised")])
        ['smooth, seed 0', 'noised, seed 1']
    """
    names = [each.name for each in fields(Recipe)]
    several = [n for n in names if len({repr(getattr(each, n)) for each in recipes}) > 1]
    return [
        ", ".join(
            str(getattr(each, name)) if name == "loss" else f"{name} {getattr(each, name)}"
            for name in several
            if getattr(each, name) is not None
        )
        for each in recipes
    ]


def result_line(folder: Path) -> str:
    """Test accuracies of a finished run."""
    record = read_result(folder)
    micro, k = record["test"]["micro"], record["recipe"]["k"]
    shares = "  ".join(f"top-{n} {100 * micro[str(n)]:.1f} %" for n in dict.fromkeys((1, k)))
    return f"{shares}  {record['seconds']:.0f} s"


class Progress(NamedTuple):
    """What a process tells of the run that it trains."""

    share: float
    """Of the training that is done."""
    results: str
    """Of the last epoch."""


class Ended(NamedTuple):
    """What a process tells of a run at its end."""

    error: str = ""
    """Why it failed, if it did."""


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection


class _Run(NamedTuple):
    folder: Path
    worker: _Worker
    task: TaskID


def _make_bar(console: Console | None) -> Bar:
    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[results]}"),
        console=console or Console(quiet=True),
        disable=console is None or not console.is_terminal,
    )


def _receive(connection: Connection) -> Progress | Ended | None:
    """The next message; None if there will be no more."""
    try:
        return cast("Progress | Ended", connection.recv())
    except (EOFError, ConnectionResetError):
        return None


def _give(worker: _Worker, recipe: Recipe, folder: Path) -> None:
    """Let a process train; if it has just died, the next message says so."""
    with suppress(BrokenPipeError):
        worker.connection.send((recipe, folder))


def _start(threads: int, callbacks: Sequence[Callback]) -> _Worker:
    """Start a process that ignores Ctrl-C until it trains; before, a signal from here ends it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(theirs, threads, callbacks))
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited
    try:
        process.start()
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
    theirs.close()
    return _Worker(process, ours)


def _work(connection: Connection, threads: int, callbacks: Sequence[Callback]) -> None:
    """What a process does: train what it is given, until nobody is there to give more."""
    torch.set_num_threads(threads)
    hide_failed_writes()
    with suppress(EOFError, OSError):
        while True:
            recipe, folder = connection.recv()
            connection.send(_train(connection, recipe, folder, callbacks))


def _train(
    connection: Connection, recipe: Recipe, folder: Path, callbacks: Sequence[Callback]
) -> Ended:
    """Train, and send progress."""
    callbacks = [*deepcopy(callbacks), _SendProgress(connection, recipe.k)]
    try:
        train(recipe, folder, resume=(folder / RECIPE).exists(), callbacks=callbacks)
        (folder / ERROR).unlink(missing_ok=True)  # of an earlier attempt
    except (Interrupted, KeyboardInterrupt):
        sys.exit(STOPPED)
    except Exception as error:
        return Ended((str(error) or type(error).__name__) + _save_traceback(folder))
    return Ended()


def _save_traceback(folder: Path) -> str:
    """Write the traceback of the current error into a folder; return where it is, in brackets."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = traceback.format_exc()
        (folder / ERROR).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:  # the run may have failed for the same reason
        return ""
    return f" (traceback in {folder / ERROR})"


class _SendProgress(Callback):
    """Sends the share of the training that is done, and the results of the last epoch.

    If the process that should receive it is gone, training stops as after Ctrl-C.
    """

    def __init__(self, connection: Connection, k: int) -> None:
        self.connection, self.k = connection, k
        self.sent, self.results = 0.0, ""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if time.monotonic() > self.sent + 1:
            self.sent = time.monotonic()
            try:
                self.connection.send(Progress(trainer.global_step / pl_module.steps, self.results))
            except OSError:
                stop_after_step(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.results = summary(trainer.callback_metrics, self.k)
