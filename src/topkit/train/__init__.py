"""Training by recipes; needs ``topkit[train]``."""

from topkit.train.criterion import LOSSES, build_loss, gradient_scale
from topkit.train.engine import train
from topkit.train.evaluation import Run, evaluate, load_run
from topkit.train.problem import prepare_data
from topkit.train.recipe import Recipe, load_recipe
from topkit.train.trainer import Interrupted

__all__ = [
    "LOSSES",
    "Interrupted",
    "Recipe",
    "Run",
    "build_loss",
    "evaluate",
    "gradient_scale",
    "load_recipe",
    "load_run",
    "prepare_data",
    "train",
]
