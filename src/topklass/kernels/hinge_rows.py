"""The hinge of a row, given its rival: shared by kernels of noised losses."""

import triton
import triton.language as tl


@triton.jit
def hinge_loss(
    line,
    row,
    rival,
    labels,
    margins,
    weights,
    columns,
    margin,
    scale,
    ignore_index,
    HAS_MARGINS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    """``(scale·(margin + rival − label))_+`` of a row with its weight; NaN if the label is none.

    Returns the loss, its weight, its slope (that of the rival, and minus that of the label), the
    label, and whether that is a class.
    """
    label = tl.load(labels + row)
    counted = label != ignore_index
    legal = counted & (label >= 0) & (label < columns)
    of_label = tl.load(line + label, legal, float("nan")).to(tl.float32)
    both_absent = (rival == float("-inf")) & (of_label == float("-inf"))
    gap = tl.where(both_absent, float("inf"), rival - of_label)
    if HAS_MARGINS:
        gap += tl.load(margins + label, legal, 0.0)
    else:
        gap += margin
    if HAS_WEIGHTS:
        weight = tl.load(weights + label, legal, 0.0)
    else:
        weight = 1.0
    weight = tl.where(counted, weight, 0.0)
    hinge = tl.where(gap <= 0, 0.0, scale * gap)  # NaN stays
    loss = tl.where(counted, hinge * weight, 0.0)
    slope = tl.where((gap <= 0) | both_absent, 0.0, scale * weight)
    return loss, weight, slope, label, legal
