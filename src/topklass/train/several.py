"""Several runs, some at the same time; what is finished stays, what was interrupted goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from topklass._checks import check_count
from topklass.train.engine import RECIPE, RESULT, train
from topklass.train.progress import summary
from topklass.train.recipe import Recipe, load_recipe
from topklass.train.trainer import Interrupted, stop_after_step


class News(NamedTuple):
    """How far a run is."""

    run: str
    done: float
    results: str


def train_all(
    runs: Mapping[Path, Recipe],
    names: Mapping[Path, str] | None = None,
    *,
    at_once: int = 1,
    console: Console | None = None,
    finished: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Train by each recipe, in processes of their own.

    A finished run with this recipe is left as it is, an interrupted one is continued. Ctrl-C stops
    all after their current step, with checkpoints. A run that fails does not end the others, a
    process that is killed does.

    Args:
        runs: recipes by folder.
        names: what each is called where progress is shown, instead of what it differs in.
        at_once: how many runs train at the same time; they share the cores.
        console: where progress is shown; None for silence.
        finished: called with the folder of each run that was trained, when it ends.
    """
    check_count("at_once", at_once)
    left = {folder: recipe for folder, recipe in runs.items() if not is_finished(folder, recipe)}
    if console is not None and len(left) < len(runs):
        console.print(f"{len(runs) - len(left)} of {len(runs)} runs are finished already.")
    if not left:
        return
    spawn = multiprocessing.get_context("spawn")
    queue, stop = spawn.Queue(), spawn.RawValue("b")
    threads = max(1, torch.get_num_threads() // at_once)
    pool = ProcessPoolExecutor(at_once, spawn, _begin, (queue, stop, threads))
    names = names or dict(zip(left, differences(list(left.values())), strict=True))
    try:
        with _ctrl_c_held() as heard:
            futures = {pool.submit(_train, each, folder): folder for folder, each in left.items()}
        if heard:
            raise KeyboardInterrupt
        failed = _follow(futures, names, queue, console, finished)
    except KeyboardInterrupt:
        raise Interrupted("stopped; the same command goes on from there") from None
    finally:
        stop.value = True  # whatever went wrong here, nothing trains on
        with _ctrl_c_held():  # left in the middle, the pool would never end
            pool.shutdown(wait=True, cancel_futures=True)
    if any(isinstance(error, Interrupted) for error in failed.values()):
        raise Interrupted("stopped; the same command goes on from there")
    raise_failed(failed, len(runs))


def raise_failed(failed: Mapping[Path, BaseException], runs: int) -> None:
    """Say which of so many runs failed, and why, if any did."""
    if any(isinstance(error, BrokenProcessPool) for error in failed.values()):
        raise ChildProcessError(
            f"a process that trained was killed, perhaps for want of memory, which ended the "
            f"others: {len(failed)} of {runs} runs are left; the same command goes on from there"
        )
    if failed:
        said = "; ".join(
            f"{folder}: {str(error) or type(error).__name__}" for folder, error in failed.items()
        )
        raise ChildProcessError(f"{len(failed)} of {runs} runs failed: {said}")


def is_finished(folder: Path, recipe: Recipe) -> bool:
    """Whether a folder has the result of a recipe; of another one is an error."""
    if not (folder / RECIPE).exists():
        return False
    found = load_recipe(folder / RECIPE)
    if found != recipe:
        there, asked = differences([found, recipe])
        raise FileExistsError(
            f"{folder} has a run of another recipe, {there} instead of {asked}: move it away, or "
            "choose another folder"
        )
    return (folder / RESULT).exists()


def differences(recipes: list[Recipe]) -> list[str]:
    """What tells recipes apart: the settings in which they differ.

    Example:
        >>> differences([Recipe(seed=0), Recipe(seed=1), Recipe(seed=1, loss="noised")])
        ['smooth, seed 0', 'smooth, seed 1', 'noised, seed 1']
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


class _Tell(Callback):
    """Puts news of a run into the queue, a few hundred times."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.k = str(folder), recipe.k
        self.said, self.results = 0.0, ""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        done = trainer.global_step / pl_module.steps
        if done >= self.said + 1 / 300:
            self.said = done
            _queue.put(News(self.folder, done, self.results))
        if _stop.value:
            stop_after_step(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.results = summary(trainer.callback_metrics, self.k)


_queue: Any = None
"""Of a process that trains: where it says how far it is."""
_stop: Any = None
"""Of all processes: whether to stop after the current step, and begin nothing else. It has no lock,
which a signal handler would wait for, or a killed process keep."""
_idle = threading.Event()
"""Of a process that trains: between runs."""
_idle.set()


@contextmanager
def _ctrl_c_held() -> Iterator[list[int]]:
    """Hold Ctrl-C back, here and in processes that start here until they want it.

    Yields a list that is not empty in the end if it came.
    """
    heard: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number)) if main else None
    masks = hasattr(signal, "pthread_sigmask")  # not on Windows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if masks else ()
    try:
        yield heard
    finally:
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)


def _begin(queue: Any, stop: Any, threads: int) -> None:
    global _queue, _stop
    _queue, _stop = queue, stop
    queue.cancel_join_thread()  # what nobody reads is not worth waiting for
    signal.signal(signal.SIGINT, _ask)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(threads)
    threading.Thread(target=_stop_with_parent, daemon=True).start()


def _ask(number: int, frame: Any) -> None:
    """On Ctrl-C: begin nothing else, and leave what is begun; training steps have their own way."""
    _stop.value = True
    if not _idle.is_set():
        raise KeyboardInterrupt


def _stop_with_parent() -> None:
    """Stop as by Ctrl-C when the process that began this one is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _stop.value = True
    _idle.wait()
    os._exit(1)  # nobody is left to hand out another run, nor to read what is in the queue


def _train(recipe: Recipe, folder: Path) -> None:
    try:
        _idle.clear()
        if _stop.value:  # the pool hands out a run more than it trains, and cannot take it back
            raise Interrupted("not begun")
        resume = (folder / RECIPE).exists()
        train(recipe, folder, resume=resume, callbacks=[_Tell(folder, recipe)])
    except (Interrupted, KeyboardInterrupt) as stopped:
        _stop.value = True
        raise Interrupted("stopped") from stopped
    finally:
        _idle.set()


def _follow(
    futures: dict[Future[None], Path],
    names: Mapping[Path, str],
    queue: Any,
    console: Console | None,
    finished: Callable[[Path], object],
) -> dict[Path, BaseException]:
    """Show how far runs are until all have ended; return what went wrong."""
    failed: dict[Path, BaseException] = {}
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[results]}"),
        console=console,
        disable=console is None or not console.is_terminal,
    )
    tasks = {
        str(folder): bar.add_task(name, total=1.0, start=False, visible=False, results="")
        for folder, name in names.items()
    }
    pending = set(futures)
    with bar:
        while pending:
            ended, pending = wait(pending, timeout=0.3, return_when=FIRST_COMPLETED)
            for run, done, results in _news(queue):
                bar.start_task(tasks[run])
                bar.update(tasks[run], completed=done, results=results, visible=True)
            for future in ended:
                folder = futures[future]
                if (error := future.exception()) is not None:
                    failed[folder] = error
                    continue
                finished(folder)
                if console is not None:
                    bar.update(tasks[str(folder)], visible=False)
                    rest = len(pending)
                    said = f"{names[folder]}: {result_line(folder)}  ({rest} to go)"
                    console.print(said, soft_wrap=True)
    return failed


def _news(queue: Any) -> list[News]:
    news = []
    while True:
        try:
            news.append(queue.get_nowait())
        except Empty:
            return news


def result_line(folder: Path) -> str:
    """Test accuracies of a finished run."""
    record = json.loads((folder / RESULT).read_text())
    micro, k = record["test"]["micro"], record["recipe"]["k"]
    shown = "  ".join(f"top-{n} {100 * micro[str(n)]:.1f} %" for n in dict.fromkeys((1, k)))
    return f"{shown}  {record['seconds']:.0f} s"
