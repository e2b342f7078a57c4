"""The hinge of a row, given its rival: shared by the noised loss, sampled and exact."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Hinge(NamedTuple):
    """The parameters of the hinge, in float32, inside a kernel."""

    margin: Any
    scale: Any
    ignore_index: Any


@triton.jit
def hinge_loss(problem, line, row, columns, rival, hinge):
    """``(scale·(margin + rival − label))_+`` of a row with its weight; NaN if the label is none.

    Returns the loss, its weight, its slope (that of the rival, and minus that of the label; NaN if
    the loss is), the label, and whether that is a class.
    """
    label = tl.load(problem.labels + row)
    counted = label != hinge.ignore_index
    legal = counted & (label >= 0) & (label < columns)
    of_label = tl.load(line + label, legal, float("nan")).to(tl.float32)
    both_absent = (rival == float("-inf")) & (of_label == float("-inf"))
    gap = tl.where(both_absent, float("inf"), rival - of_label)
    if problem.margins is not None:
        gap += tl.load(problem.margins + label, legal, 0.0)
    else:
        gap += hinge.margin
    if problem.weights is not None:
        weight = tl.load(problem.weights + label, legal, 0.0)
    else:
        weight = 1.0
    weight = tl.where(counted, weight, 0.0)
    value = tl.where(gap <= 0, 0.0, hinge.scale * gap)  # NaN stays
    loss = tl.where(counted, value * weight, 0.0)
    slope = tl.where((gap <= 0) | both_absent, 0.0, hinge.scale * weight)
    slope = tl.where(counted & (gap != gap), float("nan"), slope)
    return loss, weight, slope, label, legal
