"""All experiments by name."""

from experiments.epoch_time import EpochTime
from experiments.experiment import Experiment
from experiments.level_sets import LevelSets
from experiments.plan import load_plan
from experiments.review import Review
from experiments.text_training import TextExperiment
from experiments.training import TrainingExperiment

BY_RECIPE = (
    "cifar100-noise",
    "cifar100-temperature",
    "cifar100-epsilon",
    "cifar100-samples",
    "imagenet-subsets",
    "plantnet",
    "longtail",
    "longtail-characters",
    "loss-search",
    "learning-rates",
    "small-epsilon",
    "small-network",
    "which-loss",
)
"""Experiments that are a file in ``experiments/recipes`` and nothing else."""
ON_TEXTS = ("which-loss-text", "which-loss-banking", "loss-search-text")

EXPERIMENTS: dict[str, Experiment] = {
    **{name: TrainingExperiment(load_plan(name)) for name in BY_RECIPE},
    **{name: TextExperiment(load_plan(name)) for name in ON_TEXTS},
    **{each.name: each for each in (LevelSets(), EpochTime(), Review(load_plan("review")))},
}
