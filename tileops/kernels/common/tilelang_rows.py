"""Device functions of the Hopper kernel: on one score fragment, and to find tiles and rows.

A thread of a warpgroup holds, for a 64 x N score tile, N/2 numbers. Number r belongs to row
lane/4 + 8*((r/2)%2) of its warp's 16 rows and to column 8*(r/4) + 2*(lane%4) + r%2.
"""

SOURCE = r"""
#ifndef TILEOPS_ATTENTION_ROWS
#define TILEOPS_ATTENTION_ROWS
#define INLINE __device__ __forceinline__
namespace attn {

// A thread's two rows see the columns up to last[0] and last[1], counted from its own first one.
template <int N> INLINE void mask_after(float *s, int last0, int last1) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    s[r] = 8 * (r / 4) + r % 2 > (r / 2 % 2 ? last1 : last0) ? -INFINITY : s[r];
  }
}

// The same of the columns from first[0] and first[1] on.
template <int N> INLINE void mask_before(float *s, int first0, int first1) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    s[r] = 8 * (r / 4) + r % 2 < (r / 2 % 2 ? first1 : first0) ? -INFINITY : s[r];
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

// threadIdx.x, read where it is used: what is computed from it once would take registers for good.
INLINE int thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// The first of this thread's two rows of a tile; the other is 8 further on.
INLINE int own_row(int wg) {
  int x = thread() % 128;
  return wg * 64 + x / 32 * 16 + x % 32 / 4;
}

INLINE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <int N> INLINE void negate(float *s) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    s[r] = -s[r];
  }
}

// tanh(s * x) in place, x given as 2 * log2(e) * x: 1 - 2 / (1 + e**2y) is off by some 1e-7.
template <int N> INLINE void cap(float *s, float x) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    s[r] = 1.f - __fdividef(2.f, 1.f + exp2_fast(s[r] * x));
  }
}

// Two numbers rounded into one register, a in the lower half.
template <bool BF16> INLINE unsigned pair(float a, float b) {
  unsigned y;
  if (BF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  }
  return y;
}

// N numbers rounded to pairs of 16-bit numbers, the left operand of a product.
template <int N, bool BF16> INLINE void pack(const float *x, unsigned *y) {
#pragma unroll
  for (int r = 0; r < N / 2; ++r) {
    y[r] = pair<BF16>(x[2 * r], x[2 * r + 1]);
  }
}

// Weights 2**((s - m) * scale), packed, and this thread's part of their sums.
template <int N, bool BF16> INLINE void weights(const float *s, const float *m, unsigned *p,
                                                   float *sum, float scale) {
  float a[2] = {0.f, 0.f}, b[2] = {0.f, 0.f}, shift[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    shift[h] = m[h] == -INFINITY ? 0.f : m[h] * scale;
  }
#pragma unroll
  for (int r = 0; r < N / 2; ++r) {
    int h = r % 2;
    float x = exp2_fast(__fmaf_rn(s[2 * r], scale, -shift[h]));
    float y = exp2_fast(__fmaf_rn(s[2 * r + 1], scale, -shift[h]));
    a[h] += x;
    b[h] += y;
    p[r] = pair<BF16>(x, y);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] = a[h] + b[h];
  }
}

// Weighs the block: p from AT on are the packed weights of s, l takes their sums. m is the rows'
// reference, a score of the row, -inf before there is one. No maximum is taken while the weights
// stay small: a row whose sum leaves `most` behind, or which has no reference yet, moves to its
// maximum, and its block is weighed again. Then alpha is what O has to be multiplied by, l is
// already, and the answer is true for the warp. A row moves by itself: others may be of another
// request, or see keys that it does not.
template <int N, bool BF16, int AT> INLINE bool weigh(const float *s, float *m, float *l,
                                                         float *alpha, unsigned *p, float scale,
                                                         float most, bool first) {
  float sum[2] = {0.f, 0.f};
  bool out[2] = {true, true};
  if (!first) {
    weights<N, BF16>(s, m, p + AT, sum, scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      out[h] = !(sum[h] <= most) || m[h] == -INFINITY;
    }
  }
  bool any = __any_sync(0xffffffffu, out[0] || out[1]);
  if (any) {
    float top[2];
    row_max<N>(s, m, top);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unsigned votes = __ballot_sync(0xffffffffu, out[h]);
      bool moves = votes >> (threadIdx.x & 28) & 15;
      float to = moves ? top[h] : m[h];
      float safe = to == -INFINITY ? 0.f : to;
      // Of the products as they were rounded for the weights.
      alpha[h] = exp2_fast(__fmul_rn(m[h], scale) - __fmul_rn(safe, scale));
      l[h] *= alpha[h];
      m[h] = to;
    }
    weights<N, BF16>(s, m, p + AT, sum, scale);
  }
  l[0] += sum[0];
  l[1] += sum[1];
  return any;
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

// A use of weights under way that never happens, after the wait for their product.
template <int AT, int N> INLINE void keep(const unsigned *p, const float *l) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    asm volatile(
        "{\n\t.reg .pred below;\n\t"
        "setp.lt.f32 below, %0, 0f00000000;\n\t"
        "@below st.shared.b32 [%1], %2;\n\t}" ::"f"(l[0]), "r"(0), "r"(p[AT + r])
        : "memory");
  }
}

template <int N> INLINE void scale_rows(float *o, const float *alpha) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    o[r] *= alpha[(r / 2) % 2];
  }
}

// Sums over the four threads of a row, the inverse of each and the natural log-sum-exp. A row
// without keys has no weight but zeros, and gives 0 and -inf. sinks: those of the tile's heads;
// they count in the inverse alone.
template <bool SINKS, int PER> INLINE void close_rows(const float *m, const float *l,
                                                         float *inverse, float *lse, float scale,
                                                         const float *sinks, int wg) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = l[h] + __shfl_xor_sync(0xffffffffu, l[h], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    bool empty = sum == 0.f;
    lse[h] = empty ? -INFINITY : m[h] * scale * 0.693147180559945f + __logf(sum);
    inverse[h] = empty ? 0.f : __fdividef(1.f, sum);
    if (SINKS) {
      float sink = sinks[(own_row(wg) + 8 * h) / PER] * 1.44269504088896f;
      float own = m[h] * scale, top = fmaxf(own, sink);
      float kept = exp2_fast(own - top);
      float all = sum * kept + exp2_fast(sink - top);
      inverse[h] = empty || sink == INFINITY ? 0.f : __fdividef(kept, all);
    }
  }
}

// lse[line + head of the row, first + token of the row], `width` tokens a line.
template <int PER> INLINE void put_lse(float *lse, const float *rows, int wg, int line, int width,
                                          int first, int live) {
  if (thread() % 4 == 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = own_row(wg) + 8 * h, token = row % PER;
      if (token < live) {
        lse[static_cast<long long>(line + row / PER) * width + first + token] = rows[h];
      }
    }
  }
}

// The next number of the launch, the same for the whole warp. The first `ctas` numbers are given
// without asking; a CTA asks after each tile that it got.
INLINE int next_number(int *counter, int ctas) {
  int number = threadIdx.x % 32 == 0 ? atomicAdd(counter, 1) + ctas : 0;
  return __shfl_sync(0xffffffffu, number, 0);
}

// What the last one to ask does, who gets the number behind all others: zero for the next launch.
INLINE void close_counter(int *counter, int number, int tiles, int ctas) {
  if (threadIdx.x % 32 == 0 && number == tiles + ctas - 1) {
    *counter = 0;
  }
}

// What a tile is, as the consumers read it from shared memory.
enum { ROW, LIVE, HEAD, REQUEST, SHIFT, LENGTH, FIRST, BLOCKS, KEYS, TARGET };

// The key blocks that tile rows at positions shift .. shift + PER - 1 see. A tile without keys
// still runs one block, wholly masked.
template <int PER, int BN, bool LEFT, bool RIGHT> INLINE void place_keys(int *tile, int shift,
                                                                            int length, int left,
                                                                            int right) {
  int last = RIGHT ? min(length, shift + PER + right) : length;
  int first = LEFT ? max(0, shift - left) / BN : 0;
  tile[SHIFT] = shift;
  tile[LENGTH] = length;
  tile[FIRST] = first;
  tile[BLOCKS] = max(1, (last + BN - 1) / BN - first);
}

// Tile `number` of equal requests; false past the last one. Long causal tiles first, sections of
// heads whose keys fit the L2 cache one after the other, the heads of a request side by side.
template <int PER, int BN, bool LEFT, bool RIGHT>
INLINE bool equal_tile(int *tile, int number, int tiles, int blocks, int section, int heads,
                          int s_q, int s_kv, int left, int right) {
  if (number >= tiles) {
    return false;
  }
  if (threadIdx.x % 32 == 0) {
    unsigned lines = tiles / blocks, at = number / (blocks * section);
    unsigned local = number - at * blocks * section, from = at * section;
    unsigned width = min(static_cast<unsigned>(section), lines - from);
    unsigned across = local / (RIGHT ? width : blocks);
    unsigned along = local - across * (RIGHT ? width : blocks);
    int block = RIGHT ? blocks - 1 - across : along;
    unsigned line = from + (RIGHT ? along : across), request = line / heads;
    tile[ROW] = block * PER;
    tile[LIVE] = s_q - block * PER;
    tile[HEAD] = line - request * heads;
    tile[REQUEST] = request;
    tile[KEYS] = 0;
    place_keys<PER, BN, LEFT, RIGHT>(tile, block * PER + s_kv - s_q, s_kv, left, right);
  }
  return true;
}

// Part `number` of the tiles of equal requests; false past the last one. `tiles` counts parts, of
// which a tile has `splits`, side by side: each an even share of its key blocks. A part without
// any runs the block behind the last key, where the copy engine reads zeros and no row sees
// anything. TARGET: the parts of a request are requests of o and lse, first those of part 0.
template <int PER, int BN, bool LEFT, bool RIGHT>
INLINE bool part_of_tile(int *tile, int number, int tiles, int blocks, int section, int heads,
                            int s_q, int s_kv, int left, int right, int requests, int splits) {
  unsigned whole = static_cast<unsigned>(number) / splits;
  if (!equal_tile<PER, BN, LEFT, RIGHT>(tile, whole, static_cast<unsigned>(tiles) / splits, blocks,
                                        section, heads, s_q, s_kv, left, right)) {
    return false;
  }
  if (threadIdx.x % 32 == 0) {
    unsigned part = number - whole * splits, count = tile[BLOCKS];
    unsigned begin = count * part / splits, end = count * (part + 1) / splits;
    tile[FIRST] = end > begin ? tile[FIRST] + begin : (s_kv + BN - 1) / BN;
    tile[BLOCKS] = max(1, static_cast<int>(end - begin));
    tile[TARGET] = part * requests + tile[REQUEST];
  }
  return true;
}

// Tile `number` of packed requests; false past the last one. lengths: of keys by request, or their
// offsets (PAGED false); APPENDED: they do not count the request's own tokens. Together, up to 31
// requests: the last block of rows of each (the longest tiles of a causal call), then the one
// before it of those that have it, heads side by side. Or one request after the other, so that
// the keys of few are in use at a time. A lane looks at a request each; the rows behind the last
// one are a request without keys. state: where the search stands, {blocks or requests passed,
// tiles passed}, zeros at first.
template <int PER, int BN, bool LEFT, bool RIGHT, bool PAGED, bool APPENDED>
INLINE bool packed_tile(int *tile, int number, int *state, const int *offsets,
                           const int *lengths, int rows, int requests, int together, int heads,
                           int left, int right) {
  int lane = threadIdx.x % 32;
  bool apart = !together || requests > 31;
  int first = apart ? state[0] : 0;
  while (first <= requests) {
    int own = first + lane, begin = 0, tokens = 0, keys = 0, length = 0;
    if (own <= requests) {
      begin = offsets[own];
      tokens = (own < requests ? offsets[own + 1] : rows) - begin;
    }
    if (own < requests) {
      keys = PAGED ? 0 : lengths[own];
      length = PAGED ? lengths[own] + (APPENDED ? tokens : 0) : lengths[own + 1] - keys;
    }
    int blocks = (tokens + PER - 1) / PER, block = 0, head = 0, taker = -1;
    if (apart) {
      int count = blocks * heads, sum = count;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(0xffffffffu, sum, step);
        sum += lane >= step ? other : 0;
      }
      unsigned past = __ballot_sync(0xffffffffu, state[1] + sum > number);
      taker = __ffs(past) - 1;
      int local = number - state[1] - (sum - count);
      block = blocks - 1 - local / heads;
      head = local - local / heads * heads;
      if (!past) {
        first = state[0] += 32;
        state[1] += __shfl_sync(0xffffffffu, sum, 31);
        continue;
      }
    } else {
      unsigned having;
      while ((having = __ballot_sync(0xffffffffu, blocks > state[0])) != 0) {
        int count = __popc(having) * heads, local = number - state[1];
        if (local < count) {
          taker = __fns(having, 0, local / heads + 1);
          block = blocks - 1 - state[0];
          head = local - local / heads * heads;
          break;
        }
        state[0] += 1;
        state[1] += count;
      }
      if (!having) {
        return false;
      }
    }
    if (lane == taker) {
      tile[ROW] = begin + block * PER;
      tile[LIVE] = tokens - block * PER;
      tile[HEAD] = head;
      tile[REQUEST] = own;
      tile[KEYS] = keys;
      place_keys<PER, BN, LEFT, RIGHT>(tile, block * PER + length - tokens, length, left, right);
    }
    return true;
  }
  return false;
}

// The page of a pool that holds block n of a request's keys, of several the lane's. Past the last
// one or the table: `beyond`, behind the pool, where the copy engine reads zeros.
template <int BN, int PAGE> INLINE int page_of(const int *table, int width, int request, int n,
                                                  int length, int beyond) {
  constexpr int PAGES = BN > PAGE ? BN / PAGE : 1;
  int lane = threadIdx.x % 32;
  int first = n * BN + (lane < PAGES ? lane : 0) * PAGE;
  if (first >= length || first / PAGE >= width) {
    return beyond;
  }
  return table[static_cast<long long>(request) * width + first / PAGE];
}

// Zeros outside the rows first .. end - 1 of a tile of BN rows, D columns of 16 bits, by the 128
// threads of a group: values that nobody sees must not reach a product, 0 * NaN is NaN. Without
// branches: behind one the compiler would no longer keep the products' descriptors uniform.
template <int BN, int D> INLINE void clear_rows(void *tile, int first, int end) {
  unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  int at_thread = thread() % 128;
#pragma unroll
  for (int i = 0; i < BN * D / 1024; ++i) {
    int at = i * 128 + at_thread, row = at / 8 % BN;
    int outside = row < first || row >= end;
    asm volatile(
        "{\n\t.reg .pred out;\n\tsetp.ne.b32 out, %1, 0;\n\t"
        "@out st.shared.v4.b32 [%0], {%2, %2, %2, %2};\n\t}" ::"r"(base + at * 16),
        "r"(outside), "r"(0)
        : "memory");
  }
}

// The packed 64 x D tile of a warpgroup into shared memory, panels of 64 columns, 128-byte
// swizzle; tile is the warpgroup's first row in the first panel, PANEL the bytes of a panel.
template <int D, int PANEL> INLINE void put_tile(const unsigned *y, void *tile) {
  int at_thread = thread(), lane = at_thread % 32, warp = at_thread / 32 % 4;
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

// The live rows of a packed 64 x D tile from shared memory (as put_tile leaves it) to o
// [tokens, heads, D]. Tile row r is token r % PER of head r / PER of the P heads from `head` * P.
template <int D, int PANEL, int PER, int P>
INLINE void send_rows(const void *tile, void *o, int wg, int row, int live, int head,
                         int heads) {
  unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  constexpr int CHUNKS = D / 8;
  int at_thread = thread() % 128;
#pragma unroll
  for (int i = 0; i < CHUNKS / 2; ++i) {
    int at = i * 128 + at_thread;
    int r = at / CHUNKS, c = at % CHUNKS;
    int token = (wg * 64 + r) % PER, g = (wg * 64 + r) / PER;
    unsigned from = base + r * 128 + c / 8 * PANEL + ((c % 8) ^ (r % 8)) * 16;
    unsigned x[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
    if (token < live) {
      long long to = (static_cast<long long>(row + token) * heads + head * P + g) * D + c * 8;
      *reinterpret_cast<uint4 *>(static_cast<unsigned short *>(o) + to) =
          make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
  // The copy engine writes here next.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The live rows of a 64 x D tile, rounded, from registers to o [tokens, heads, WIDTH]; rows as
// above. The four threads of a row exchange pairs of columns, so that each writes 16 bytes at a
// time.
template <int D, int PER, int P, bool BF16, int WIDTH = D>
INLINE void write_rows(const float *x, void *o, int wg, int row, int live, int head, int heads) {
  int place = thread() % 4;
  bool odd = place & 1, upper = place & 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int r = own_row(wg) + 8 * h, token = r % PER, g = r / PER;
    long long line = static_cast<long long>(row + token) * heads + head * P + g;
    long long to = line * WIDTH + place * 8;
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      unsigned y[4];  // pairs of 4 x 8 columns
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *own = x + 16 * c + 4 * i + 2 * h;
        y[i] = pair<BF16>(own[0], own[1]);
      }
      unsigned a = __shfl_xor_sync(0xffffffffu, odd ? y[0] : y[1], 1);
      unsigned b = __shfl_xor_sync(0xffffffffu, odd ? y[2] : y[3], 1);
      unsigned t0 = odd ? a : y[0], t1 = odd ? y[1] : a, t2 = odd ? b : y[2], t3 = odd ? y[3] : b;
      a = __shfl_xor_sync(0xffffffffu, upper ? t0 : t2, 2);
      b = __shfl_xor_sync(0xffffffffu, upper ? t1 : t3, 2);
      if (token < live) {
        *reinterpret_cast<uint4 *>(static_cast<unsigned short *>(o) + to + c * 32) =
            upper ? make_uint4(a, b, t2, t3) : make_uint4(t0, t1, a, b);
      }
    }
  }
}

}  // namespace attn
#undef INLINE
#endif
"""
