"""The gradient of the smooth loss of long lists."""

import triton
import triton.language as tl

from topklass.kernels.long_lists.loss import MORE, Rivals, Tilt, chances, product, rivals, turn


@triton.jit(
    do_not_specialize=("columns", "stride", "k", "outgoing_stride"),
    do_not_specialize_on_alignment=("outgoing",),
)
def long_list_gradient_kernel(
    problem,
    buffer,
    outgoing,
    gradient,
    taus,
    columns,
    stride,
    k,
    outgoing_stride,
    TILE: tl.constexpr,
):
    """Gradient of a row, every ``programs``-th block of columns, scaled by the outgoing gradient.

    With ``A_j = P(N without i = j)``, ``P(N = j) = (1 − p_i) A_j + p_i A_{j−1}`` and

        ∂/∂s_i ∝ p_i (A_{k−1} / P(N = k) − A_{k−2} / P(N = k−1))
               = p_i (1 − p_i) ((A_{k−1} − A_k) / P(N = k) − (A_{k−2} − A_{k−1}) / P(N = k−1)),

    which keeps its digits where p_i is nearly 1.
    """
    NODES: tl.constexpr = TILE.nodes
    BLOCK: tl.constexpr = TILE.block
    rate = 1 / (k * (tl.cast(taus[0], tl.float64) + taus[1]))
    row = tl.program_id(0).to(tl.int64)
    constants = buffer + 1 + row * (2 * NODES + MORE)
    others = constants + 2 * NODES
    tilt, of_label = Tilt(tl.load(others), tl.load(others + 1)), tl.load(others + 2)
    upper, lower = tl.load(others + 3), tl.load(others + 4)
    scale = tl.load(outgoing + row * outgoing_stride).to(tl.float64)
    if TILE.reduction == "mean":
        scale = scale / tl.load(buffer)
    line = problem.scores + row * tl.cast(stride, tl.int64)
    scores = Rivals(line, columns, tl.load(problem.labels + row), rate)
    out = gradient + row * tl.cast(columns, tl.int64)
    for begin in range(tl.program_id(1) * BLOCK, columns, tl.num_programs(1) * BLOCK):
        column = begin + tl.arange(0, BLOCK)
        p, q = chances(rivals(scores, column), tilt, rate)
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, NODES, TILE.rows):
            node = start + tl.arange(0, TILE.rows)
            cosine, sine = turn(node, 1, NODES)
            real, imaginary = tl.load(constants + node), tl.load(constants + NODES + node)
            a, b = product(real, imaginary, upper - lower * cosine, -lower * sine)
            a, b = product(a, b, 1 - cosine, sine)
            c = q[None, :] + p[None, :] * cosine[:, None]
            d = p[None, :] * sine[:, None]
            size = 1 - 2 * (p * q)[None, :] * (1 - cosine)[:, None]
            total += tl.sum((a[:, None] * c + b[:, None] * d) / size, 0)
        of_rivals = tl.where(upper == 0, 0.0, p * q * total / NODES)
        value = tl.where(column == scores.label, of_label, of_rivals)
        value = tl.where(of_label == 0, 0.0, value * scale)
        tl.debug_barrier()  # the gradient may be written over the scores
        tl.store(out + column, value, column < columns)
