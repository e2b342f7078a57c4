"""Training by recipes; needs ``topklass[train]``.

What is not used is not imported: Lightning alone takes longer than all of topklass.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topklass.train.comparison import Comparison, compare
    from topklass.train.criterion import LOSSES, build_loss, gradient_scale
    from topklass.train.engine import train
    from topklass.train.evaluation import Run, evaluate, load_run
    from topklass.train.find import find_parameter
    from topklass.train.prediction import Guesses, predict
    from topklass.train.problem import prepare_data
    from topklass.train.recipe import Recipe, load_recipe
    from topklass.train.several import train_all
    from topklass.train.trainer import Interrupted

MODULE_OF = {
    "LOSSES": "criterion",
    "Comparison": "comparison",
    "Guesses": "prediction",
    "Interrupted": "trainer",
    "Recipe": "recipe",
    "Run": "evaluation",
    "build_loss": "criterion",
    "compare": "comparison",
    "evaluate": "evaluation",
    "find_parameter": "find",
    "gradient_scale": "criterion",
    "load_recipe": "recipe",
    "load_run": "evaluation",
    "predict": "prediction",
    "prepare_data": "problem",
    "train": "engine",
    "train_all": "several",
}
__all__ = [
    "LOSSES",
    "Comparison",
    "Guesses",
    "Interrupted",
    "Recipe",
    "Run",
    "build_loss",
    "compare",
    "evaluate",
    "find_parameter",
    "gradient_scale",
    "load_recipe",
    "load_run",
    "predict",
    "prepare_data",
    "train",
    "train_all",
]


def __getattr__(name: str) -> object:
    if name in MODULE_OF:
        return getattr(import_module(f"{__name__}.{MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *MODULE_OF]
