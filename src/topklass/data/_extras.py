"""What only the extra ``train`` installs, imported where it is first needed."""

from importlib import import_module
from typing import Any


def extra(module: str) -> Any:
    """The module, or an error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = "Pillow" if module.startswith("PIL") else module.partition(".")[0]
        raise ImportError(
            f"this needs {package}, which is not installed: pip install 'topklass[train]'"
        ) from error
