"""Sets of labels: always k, k on average, or as many as a coverage takes.

Each is a module: ``calibrate`` finds its threshold on held-out logits, a call maps logits to a mask
of their shape, and the state dict keeps the threshold. Classes are in the last dimension, or in
``dim``. Probabilities are the softmax of the logits. Pass other probabilities as logarithms:
``probabilities.log()``, for example of a softmax averaged over crops, or of marginals, which the
softmax divides by k. A logit of −inf marks an absent class, which is in no set.
"""

from topklass.sets.conformal import ConformalSets
from topklass.sets.plain import AverageKSets, TopKSets

__all__ = ["AverageKSets", "ConformalSets", "TopKSets"]
