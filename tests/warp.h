// A warp on the host: what device code asks of a GPU, for one thread that runs 32 lanes in turn.
//
// Every lane has a stack of its own and runs until it meets the others in a collective. That all
// meet in the same one, and none ends before, is checked.

#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __logf std::log
#define NO_PTX(...) throw std::logic_error("PTX has no meaning on the host")

using std::max;
using std::min;

struct Lane {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool waiting = false;
  int where = 0, turn = 0;
};

static Lane lanes[32];
static ucontext_t outside;
static std::function<void()> body;
static int box[2][32];
static bool diverged;

static struct {
  int x;
} threadIdx;

static void run_lane() { body(); }

// Run `what` on the 32 lanes of a warp of a group; false if they diverge.
static bool run_warp(const std::function<void()> &what, int warp = 0) {
  body = what;
  diverged = false;
  for (Lane &lane : lanes) {
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.data();
    lane.context.uc_stack.ss_size = lane.stack.size();
    lane.context.uc_link = &outside;
    lane.turn = 0;
    makecontext(&lane.context, run_lane, 0);
  }
  int waiting;
  do {
    waiting = 0;
    for (int x = 0; x < 32; ++x) {
      threadIdx.x = 32 * warp + x;
      lanes[x].waiting = false;
      swapcontext(&outside, &lanes[x].context);
      waiting += lanes[x].waiting && lanes[x].where == lanes[0].where;
    }
  } while (waiting == 32);
  for (Lane &lane : lanes) {
    diverged |= lane.waiting;
  }
  return !diverged;
}

// The values of all lanes, once all have come here.
static const int *meet(int value, int where) {
  int x = threadIdx.x % 32;
  Lane &lane = lanes[x];
  int *values = box[lane.turn++ % 2];
  values[x] = value;
  lane.waiting = true;
  lane.where = where;
  swapcontext(&lane.context, &outside);
  return values;
}

static int __shfl_sync(unsigned, int value, int from, int where = __builtin_LINE()) {
  return meet(value, where)[from];
}

static int __shfl_up_sync(unsigned, int value, int by, int where = __builtin_LINE()) {
  int x = threadIdx.x % 32;
  return meet(value, where)[x >= by ? x - by : x];
}

static unsigned __ballot_sync(unsigned, bool set, int where = __builtin_LINE()) {
  const int *values = meet(set, where);
  unsigned found = 0;
  for (int x = 0; x < 32; ++x) {
    found |= static_cast<unsigned>(values[x]) << x;
  }
  return found;
}

static int __ffs(unsigned x) { return __builtin_ffs(x); }
static int __popc(unsigned x) { return __builtin_popcount(x); }

// The place of set bit number n, counted from 1 and from bit `base` upwards.
static int __fns(unsigned x, int base, int n) {
  for (int bit = base; bit < 32; ++bit) {
    n -= x >> bit & 1;
    if (n == 0) {
      return bit;
    }
  }
  return -1;
}

static int atomicAdd(int *at, int value) {
  *at += value;
  return *at - value;
}

template <typename T>
static T __shfl_xor_sync(unsigned, T value, int mask, int where = __builtin_LINE()) {
  int bits, got;
  std::memcpy(&bits, &value, 4);
  got = meet(bits, where)[threadIdx.x % 32 ^ mask];
  std::memcpy(&value, &got, 4);
  return value;
}

static bool __any_sync(unsigned, bool set, int where = __builtin_LINE()) {
  const int *values = meet(set, where);
  return std::any_of(values, values + 32, [](int x) { return x != 0; });
}

static float __fdividef(float x, float y) { return x / y; }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }

// Two numbers in one register, a in the lower half.
static unsigned float16s(float a, float b) {
  _Float16 both[2] = {static_cast<_Float16>(a), static_cast<_Float16>(b)};
  unsigned y;
  std::memcpy(&y, both, 4);
  return y;
}

static unsigned bfloat16(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static unsigned bfloat16s(float a, float b) { return bfloat16(a) | bfloat16(b) << 16; }

struct uint4 {
  unsigned x, y, z, w;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct float2 {
  float x, y;
};
static float2 make_float2(float x, float y) { return {x, y}; }

// Where shared memory begins, in which an address is a number of bytes from there.
static char *shared_memory;
static unsigned __cvta_generic_to_shared(const void *at) {
  return static_cast<const char *>(at) - shared_memory;
}

// 16 bytes, the first `size` of them from there, the others zero.
static void copy_16_bytes(unsigned to, const char *from, int size) {
  std::memset(shared_memory + to, 0, 16);
  std::memcpy(shared_memory + to, from, size);
}
