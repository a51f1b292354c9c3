"""Device code that kernels share: dots, softmax steps, visibility, rotation, e4m3.

A kernel imports these by name (Inductor re-emits what a kernel names, and only that). 16-bit
values are widened before any arithmetic: the interpreter has no 16-bit arithmetic of its own.
"""

import triton
import triton.language as tl

# The interpreter has no bf16 or fp8 dot; it gets float32 operands, which is exact.
F32_DOT = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def float32(x):
    """A Python float argument as float32: it arrives as fp64 from Inductor."""
    return tl.full([], x, tl.float32)


@triton.jit
def int64(x):
    """An integer argument as int64: where it is 1 Inductor makes it a constant without `.to`."""
    return tl.full([], x, tl.int64)


@triton.jit
def integer(x):
    """An integer argument as int32, as int64 where it came so: see `int64`."""
    return tl.full([], 0, tl.int32) + x


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32; acc None starts at zero."""
    if F32_DOT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x):
    """tanh of a float32 tensor from exp2, absolute error 6e-8; saturates without NaN."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def visible(position, key, kv_len, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Which keys a position sees, the arguments broadcast.

    LEFT, RIGHT: the window, -1 is unlimited; a causal mask is a right window of 0.
    """
    seen = key < kv_len
    if LEFT >= 0:
        seen = seen & (key >= position - LEFT)
    if RIGHT >= 0:
        seen = seen & (key <= position + RIGHT)
    return seen


@triton.jit
def softmax_step(scores, top, total, scale, MASKED: tl.constexpr):
    """One block of an online softmax in base 2.

    scores [M, N] float32, -inf where unseen; scale > 0 takes them to base-2 logits.
    top, total [M]: the largest logit so far and the sum of 2 ** (logit - top).
    MASKED: rows may not have seen a key yet.
    Returns weights [M, N], the factor [M] of what was accumulated before, and the new top, total.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    anchor = new_top
    if MASKED:
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - anchor[:, None])
    fade = tl.exp2(top - anchor)
    return weights, fade, new_top, total * fade + tl.sum(weights, 1)


@triton.jit
def e4m3_value(byte):
    """The float32 value of a float8_e4m3fn byte."""
    bits = byte.to(tl.int16)
    # The exponent of e4m3 in the exponent of float16: 8 too small, subnormals included.
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def e4m3_load(pointer, mask, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Load float8_e4m3fn values as `dtype` (float16, bfloat16 or float32), exactly; 0 if masked.

    pointer: to float8_e4m3fn with NATIVE, else to its bytes.
    """
    if NATIVE:
        codes = tl.load(pointer, mask=mask, other=0.0)
        if dtype == tl.bfloat16:
            # float16, which is a step on the way, would become bfloat16 one by one in a unit of
            # few lanes; by way of float32 the common ones do it, two at a time.
            values = codes.to(tl.float16).to(tl.float32).to(dtype)
        else:
            values = codes.to(dtype)
        return values
    byte = tl.load(pointer.to(tl.pointer_type(tl.uint8), bitcast=True), mask=mask, other=0)
    return e4m3_value(byte).to(dtype)


@triton.jit
def e4m3_bits(x):
    """float32 to the byte of its float8_e4m3fn: ties to even, saturating, NaN kept."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    # Normal: round the mantissa to 3 bits, exponent bias 127 to 7.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal: multiples of 2 ** -9, which are the last bits of a sum with 2 ** 14.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, subnormal, normal)
    code = tl.where(x != x, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def e4m3_store(pointer, x, mask):
    """Store float32 x as float8_e4m3fn through a pointer to it or to its bytes."""
    tl.store(pointer.to(tl.pointer_type(tl.uint8), bitcast=True), e4m3_bits(x), mask=mask)


@triton.jit
def search(
    offsets,
    count,
    numerator,
    unit,
    at,
    PER_REQUEST: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The last b in [0, count) with offsets[b] * numerator // unit + b * PER_REQUEST <= at.

    count >= 1. Every step looks at WAYS places at once.
    """
    low = tl.full([], 0, tl.int32)
    count = low + count
    while count > 1:
        step = (count + WAYS - 1) // WAYS
        lane = tl.arange(0, WAYS) * step
        inside = lane < count
        start = tl.load(offsets + low + lane, mask=inside, other=0).to(tl.int64)
        base = start * numerator // unit + (low + lane) * PER_REQUEST
        taken = tl.maximum(tl.sum((inside & (base <= at)).to(tl.int32), 0) - 1, 0)
        low += taken * step
        count = tl.minimum(step, count - taken * step)
    return low


@triton.jit
def find_request(offsets, count, numerator, unit, at, WAYS: tl.constexpr):
    """The request of tile `at` in a packed batch, of `count` requests.

    With tiles of `unit` rows, `numerator` rows a token, request b may use the tile ids from
    offsets[b] * numerator // unit + b on: they are enough for its rows and end before those of
    the next request.
    """
    return search(offsets, count, numerator, unit, at, 1, WAYS)


@triton.jit
def last_not_after(offsets, count, at, WAYS: tl.constexpr):
    """The last index i < count with offsets[i] <= at: the request of token `at`."""
    return search(offsets, count, 1, 1, at, 0, WAYS)
