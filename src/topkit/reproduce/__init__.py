"""The experiments of both papers, by name; needs ``topkit[train]``."""

from topkit.reproduce.algorithms import Algorithms
from topkit.reproduce.epoch_time import EpochTime
from topkit.reproduce.experiment import (
    PRESETS,
    RECORD,
    Experiment,
    Request,
    load_record,
    save_record,
)
from topkit.reproduce.level_sets import LevelSets
from topkit.reproduce.plan import load_plan
from topkit.reproduce.review import Review
from topkit.reproduce.training import TrainingExperiment

TRAINED = (
    "cifar100-noise",
    "cifar100-temperature",
    "cifar100-epsilon",
    "cifar100-samples",
    "imagenet-subsets",
    "plantnet",
    "longtail",
)
"""Experiments with a file in ``topkit/recipes``."""

EXPERIMENTS: dict[str, Experiment] = {name: TrainingExperiment(load_plan(name)) for name in TRAINED}
"""By name."""
OTHERS = (LevelSets(), EpochTime(), Algorithms(), Review(load_plan("review")))
EXPERIMENTS |= {each.name: each for each in OTHERS}

__all__ = [
    "EXPERIMENTS",
    "PRESETS",
    "RECORD",
    "Experiment",
    "Request",
    "load_record",
    "save_record",
]
