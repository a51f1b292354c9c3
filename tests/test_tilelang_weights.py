"""The weights of the Hopper kernel, on a warp of the host: block by block, against softmax.

A row keeps its reference while its weights stay small, so most blocks of most inputs never move
it. Here they do: growing scores, rows that see nothing yet, overflow, NaN.
"""

import ctypes
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("tilelang")

from tests.host_warp import compiled
from tileops.kernels.common.tilelang_consumer import MOST

KEYS, BLOCKS, ROWS = 64, 6, 16
SHIM = r"""
#include "warp.h"
#include "rows.h"

constexpr int N = 32;  // scores of a thread in a block of 64 keys

// scores [blocks, 16, 64]; codes [blocks, 32, N / 2], factor and moved [blocks, 32, 2],
// inverse and lse [32, 2]. False if lanes diverged.
template <bool BF16>
static bool weigh(const float *scores, int blocks, float scale, float most, unsigned *codes,
                  float *factor, int *moved, float *inverse, float *lse) {
  return run_warp([=] {
    int lane = threadIdx.x;
    float own_m[2] = {-INFINITY, -INFINITY}, own_l[2] = {0.f, 0.f}, alpha[2] = {1.f, 1.f};
    for (int block = 0; block < blocks; ++block) {
      float s[N];
      unsigned p[N / 2];
      for (int r = 0; r < N; ++r) {
        int row = lane / 4 + 8 * (r / 2 % 2), key = 8 * (r / 4) + 2 * (lane % 4) + r % 2;
        s[r] = scores[(block * 16 + row) * 64 + key];
      }
      bool any = attn::weigh<N, BF16, 0>(s, own_m, own_l, alpha, p, scale, most, block == 0);
      std::copy(p, p + N / 2, codes + (block * 32 + lane) * (N / 2));
      for (int h = 0; h < 2; ++h) {
        factor[(block * 32 + lane) * 2 + h] = block > 0 && any ? alpha[h] : 1.f;
        moved[(block * 32 + lane) * 2 + h] = any;
      }
    }
    attn::close_rows<false, 16>(own_m, own_l, inverse + 2 * lane, lse + 2 * lane, scale,
                                nullptr, 0);
  });
}

#define WEIGH(NAME, BF16)                                                                   \
  extern "C" bool NAME(const float *scores, int blocks, float scale, float most,            \
                       unsigned *codes, float *factor, int *moved, float *inverse,          \
                       float *lse) {                                                        \
    return weigh<BF16>(scores, blocks, scale, most, codes, factor, moved, inverse, lse);    \
  }
WEIGH(weigh_bfloat16, true)
WEIGH(weigh_float16, false)
"""
LANE, R = np.meshgrid(np.arange(32), np.arange(KEYS // 2), indexing="ij")
ROW, KEY = LANE // 4 + 8 * (R // 2 % 2), 8 * (R // 4) + 2 * (LANE % 4) + R % 2
DTYPES = [torch.bfloat16, torch.float16]
SCALE = 0.125 * math.log2(math.e)


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    return compiled(SHIM, tmp_path_factory.mktemp("weights"))


class Weighed:
    """What becomes of scores [BLOCKS, 16, 64]: weights over their sum, log-sum-exp, moves."""

    def __init__(self, device, scores, dtype, most=MOST):
        scores = np.ascontiguousarray(scores, dtype=np.float32)
        codes = np.zeros((BLOCKS, 32, KEYS // 4), np.uint32)
        factor = np.zeros((BLOCKS, 32, 2), np.float32)
        moved = np.zeros((BLOCKS, 32, 2), np.int32)
        inverses, logs = np.zeros((32, 2), np.float32), np.zeros((32, 2), np.float32)
        run = getattr(device, "weigh_" + str(dtype).removeprefix("torch."))
        run.restype = ctypes.c_bool
        pointers = [
            x.ctypes.data_as(ctypes.c_void_p) for x in (codes, factor, moved, inverses, logs)
        ]
        given = scores.ctypes.data_as(ctypes.c_void_p)
        assert run(given, BLOCKS, ctypes.c_float(SCALE), ctypes.c_float(most), *pointers)
        self.moves = moved[:, 0, 0].astype(bool)
        pairs = torch.from_numpy(codes.view(np.int16).copy()).view(dtype)
        self.largest = float(pairs.double().abs().nan_to_num(0, math.inf).max())
        weights = np.zeros((ROWS, BLOCKS, KEYS))
        for block, x in enumerate(pairs.double().numpy()):
            by_row = np.ones(ROWS)
            by_row[ROW[:, [0, 2]]] = factor[block]
            weights[:, :block] *= by_row[:, None, None]
            weights[ROW, block, KEY] = x
        self.inverse, self.lse = np.zeros(ROWS), np.zeros(ROWS)
        self.inverse[ROW[:, [0, 2]]] = inverses
        self.lse[ROW[:, [0, 2]]] = logs
        self.weights = weights.reshape(ROWS, -1) * self.inverse[:, None]


def check(found, scores, dtype, rows=slice(None)):
    logits = torch.from_numpy(np.array(scores, dtype=np.float64)) * (SCALE * math.log(2))
    logits = logits.permute(1, 0, 2).flatten(1)[rows]
    expected = logits.softmax(1)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2**-10
    gap = (torch.from_numpy(found.weights)[rows] - expected).abs()
    # Relative to what float16 can hold of a row whose reference lags: 2**-24 of 2**-12.
    assert (gap <= tolerance * expected + 2**-24).all()
    lse = torch.from_numpy(found.lse)[rows]
    torch.testing.assert_close(lse, logits.logsumexp(1), atol=2e-5, rtol=2e-6)


def noise(seed=0):
    return np.random.default_rng(seed).standard_normal((BLOCKS, ROWS, KEYS)).astype(np.float32) * 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_stay_move_nothing(dtype, device):
    found = Weighed(device, noise(), dtype)
    check(found, noise(), dtype)
    assert list(found.moves) == [True] + [False] * (BLOCKS - 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [-4000, -60, 20, 60, 200, 4000, 1e5])
def test_scores_that_grow_or_fall_by_block(step, dtype, device):
    """By 0.18 times the step in powers of two; the last ones overflow the weights at first."""
    scores = noise() + np.float32(step) * np.arange(BLOCKS, dtype=np.float32)[:, None, None]
    found = Weighed(device, scores, dtype)
    check(found, scores, dtype)
    assert found.moves[1:].any() == (step > 0)
    assert found.largest <= MOST


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_score_beyond_all_others(dtype, device):
    for at in ((2, 3, 5), (5, 15, 63), (1, 0, 0)):
        scores = noise()
        scores[at] = 3e4
        found = Weighed(device, scores, dtype)
        check(found, scores, dtype)
        assert list(np.flatnonzero(found.moves)) == [0, at[0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_move_by_themselves(dtype, device):
    """A row's bits do not depend on what the others see."""
    alone = Weighed(device, noise(), dtype)
    others = noise(1) + np.float32(90) * np.arange(BLOCKS, dtype=np.float32)[:, None, None]
    for row in (0, 7, 8, 15):
        scores = others.copy()
        scores[:, row] = noise()[:, row]
        found = Weighed(device, scores, dtype)
        check(found, scores, dtype)
        assert found.moves[1:].any()
        assert np.array_equal(found.weights[row], alone.weights[row])
        assert found.lse[row] == alone.lse[row]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing_at_first_or_at_all(dtype, device):
    scores = noise() - np.float32(3000)
    for row in range(1, ROWS):
        scores[: row % (BLOCKS + 1), row] = -np.inf
    scores[3, 2, 10:] = -np.inf
    found = Weighed(device, scores, dtype)
    some = [row for row in range(ROWS) if row % (BLOCKS + 1) < BLOCKS]
    check(found, scores, dtype, some)
    none = [row for row in range(ROWS) if row not in some]
    assert none and (found.weights[none] == 0).all()
    assert (found.lse[none] == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_nan_is_its_own(dtype, device):
    alone = Weighed(device, noise(), dtype)
    scores = noise()
    scores[2, 4, 9] = np.nan
    found = Weighed(device, scores, dtype)
    rows = [row for row in range(ROWS) if row != 4]
    assert np.isnan(found.weights[4]).all() and np.isnan(found.lse[4])
    assert np.array_equal(found.weights[rows], alone.weights[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e5, 1e6])
def test_moves_among_large_scores(size, dtype, device):
    """What a move multiplies older blocks by is of the products that their weights were of."""
    scores = noise() + np.float32(size)
    scores += np.float32(64) * np.arange(BLOCKS, dtype=np.float32)[:, None, None]
    found = Weighed(device, scores, dtype)
    assert found.moves[1:].any()
    # Of the products in float32, of which a row's reference is the largest at a move.
    products = scores.astype(np.float64) * np.float64(np.float32(SCALE))
    weights = 2.0 ** (products - products.max((0, 2), keepdims=True))
    ratio = weights[:-1].sum((0, 2)) / weights[-1].sum(1)
    got = found.weights.reshape(ROWS, BLOCKS, KEYS)
    np.testing.assert_allclose(got[:, :-1].sum((1, 2)) / got[:, -1].sum(1), ratio, rtol=5e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_with_any_weight_is_not_empty(dtype, device):
    """The weight of a large score, 2**(product - product rounded), may be far below 1."""
    scores = np.full((BLOCKS, ROWS, KEYS), -np.inf, np.float32)
    scores[0, :, 0] = 1440.0**2 * 128 * (1 + np.arange(ROWS) / ROWS)
    found = Weighed(device, scores, dtype)
    assert np.allclose(found.weights[:, 0], 1, atol=2**-7)
    assert np.isfinite(found.lse).all() and found.inverse.max() > 2
