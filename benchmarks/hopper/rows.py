"""Small device functions on the registers of one score fragment.

A thread of a warpgroup holds, for a 64 x N score tile, N/2 numbers. Number r belongs to row
lane/4 + 8*((r/2)%2) of its warp's 16 rows and to column 8*(r/4) + 2*(lane%4) + r%2.
"""

SOURCE = r"""
#ifndef TILEOPS_ATTENTION_ROWS
#define TILEOPS_ATTENTION_ROWS
#define INLINE __device__ __forceinline__
namespace attn {

// -inf for every column above the row's last visible one; last is the last visible column,
// counted from this thread's first column, of the upper of the thread's two rows.
template <int N> INLINE void mask_after(float *s, int last) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    int column = 8 * (r / 4) + r % 2 - ((r / 2) % 2) * 8;
    s[r] = column > last ? -INFINITY : s[r];
  }
}

// The same last column for both rows.
template <int N> INLINE void mask_length(float *s, int last) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    s[r] = 8 * (r / 4) + r % 2 > last ? -INFINITY : s[r];
  }
}

// Row maxima of the tile and of what m holds, over the four threads that share a row.
template <int N> INLINE void row_max(const float *s, const float *m, float *top) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float a = fmaxf(s[2 * h], s[2 * h + 1]);
    float b = fmaxf(s[2 * h + 4], s[2 * h + 5]);
#pragma unroll
    for (int j = 2; j < N / 4; j += 2) {
      a = fmaxf(a, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      b = fmaxf(b, fmaxf(s[4 * j + 2 * h + 4], s[4 * j + 2 * h + 5]));
    }
    a = fmaxf(a, b);
    a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 1));
    a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 2));
    top[h] = fmaxf(a, m[h]);
  }
}

INLINE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Moves the reference maxima m to top where any row of the warp grew by more than slack
// (log2 units), and says whether it did. alpha is what the rows' sums must be multiplied by.
INLINE bool move_reference(float *m, const float *top, float *l, float *alpha, float scale,
                              float slack) {
  bool grew = (top[0] - m[0]) * scale > slack || (top[1] - m[1]) * scale > slack;
  bool any = __any_sync(0xffffffffu, grew);
  if (any) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float safe = top[h] == -INFINITY ? 0.f : top[h];
      alpha[h] = exp2_fast((m[h] - safe) * scale);
      l[h] *= alpha[h];
      m[h] = top[h];
    }
  }
  return any;
}

// 2**(x + 120) / 2**120 of y = (x + 120) / 128 on the FMA pipe; y saturates, so that x is held
// between -120 and 8. The nearest integer goes into the exponent, a cubic gives the rest.
INLINE float exp2_poly(float y) {
  const float magic = 12582912.f;  // 1.5 * 2**23: a sum with it has its integer in the low bits
  float whole = __fmaf_rn(y, 128.f, magic - 120.f);
  float part = __fmaf_rn(y, 128.f, -120.f - (whole - magic));
  float p = __fmaf_rn(part, 0.05517166f, 0.24261114f);
  p = __fmaf_rn(p, part, 0.69326099f);
  p = __fmaf_rn(p, part, 0.99992807f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(whole) << 23));
}

// Scores become weights 2**((s - m) * scale) in place; l takes this thread's part of the sums.
// Of every EVERY numbers the last one is computed on the FMA pipe (0: none).
template <int N, int EVERY> INLINE void weights(float *s, const float *m, float *l,
                                                   float scale) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float shift = m[h] == -INFINITY ? 0.f : m[h] * scale;
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int r = 4 * j + 2 * h + e;
        if (EVERY > 0 && (2 * j + e) % (EVERY > 0 ? EVERY : 1) == EVERY - 1) {
          s[r] = exp2_poly(__saturatef(__fmaf_rn(s[r], scale / 128.f, (120.f - shift) / 128.f)));
        } else {
          s[r] = exp2_fast(__fmaf_rn(s[r], scale, -shift));
        }
      }
      a += s[4 * j + 2 * h];
      b += s[4 * j + 2 * h + 1];
    }
    l[h] += a + b;
  }
}

// Orders what follows behind the exponentials: a shared store that depends on their sums and
// never happens, so that the assembler cannot move the wait for the values product above them.
INLINE void after_weights(const float *l) {
  asm volatile(
      "{\n\t.reg .pred below;\n\t"
      "setp.lt.f32 below, %0, 0f00000000;\n\t"
      "@below st.shared.b32 [%1], %1;\n\t}" ::"f"(l[0] + l[1]), "r"(0)
      : "memory");
}

template <int N> INLINE void scale_rows(float *o, const float *alpha) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    o[r] *= alpha[(r / 2) % 2];
  }
}

// Sums over the four threads of a row, the inverse of each and the natural log-sum-exp. The
// reference is a score of the row, so that a sum is at least 1; without keys it is at most what
// exp2_poly makes of -inf, and the row gives 0 and -inf.
INLINE void close_rows(const float *m, const float *l, float *inverse, float *lse,
                          float scale) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = l[h] + __shfl_xor_sync(0xffffffffu, l[h], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    inverse[h] = sum <= 0.5f ? 0.f : __fdividef(1.f, sum);
    lse[h] = sum <= 0.5f ? -INFINITY : m[h] * scale * 0.693147180559945f + __logf(sum);
  }
}

// The next tile of the launch, the same for the whole warp. The last taker of a launch (every
// CTA takes one tile too many) sets the counter back to zero.
INLINE int next_tile(int *counter, int ctas, int tiles) {
  int tile = 0;
  if (threadIdx.x % 32 == 0) {
    tile = atomicAdd(counter, 1) + ctas;
    if (tile == tiles + ctas - 1) {
      *counter = 0;
    }
  }
  return __shfl_sync(0xffffffffu, tile, 0);
}

// N numbers rounded to pairs of 16-bit numbers, the left operand of the next product.
template <int N, bool BF16> INLINE void pack(const float *x, unsigned *y) {
#pragma unroll
  for (int r = 0; r < N / 2; ++r) {
    if (BF16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y[r]) : "f"(x[2 * r + 1]), "f"(x[2 * r]));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y[r]) : "f"(x[2 * r + 1]), "f"(x[2 * r]));
    }
  }
}

// The packed 64 x D tile of a warpgroup into shared memory, panels of 64 columns, 128-byte
// swizzle; tile is the warpgroup's first row in the first panel, PANEL the bytes of a panel.
template <int D, int PANEL> INLINE void put_tile(const unsigned *y, void *tile) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  int row = warp * 16 + lane % 16;
  unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile)) + row * 128;
#pragma unroll
  for (int c = 0; c < D / 16; ++c) {
    int chunk = (2 * c) % 8 + lane / 16;
    unsigned at = base + c / 4 * PANEL + ((chunk ^ (row % 8)) * 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(y[4 * c]), "r"(y[4 * c + 1]), "r"(y[4 * c + 2]), "r"(y[4 * c + 3])
                 : "memory");
  }
}

}  // namespace attn
#undef INLINE
#endif
"""
