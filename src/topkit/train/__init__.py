"""Training by recipes; needs ``topkit[train]``."""

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
