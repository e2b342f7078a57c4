"""What goes to the terminal: names of files and classes cannot control it."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, those that turn the direction of text around, and halves
of characters."""


def printable(text: str) -> str:
    r"""Text in which each control character is a question mark.

    Example:
        >>> printable("\x1b[31mred\x07 \u202etxt.exe")
        '?[31mred? ?txt.exe'
    """
    return CONTROLS.sub("?", text)


def hide_failed_writes() -> None:
    """End threads that cannot write without a traceback: the main thread raises their error.

    The threads of ``multiprocessing`` that give files to other processes call ``sys.excepthook``.
    """
    shown = sys.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if not isinstance(failure.exc_value, OSError):
            threading.__excepthook__(failure)

    def hook_of_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main or not isinstance(error, OSError):
            shown(kind, error, trace)

    threading.excepthook, sys.excepthook = hook, hook_of_all


class SafeConsole(Console):
    """A console whose own control sequences are the only ones that reach the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Text of a string, before its width is measured."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        """The pieces of text that are written; everything printed passes through here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
