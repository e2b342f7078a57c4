"""Training by recipes; needs ``topkit[train]``.

What is not used is not imported: Lightning alone takes longer than all of topkit.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topkit.train.comparison import Comparison, compare
    from topkit.train.criterion import LOSSES, build_loss, gradient_scale
    from topkit.train.engine import train
    from topkit.train.evaluation import Run, evaluate, load_run
    from topkit.train.find import find_parameter
    from topkit.train.prediction import Guesses, predict
    from topkit.train.problem import prepare_data
    from topkit.train.recipe import Recipe, load_recipe
    from topkit.train.several import train_all
    from topkit.train.trainer import Interrupted

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
