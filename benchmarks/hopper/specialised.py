"""Dense prefill in plain Triton whose compiler gives the warps their tasks.

Triton 3.6 alone makes a copying and two multiplying groups of it on Hopper, and only of this form:
q, k and v through descriptors, results stored through pointers, one loop, every block masked.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit(do_not_specialize=["s_q", "s_kv"])
def specialised_kernel(
    q_tiles,
    k_tiles,
    v_tiles,
    o,
    lse,
    scale,
    s_q,
    s_kv,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """o [B, S_q, H, D] and lse [B, H, S_q]; tiles of q, k, v [B, S, H * D] are [1, BLOCK, D]."""
    b = tl.program_id(0) // HEADS
    h = tl.program_id(0) % HEADS
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    last = row + s_kv - s_q  # the last key of each row
    high = s_kv
    if CAUSAL:
        high = tl.minimum(s_kv, first + BLOCK_M + s_kv - s_q)
    queries = q_tiles.load([b, first, h * D]).reshape(BLOCK_M, D)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    at = h // GROUP * D
    for start in tl.range(0, high, BLOCK_N, warp_specialize=True, num_stages=STAGES):
        keys = k_tiles.load([b, start, at]).reshape(BLOCK_N, D)
        scores = tl.dot(queries, keys.T)
        key = start + tl.arange(0, BLOCK_N)[None, :]
        seen = key < s_kv
        if CAUSAL:
            seen = key <= last[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * scale - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        values = v_tiles.load([b, start, at]).reshape(BLOCK_N, D)
        acc = tl.dot(weights.to(queries.dtype), values, acc)
        top = higher
    inverse = tl.where(total > 0.0, 1.0 / total, 0.0)
    live = row < s_q
    out = ((b * s_q + row).to(tl.int64) * HEADS + h) * D
    result = (acc * inverse[:, None]).to(queries.dtype)
    tl.store(o + out[:, None] + tl.arange(0, D)[None, :], result, mask=live[:, None])
    at_lse = tl.program_id(0).to(tl.int64) * s_q + row
    tl.store(lse + at_lse, top * 0.6931471805599453 + tl.log(total), mask=live)


def tiles_of(x, rows):
    """A descriptor of tiles [1, rows, D] of x [B, S, H, D]; what is past S is zero."""
    batch, length, heads, dim = x.shape
    shape, strides = [batch, length, heads * dim], [length * heads * dim, heads * dim, 1]
    return TensorDescriptor(x, shape, strides, [1, rows, dim])


def launch(q, k, v, o, lse, causal, block_m, block_n, stages):
    batch, s_q, heads, dim = q.shape
    specialised_kernel[batch * heads, -(-s_q // block_m)](
        tiles_of(q, block_m),
        tiles_of(k, block_n),
        tiles_of(v, block_n),
        o,
        lse,
        dim**-0.5 * 1.4426950408889634,
        s_q,
        k.shape[1],
        HEADS=heads,
        GROUP=heads // k.shape[2],
        D=dim,
        CAUSAL=causal,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        num_warps=4,
        num_stages=stages,
    )
