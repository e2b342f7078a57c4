"""Training by recipes; needs ``topklass[train]``.

Modules are imported on first use: Lightning alone takes longer than all of topklass.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topklass.train.comparison import Comparison as Comparison
    from topklass.train.comparison import compare as compare
    from topklass.train.criterion import (
        LOSSES as LOSSES,
    )
    from topklass.train.criterion import (
        build_loss as build_loss,
    )
    from topklass.train.engine import train as train
    from topklass.train.evaluation import Run as Run
    from topklass.train.evaluation import evaluate as evaluate
    from topklass.train.evaluation import load_run as load_run
    from topklass.train.find import find_parameter as find_parameter
    from topklass.train.prediction import Guesses as Guesses
    from topklass.train.prediction import predict as predict
    from topklass.train.problem import prepare_data as prepare_data
    from topklass.train.recipe import Recipe as Recipe
    from topklass.train.recipe import load_recipe as load_recipe
    from topklass.train.sets import compare_sets as compare_sets
    from topklass.train.several import train_all as train_all
    from topklass.train.trainer import Interrupted as Interrupted

MODULE_OF = {
    "LOSSES": "criterion",
    "Comparison": "comparison",
    "Guesses": "prediction",
    "Interrupted": "trainer",
    "Recipe": "recipe",
    "Run": "evaluation",
    "build_loss": "criterion",
    "compare": "comparison",
    "compare_sets": "sets",
    "evaluate": "evaluation",
    "find_parameter": "find",
    "load_recipe": "recipe",
    "load_run": "evaluation",
    "predict": "prediction",
    "prepare_data": "problem",
    "train": "engine",
    "train_all": "several",
}
__all__ = list(MODULE_OF)


def __getattr__(name: str) -> object:
    if name in MODULE_OF:
        return getattr(import_module(f"{__name__}.{MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *MODULE_OF]
