"""Storing new rows in a key/value pool: bit copies, or e4m3 codes of rows over a scale."""

import triton
import triton.language as tl

from tileops.kernels.common.device import e4m3_store

# Between these scales no intermediate of `quotient` that matters leaves float32's normal range.
LEAST_SCALE = tl.constexpr(2.0**-64)
MOST_SCALE = tl.constexpr(2.0**64)


@triton.jit
def quotient(x, scale):
    """x / scale as e4m3 needs it: the correctly rounded float32 quotient from 2 ** -11 on.

    x: float32 of 16-bit values; scale: a float32 scalar between LEAST_SCALE and MOST_SCALE.
    Markstein's division: with the correctly rounded reciprocal, the first correction leaves an
    estimate within one unit in the last place, which makes the second exact. A zero, NaN, and
    what overflows or underflows stay what the first product is: e4m3 makes the same of them as
    of the exact quotient. A division of its own per element would cost more than moving it.
    """
    reciprocal = tl.math.div_rn(1.0, scale)
    negative = -scale
    first = x * reciprocal
    second = tl.fma(tl.fma(first, negative, x), reciprocal, first)
    left = tl.fma(second, negative, x)
    return tl.where(tl.abs(left) < tl.abs(x), tl.fma(left, reciprocal, second), first)


@triton.jit
def append_rows(pool, at, rows, scale, mask, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Store a block of 16-bit values in a pool.

    pool: pointer to the pool, of the rows' dtype or e4m3 (to its bytes if not NATIVE).
    at: int64 element offsets into it; mask: what to store, both like rows.
    rows: not E4M3: values of any 16-bit type, whose bits are stored. E4M3: float16 or bfloat16,
        stored as e4m3(rows / scale), a true division; `scale` is a float32 scalar.
    """
    if not E4M3:
        bits = pool.to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(bits + at, rows.to(tl.int16, bitcast=True), mask=mask)
    elif NATIVE:
        x = rows.to(tl.float32)
        if (scale >= LEAST_SCALE) & (scale <= MOST_SCALE):
            y = quotient(x, scale)
        else:
            y = tl.math.div_rn(x, scale)
        # The cast saturates and keeps NaN: cvt.rn.satfinite.
        tl.store(pool + at, y.to(tl.float8e4nv), mask=mask)
    else:
        e4m3_store(pool + at, tl.math.div_rn(rows.to(tl.float32), scale), mask)
