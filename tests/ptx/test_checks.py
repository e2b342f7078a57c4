"""The emulator computes what kernels say, and finds what is wrong with them."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from .conversions import conversion, from_bfloat16
from .floats import floating, larger, smaller
from .integers import integer, with_carry
from .launch import Emulator, Settings, emulated
from .memory import InvalidAccess
from .races import Race

pytestmark = pytest.mark.slow
N = tl.constexpr(64)


@pytest.fixture(params=[False, True], ids=["in step", "apart"])
def emulator(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    with emulated(Settings(warps_apart=request.param)) as result:
        yield result


@triton.jit
def copy_kernel(x, y, n):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, tl.load(x + i), i < n)


@triton.jit
def reversed_kernel(x, room, y, WAITS: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(room + i, tl.load(x + i))
    if WAITS:
        tl.debug_barrier()
    tl.store(y + i, tl.load(room + N - 1 - i))


@triton.jit
def total_kernel(x, parts, counter, y, WAITS: tl.constexpr):
    """The last program adds up what all programs leave."""
    i, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(parts + i, tl.sum(tl.load(x + i * N + tl.arange(0, N)), 0))
    last = i == programs - 1
    if WAITS:
        last = tl.atomic_add(counter, 1) == programs - 1
    if last:
        every = tl.arange(0, N)
        tl.store(y, tl.sum(tl.load(parts + every, every < programs, 0.0), 0))


@triton.jit
def functions_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(y + i, tl.exp(v))
    tl.store(y + BLOCK + i, tl.log(tl.abs(v)))
    tl.store(y + 2 * BLOCK + i, tl.sqrt(v))
    tl.store(y + 3 * BLOCK + i, 1.0 / v)
    tl.store(y + 4 * BLOCK + i, tl.sort(v))
    tl.store(y + 5 * BLOCK + i, tl.cumsum(v, 0))
    tl.store(y + 6 * BLOCK + i, tl.exp(v.to(tl.float64)).to(tl.float32))
    tl.store(y + 7 * BLOCK + i, tl.cos(v.to(tl.float64)).to(tl.float32))
    tl.store(y + 8 * BLOCK + i, v.to(tl.bfloat16).to(tl.float32))
    tl.store(y + 9 * BLOCK + i, v.to(tl.float16).to(tl.float32))
    tl.store(y + 10 * BLOCK + i, v.to(tl.int32).to(tl.float32))


def test_loads_outside_of_a_tensor(emulator):
    x, y = torch.randn(100), torch.empty(100)
    copy_kernel[(1,)](x, y, 64, num_warps=2)
    assert torch.equal(x[:64], y[:64])
    with pytest.raises(InvalidAccess, match=r"lies in none of torch.float32 \(100,\)"):
        copy_kernel[(2,)](x, y, 100, num_warps=2)


def test_threads_that_do_not_wait(emulator):
    x, room, y = torch.randn(64), torch.empty(64), torch.empty(64)
    reversed_kernel[(1,)](x, room, y, True, num_warps=2)
    assert torch.equal(y, x.flip(0))
    with pytest.raises(Race, match=r"written|read"):
        reversed_kernel[(1,)](x, torch.empty(64), y, False, num_warps=2)


def test_programs_that_do_not_wait(emulator):
    x, parts, y = torch.randn(5 * 64), torch.empty(5), torch.empty(1)
    counter = torch.zeros(1, dtype=torch.int32)
    total_kernel[(5,)](x, parts, counter, y, True, num_warps=2)
    torch.testing.assert_close(y[0], x.sum())
    with pytest.raises(Race, match=r"of program \d+ has written"):
        total_kernel[(5,)](x, torch.empty(5), counter, y, False, num_warps=2)


def test_programs_that_write_to_one_place(emulator):
    x, y = torch.randn(128), torch.empty(64)
    with pytest.raises((Race, InvalidAccess)):
        copy_kernel[(2,)](x, y.expand(2, 64), 128, num_warps=2)


@pytest.mark.parametrize("warps", [1, 4])
def test_functions(emulator, warps):
    hard = [0.0, -0.0, 1.0, -1.0, 88.0, -87.0, 1e-30, 3e38, 2.5, 1.0000001, -2.5, 1e5, 0.5, 7.0]
    x = torch.cat([torch.tensor(hard), 5 * torch.randn(128 - len(hard))])
    y = torch.empty(11, 128)
    functions_kernel[(1,)](x, y, 128, num_warps=warps)
    wide = x.double()
    single = [wide.exp(), wide.abs().log(), wide.sqrt(), 1 / wide]
    for found, value in zip(y, single, strict=False):
        normal = value.abs() > 2e-38  # tl.exp flushes what is smaller
        close = value.float()[normal]
        torch.testing.assert_close(found[normal], close, rtol=4e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(y[4], x.sort().values)
    torch.testing.assert_close(y[5], wide.cumsum(0).float(), rtol=1e-5, atol=1e33)
    assert torch.equal(y[6], wide.exp().float())
    torch.testing.assert_close(y[7], wide.cos().float(), rtol=1e-7, atol=1e-7)
    assert torch.equal(y[8], x.bfloat16().float())
    assert torch.equal(y[9], x.half().float())
    inside = x.abs() < 2**31
    assert torch.equal(y[10][inside], x[inside].int().float())
    assert y[10][x == 3e38] == 2.0**31


def test_minimum_and_maximum():
    nan, numbers = np.float32(math.nan), np.array([1, -0.0, 0.0, math.nan], np.float32)
    others = np.array([math.nan, 0.0, -0.0, math.nan], np.float32)
    np.testing.assert_array_equal(smaller(numbers, others), np.array([1, -0.0, -0.0, nan]))
    assert np.signbit(smaller(numbers, others)).tolist()[1:3] == [True, True]
    assert np.signbit(larger(numbers, others)).tolist()[1:3] == [False, False]
    propagated = floating(("max", "NaN", "f32"))(numbers, others)
    assert np.isnan(propagated).tolist() == [True, False, False, True]


def test_float64_to_bfloat16():
    """Rounded once: through float32, the first would be a tie, and rounded to 1."""
    x = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8, -1 - 3 * 2**-8 + 2**-40, 1e300, math.nan])
    with np.errstate(over="ignore"):
        found = from_bfloat16(conversion(("rn", "bf16", "f64"))(x))
    expected = np.array([1 + 2**-7, 1, -1 - 2**-7, math.inf, math.nan], np.float32)
    np.testing.assert_array_equal(found, expected)


def test_integers():
    a, b = np.array([2**32 - 1, 5], np.uint32), np.array([2**32 - 1, 7], np.uint32)
    assert integer(("mul", "hi", "u32"))(a, b).tolist() == [2**32 - 2, 0]
    assert integer(("mul", "hi", "s32"))(a.view(np.int32), b.view(np.int32)).tolist() == [0, 0]
    assert integer(("mul", "wide", "u32"))(a, b).tolist() == [(2**32 - 1) ** 2, 35]
    counts = np.array([33, 1], np.uint32)
    assert integer(("shl", "b32"))(a, counts).tolist() == [0, 10]
    assert integer(("shr", "s32"))(a.view(np.int32), counts).tolist() == [-1, 2]
    start, length = np.array([4, 0], np.uint32), np.array([8, 3], np.uint32)
    assert integer(("bfe", "u32"))(a, start, length).tolist() == [255, 5]
    assert integer(("bfe", "s32"))(a.view(np.int32), start, length).tolist() == [-1, -3]
    selector = np.array([0x7701, 0x0123], np.uint32)
    some = np.array([0x44332211, 0x44332211], np.uint32)
    found = integer(("prmt", "b32"))(some, 0 * some, selector)
    assert [hex(x) for x in found] == ["0x1122", "0x11223344"]
    table = np.array([0x96, 0xE8], np.uint32)
    x, y, z = (np.array([v, v], np.uint32) for v in (0b0011, 0b0101, 0b1111))
    assert integer(("lop3", "b32"))(x, y, z, table).tolist() == [0b1001, 0b0111]
    total, carry = with_carry(("add", "cc", "u32"))(a, b, np.zeros(2, bool))
    assert (total.tolist(), carry.tolist()) == ([2**32 - 2, 12], [True, False])
    rest, borrow = with_carry(("sub", "cc", "u32"))(b, a, np.zeros(2, bool))
    assert (rest.tolist(), borrow.tolist()) == ([0, 2], [False, False])
