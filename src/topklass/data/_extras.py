"""What only the extra ``train`` installs, imported where it is first needed."""

from importlib import import_module
from typing import Any

from topklass._extras import requires


def extra(module: str) -> Any:
    """The module, or an error that says how to install it."""
    with requires("this", module.partition(".")[0], install="topklass[train]"):
        return import_module(module)
