"""Packages that only an extra installs."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class MissingPackageError(ModuleNotFoundError):
    """A package is not installed; the message says how to install it."""


@contextmanager
def requires(user: str, *packages: str, install: str) -> Iterator[None]:
    """Import optional packages in this block: if one is missing, the error says what to install.

    Every other error is left as it is, also that of a package which is installed but broken.

    Args:
        user: what needs the packages.
        *packages: their names, as they are imported.
        install: what pip should install.

    Example:
        >>> with requires("this", "nowhere", install="topklass[train]"):
        ...     import nowhere
        Traceback (most recent call last):
            ...
        topklass._extras.MissingPackageError: this needs nowhere: pip install 'topklass[train]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise
        message = f"{user} needs {error.name}: pip install '{install}'"
        raise MissingPackageError(message, name=error.name) from error


def extra(module: str) -> Any:
    """A module that the extra ``train`` installs, imported where it is first needed."""
    with requires("this", module.partition(".")[0], install="topklass[train]"):
        return import_module(module)
