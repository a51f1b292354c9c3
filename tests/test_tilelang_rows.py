"""How the Hopper kernel stores o from registers, on warps of the host."""

import ctypes
import itertools

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("tilelang")

from tests.host_warp import compiled

SHIM = r"""
#include "warp.h"
#include "rows.h"

// x [32, D / 2]: what the lanes of warp 0 of group `wg` hold.
template <int D, int PER, int P>
static bool write(const float *x, void *o, int wg, int row, int live, int head, int heads) {
  return run_warp([=] {
    const float *own = x + threadIdx.x * (D / 2);
    attn::write_rows<D, PER, P, false>(own, o, wg, row, live, head, heads);
  });
}

#define WRITE(NAME, ...)                                                                        \
  extern "C" bool NAME(const float *x, void *o, int wg, int row, int live, int head,            \
                       int heads) {                                                             \
    return write<__VA_ARGS__>(x, o, wg, row, live, head, heads);                                \
  }
"""
SHAPES = [(256, 128, 1), (256, 64, 2), (256, 16, 8), (64, 192, 1)]  # D, tokens and heads of a tile
ROWS = 16  # of a warp


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    text = SHIM + "".join(f"WRITE(write_{d}_{n}_{p}, {d}, {n}, {p})\n" for d, n, p in SHAPES)
    return compiled(text, tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("dim, tokens, packed", SHAPES)
def test_rows_from_registers(dim, tokens, packed, device):
    """Each live row is where its token and head are, whole; nothing else is written."""
    heads, length = 2 * packed, tokens + 40
    tile = np.random.default_rng(0).standard_normal((ROWS, dim), np.float32)
    held = np.zeros((32, dim // 8, 2, 2), np.float32)  # chunks of 8 columns, rows, columns
    for lane, chunk, half in itertools.product(range(32), range(dim // 8), range(2)):
        at = 8 * chunk + 2 * (lane % 4)
        held[lane, chunk, half] = tile[lane // 4 + 8 * half, at : at + 2]
    for group, row, live, head in itertools.product((0, 1), (0, 7), (1, 9, tokens), (0, 1)):
        o = np.zeros((length, heads, dim), np.float16)
        expected = o.copy()
        for r in range(ROWS):
            token, g = (64 * group + r) % tokens, (64 * group + r) // tokens
            if token < live:
                expected[row + token, head * packed + g] = tile[r]
        pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (held, o)]
        run = getattr(device, f"write_{dim}_{tokens}_{packed}")
        run.restype = ctypes.c_bool
        assert run(*pointers, group, row, live, head, heads)
        assert np.array_equal(o, expected)
