"""The kernel: it alone knows the factor, which lies on the device."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("size",), do_not_specialize_on_alignment=("factor",))
def scale_kernel(values, factor, size, BLOCK: tl.constexpr):
    """Multiply values by the factor, unless that is 1; a NaN is not 1."""
    number = tl.load(factor).to(tl.float32)
    if number != 1:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for begin in range(first, size, tl.num_programs(0) * BLOCK):
            at = begin + tl.arange(0, BLOCK)
            value = tl.load(values + at, at < size, 0.0).to(tl.float32)
            tl.store(values + at, value * number, at < size)
