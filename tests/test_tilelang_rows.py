"""How the Hopper kernel stores o from registers, on warps of the host."""

import ctypes
import itertools

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("tilelang")

from tests.host_warp import compiled, fragment, pointer

SHIM = r"""
#include "warp.h"
#include "rows.h"

// x [32, D / 2]: what the lanes of warp 0 of group `wg` hold.
template <int D, int PER, int P, int WIDTH>
static bool write(const float *x, void *o, int wg, int row, int live, int head, int heads) {
  return run_warp([=] {
    const float *own = x + threadIdx.x * (D / 2);
    attn::write_rows<D, PER, P, false, WIDTH>(own, o, wg, row, live, head, heads);
  });
}

#define WRITE(NAME, ...)                                                                        \
  extern "C" bool NAME(const float *x, void *o, int wg, int row, int live, int head,            \
                       int heads) {                                                             \
    return write<__VA_ARGS__>(x, o, wg, row, live, head, heads);                                \
  }
"""
# D, tokens and heads of a tile, columns of a row of o.
SHAPES = [
    (256, 128, 1, 256), (256, 64, 2, 256), (256, 16, 8, 256), (64, 192, 1, 64), (256, 1, 64, 512),
]  # fmt: skip
ROWS = 16  # of a warp


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    written = (f"WRITE({name(*shape)}, {', '.join(map(str, shape))})\n" for shape in SHAPES)
    return compiled(SHIM + "".join(written), tmp_path_factory.mktemp("rows"))


def name(*shape):
    return "_".join(("write", *map(str, shape)))


@pytest.mark.parametrize("dim, tokens, packed, width", SHAPES)
def test_rows_from_registers(dim, tokens, packed, width, device):
    """Each live row is where its token and head are, whole; nothing else is written."""
    heads, length = 2 * packed, tokens + 40
    tile = np.random.default_rng(0).standard_normal((ROWS, dim), np.float32)
    held = fragment(tile)
    groups = range(min(tokens * packed // 64, 2))
    for group, row, live, head in itertools.product(groups, (0, 7), (1, 9, tokens), (0, 1)):
        o = np.zeros((length, heads, width), np.float16)
        expected = o.copy()
        for r in range(ROWS):
            token, g = (64 * group + r) % tokens, (64 * group + r) // tokens
            if token < live:
                expected[row + token, head * packed + g, :dim] = tile[r]
        run = getattr(device, name(dim, tokens, packed, width))
        run.restype = ctypes.c_bool
        assert run(pointer(held), pointer(o), group, row, live, head, heads)
        assert np.array_equal(o, expected)
