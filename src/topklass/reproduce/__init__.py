"""The experiments of both papers, by name; needs ``topklass[train]``."""

from topklass.reproduce.algorithms import Algorithms
from topklass.reproduce.epoch_time import EpochTime
from topklass.reproduce.experiment import (
    PRESETS,
    RECORD,
    Experiment,
    Request,
    load_record,
    save_record,
)
from topklass.reproduce.level_sets import LevelSets
from topklass.reproduce.plan import load_plan
from topklass.reproduce.review import Review
from topklass.reproduce.training import TrainingExperiment

TRAINED = (
    "cifar100-noise",
    "cifar100-temperature",
    "cifar100-epsilon",
    "cifar100-samples",
    "imagenet-subsets",
    "plantnet",
    "longtail",
)
"""Experiments with a file in ``topklass/recipes``."""

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
