"""Device functions of the Hopper latent kernel: which rows a program serves, and how it gathers.

They follow those of `tilelang_rows.py`, whose fragments they share.
"""

from tileops.kernels.common import tilelang_rows

SOURCE = (
    tilelang_rows.SOURCE
    + r"""
#ifndef TILEOPS_LATENT_ROWS
#define TILEOPS_LATENT_ROWS
#define INLINE __device__ __forceinline__
namespace attn {

// Where a program stands: its range and block of heads, the row and the tiles [BEGIN, END) of it.
// Before the first row of the first item RANK is -1.
enum { ITEM, RANK, LATENT_ROW, BEGIN, END };

// Goes on to the next row of the range, or of the next range of the program; false behind the
// last. Items are (range, block of heads); the last rows come first.
INLINE bool next_row(int *at, int ctas, int items, int head_blocks, int rows, int row_tiles,
                     int range_tiles) {
  int first = at[ITEM] / head_blocks * range_tiles;
  int stop = min(first + range_tiles, rows * row_tiles);
  int rank = at[RANK] < 0 ? first / row_tiles : at[RANK] + 1;
  if (rank * row_tiles >= stop) {
    at[ITEM] += ctas;
    if (at[ITEM] >= items) {
      return false;
    }
    first = at[ITEM] / head_blocks * range_tiles;
    stop = min(first + range_tiles, rows * row_tiles);
    rank = first / row_tiles;
  }
  at[RANK] = rank;
  at[LATENT_ROW] = rows - 1 - rank;
  at[BEGIN] = max(first - rank * row_tiles, 0);
  at[END] = min(stop - rank * row_tiles, row_tiles);
  return true;
}

// The last cache row that a query sees; below zero if there is none.
template <bool CAUSAL>
INLINE int last_row(int query, long long first, long long phase, long long stride, int rows) {
  long long limit = rows;
  if (CAUSAL) {
    limit = min(limit, (query + phase) / stride + first);
  }
  return static_cast<int>(limit) - 1;
}

// The first tile from `tile` on that has a live slot, `end` or more if there is none. A lane's
// two names of it, and which of its 64 slots are live.
INLINE int seek(const int *names, int tile, int end, int slots, int last, int *name,
                unsigned *live) {
  for (; tile < end; ++tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int slot = tile * 64 + h * 32 + thread() % 32;
      name[h] = slot < slots ? names[slot] : -1;
      live[h] = __ballot_sync(0xffffffffu, name[h] >= 0 && name[h] <= last);
    }
    if (live[0] | live[1]) {
      break;
    }
  }
  return tile;
}

// The slots of a tile whose rows follow each other, `left` of them to the end.
INLINE void first_slots(int left, unsigned *live) {
  live[0] = left >= 32 ? ~0u : (1u << left) - 1;
  live[1] = left >= 64 ? ~0u : left <= 32 ? 0u : (1u << (left - 32)) - 1;
}

// PANELS panels of 64 columns of the 64 rows that the names name, by 128 threads: asked for, not
// waited for. Dead slots become zeros. stride: bytes from row to row.
template <int PANELS> INLINE void gather(void *tile, const void *rows, long long stride,
                                         const int *name, const unsigned *live) {
  int warp = thread() % 128 / 32, lane = thread() % 32;
  unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  int own = warp < 2 ? name[0] : name[1];
  unsigned alive = warp < 2 ? live[0] : live[1];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    int row = warp * 16 + j * 4 + lane / 8;
    int from = __shfl_sync(0xffffffffu, own, row % 32);
    bool is_live = alive >> (row % 32) & 1;
    const char *source = static_cast<const char *>(rows) + (is_live ? from * stride : 0) +
                         lane % 8 * 16;
    unsigned to = base + row * 128 + ((lane % 8) ^ (row % 8)) * 16;
#pragma unroll
    for (int c = 0; c < PANELS; ++c) {
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to + c * 8192),
                   "l"(source + c * 128), "r"(is_live ? 16 : 0)
                   : "memory");
    }
  }
}

// Zero, but the compiler does not know: what is computed from it in a loop is not kept for it.
INLINE int zero() {
  int x;
  asm volatile("mov.u32 %0, 0;" : "=r"(x));
  return x;
}

// -inf for the columns of a 64 x 64 tile whose slots are dead.
INLINE void hide_dead(float *s, unsigned live0, unsigned live1) {
  int lane = thread() % 4 * 2;
  live0 >>= lane;
  live1 >>= lane;
#pragma unroll
  for (int r = 0; r < 32; ++r) {
    int bit = 8 * (r / 4 % 4) + r % 2;
    s[r] = (r < 16 ? live0 : live1) >> bit & 1 ? s[r] : -INFINITY;
  }
}

// The sums of a thread's rows over the four threads of a row.
INLINE void add_up(float *l) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
    l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
  }
}

// What the other group multiplies its 64 rows with.
INLINE void put_factors(float *to, const float *x) {
  if (thread() % 4 == 0) {
    to[own_row(0)] = x[0];
    to[own_row(0) + 8] = x[1];
  }
}

INLINE void get_factors(float *x, const float *from) {
  x[0] = from[own_row(0)];
  x[1] = from[own_row(0) + 8];
}

// A 64 x D tile from registers to rows of LINE numbers, as it is.
template <int D, int LINE> INLINE void write_part(const float *x, float *to) {
  int place = own_row(0) * LINE + thread() % 4 * 2;
#pragma unroll
  for (int r = 0; r < D / 2; r += 2) {
    *reinterpret_cast<float2 *>(to + place + r / 2 % 2 * 8 * LINE + r / 4 * 8) =
        make_float2(x[r], x[r + 1]);
  }
}

// The base-2 anchors of a part, 64 numbers, and behind them its sums of weights.
INLINE void write_sums(float *to, const float *m, const float *l, float scale) {
  if (thread() % 4 == 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      to[own_row(0) + 8 * h] = m[h] == -INFINITY ? m[h] : __fmul_rn(m[h], scale);
      to[64 + own_row(0) + 8 * h] = l[h];
    }
  }
}

}  // namespace attn
#undef INLINE
#endif
"""
)
