"""Which tiles the Hopper kernel computes over which keys: the launcher, and the device functions.

The device functions that find tiles run on the host, a warp at a time (`tests/warp.h`), against
a list of all tiles. What the launcher decides is read from the launches that it asks for.
"""

import ctypes
import itertools
import random

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("tilelang")

from tests import oracle
from tests.host_warp import compiled
from tests.tilelang_calls import appended, dense, launch_of, packed, paged
from tileops.kernels.common import tilelang_gqa, tilelang_limits
from tileops.kernels.common.machine import H200
from tileops.kernels.common.recorder import recording
from tileops.kernels.common.triton_gqa import Scores

# ---------------------------------------------------------------------------------- launcher

# Group -> query heads that share a tile of 128 and of 192 rows.
HEADS = {
    1: (1, 1), 2: (2, 2), 3: (1, 3), 4: (4, 4), 6: (2, 6), 7: (1, 1), 8: (8, 8), 12: (4, 12),
    16: (16, 8), 71: (1, 1),
}  # fmt: skip


@pytest.mark.parametrize("group", HEADS)
def test_heads_that_share_a_tile(group):
    found = tuple(tilelang_gqa.packed_heads(group, rows) for rows in (128, 192))
    assert found == HEADS[group]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("left", [-1, 0, 255, 256, 5000])
def test_a_block_is_whole_pages_or_inside_one(dim, left):
    read = [page for page in range(1, 2049) if tilelang_limits.reads_pages_of(page)]
    assert read[:6] == [8, 16, 32, 64, 128, 256] and len(read) == 4 + 16
    for page in read:
        block = tilelang_gqa.tiles_for(dim, "paged", page, left).block_n
        assert block % page == 0 or page % block == 0
        assert block % 16 == 0 and -(-block // page) <= 32  # a lane finds a page


class Asked:
    """What the launcher says of tiles."""

    def __init__(self, call):
        launch = launch_of(call)
        self.requests, self.blocks, self.tiles, self.section = launch.args[-6:-2]
        self.splits, self.ctas = launch.args[-2:]
        self.constants = launch.constants


def test_dense_tiles(compiler):
    found = Asked(dense(batch=3, rows=300, heads=8))
    assert found.constants["consumers"] == 2
    assert (found.blocks, found.tiles, found.ctas) == (3, 3 * 3 * 8, 72)
    found = Asked(dense(batch=3, rows=1921, keys=2000, heads=8, dim=64))
    assert found.constants["consumers"] == 3
    assert (found.blocks, found.tiles, found.ctas) == (11, 11 * 3 * 8, H200.processors)


def test_rows_of_dense_tiles_are_those_that_refusals_know():
    for dim, left in itertools.product((64, 128, 256), (-1, 0, 5000)):
        consumers = tilelang_gqa.tiles_for(dim, "dense", 0, left).consumers
        assert tilelang_limits.TILE_ROWS[dim] == 64 * consumers


CHUNK = {"batch": 1, "heads": 32, "heads_kv": 8}
# Parts of the keys, by call: 132 multiprocessors.
SPLITS = [
    (4, {"rows": 128, "keys": 2048, **CHUNK}),  # 32 tiles of 16 blocks
    (2, {"rows": 256, "keys": 8192, **CHUNK}),  # 64 tiles
    (1, {"rows": 384, "keys": 8192, **CHUNK}),  # 96: not two parts each at once
    (1, {"rows": 512, "keys": 512, **CHUNK}),
    (3, {"rows": 128, "keys": 9 * 128, **CHUNK}),  # four give 3 blocks as well
    (4, {"rows": 128, "keys": 8 * 128, **CHUNK}),
    (2, {"rows": 128, "keys": 4 * 128, **CHUNK}),
    (1, {"rows": 128, "keys": 3 * 128, **CHUNK}),  # a part would have one block
    (128, {"rows": 128, "keys": 32768, "batch": 1, "heads": 1, "heads_kv": 1}),
    (16, {"rows": 128, "keys": 100_000, "batch": 1, "heads": 8, "heads_kv": 1}),
    # As many keys as a tile sees in the window, whatever there are.
    (1, {"rows": 128, "keys": 9000, "window_size_left": 383, **CHUNK}),
    (2, {"rows": 128, "keys": 9000, "window_size_left": 384, **CHUNK}),
    (2, {"rows": 256, "keys": 9000, "window_size_left": 384, **CHUNK}),
    (4, {"rows": 144, "keys": 9000, "dim": 64, "window_size_left": 1024, **CHUNK}),
    (1, {"rows": 144, "keys": 9000, "dim": 64, "window_size_left": 255, **CHUNK}),
    (1, {"rows": 128, "keys": 9000, "window_size_left": 383, "is_causal": False, **CHUNK}),
    (3, {"rows": 128, "keys": 9000, "window_size_left": 700, "window_size_right": 512,
         "is_causal": False, **CHUNK}),
]  # fmt: skip


@pytest.mark.parametrize("splits, given", SPLITS, ids=range(len(SPLITS)))
def test_parts_of_dense_keys(splits, given, compiler):
    found = Asked(dense(**given))
    tiles = found.blocks * found.requests * given["heads"]
    assert (found.splits, found.tiles) == (splits, splits * tiles)
    assert found.constants["split"] == (splits > 1)
    assert found.ctas == found.tiles if splits > 1 else min(found.tiles, H200.processors)


class Attended:
    """What `attend` launches for two requests of six heads, and what it is given to fill."""

    def __init__(self, rows, keys, sinks=None):
        call = dense(rows=rows, keys=keys, batch=2, heads=6, heads_kv=2, dtype=torch.float16)
        self.q, self.k, self.v = call.q, call.k, call.v
        self.o = torch.empty_like(call.q)
        self.lse = torch.empty(2, 6, rows, dtype=torch.float32, device="meta")
        with recording(H200) as self.launches:
            pair = tilelang_gqa.Keys(call.k, call.v)
            tilelang_gqa.attend(self.o, self.lse, call.q, pair, Scores(0.1, True, sinks=sinks))


@pytest.mark.parametrize("sinks", [False, True])
def test_parts_are_requests_of_their_own_until_they_are_joined(sinks, compiler):
    """Sinks count once, in the join."""
    given = torch.empty(6, dtype=torch.float32, device="meta") if sinks else None
    found = Attended(200, 3000, given)
    attention, join = found.launches
    q, k, v = attention.args[:3]
    assert q is found.q and k is found.k and v is found.v
    o_parts, lse_parts = attention.args[3:5]
    assert attention.args[-2] == 5
    assert (o_parts.shape, o_parts.dtype) == ((10, 200, 6, 128), torch.float16)
    assert (lse_parts.shape, lse_parts.dtype) == ((60, 200), torch.float32)
    assert attention.constants["has_lse"] and not attention.constants["sinks"]
    given_to = dict(zip(join.kernel.arg_names, join.args, strict=False)) | join.constexprs
    assert join.grid == (2 * 200 * 6,) and given_to["splits"] == 5
    assert given_to["partial_o"] is o_parts and given_to["o"].shape == (400, 6, 128)
    assert given_to["partial_lse"].shape == (10, 6, 200) and given_to["lse"] is found.lse
    assert (given_to["tokens"], given_to["length_q"]) == (400, 200)
    assert given_to["HAS_SINKS"] == sinks and (given_to["sinks"] is given or not sinks)
    assert given_to["LIKE_LSE"] and not given_to["PACKED"]


def test_what_is_not_split_is_written_at_once(compiler):
    found = Attended(1500, 3000, torch.empty(6, dtype=torch.float32, device="meta"))
    [launch] = found.launches
    assert launch.args[3] is found.o and launch.args[4]._base is found.lse
    assert launch.args[-2] == 1 and launch.constants["sinks"]


@pytest.mark.parametrize("keys, sections", [(900, 1), (20_000, 2), (30_000, 3), (200_000, 6)])
def test_sections_of_heads_whose_keys_fit_the_cache(keys, sections, compiler):
    """Equal sections: two KV heads of 20,000 keys are 20 MB, of 30,000 keys too many."""
    found = Asked(dense(batch=2, rows=600, keys=keys, heads=12, heads_kv=3))
    per_head = keys * 2 * 128 * 2
    kv_heads = found.section // 4
    assert found.section % 4 == 0 and -(-6 // kv_heads) == sections
    assert kv_heads == 1 or kv_heads * per_head <= tilelang_gqa.L2_BYTES


@pytest.mark.parametrize("call", [packed, paged, appended])
def test_packed_tiles_are_counted_from_above(call, compiler):
    """What is launched is enough for any lengths: the tile that is last is found on the device."""
    rows, requests, heads = 600, 3, 8
    found = Asked(call(rows=rows, batch=requests, heads=heads))
    shared, consumers = found.constants["packed_heads"], found.constants["consumers"]
    tokens = 64 * consumers // shared
    worst = rows // tokens + requests + 1  # each request and the padding begins a block
    assert (found.requests, found.tiles) == (requests, worst * heads // shared)
    assert found.ctas == min(found.tiles, H200.processors)


def test_requests_are_served_together_if_their_keys_fit_the_cache(compiler):
    rows = tilelang_gqa.L2_BYTES // (4 * 2 * 128)
    assert Asked(packed(rows=6000, keys=rows)).section == 1
    assert Asked(packed(rows=6000, keys=rows + 1)).section == 0
    pages = rows // 3 // 64  # of the table: what a pool holds says nothing
    width = {"page_table": torch.empty(3, pages, dtype=torch.int32, device="meta")}
    assert Asked(paged(rows=6000, pages=9 * pages, **width)).section == 1
    width = {"page_table": torch.empty(3, pages + 1, dtype=torch.int32, device="meta")}
    assert Asked(paged(rows=6000, pages=9, **width)).section == 0


# ------------------------------------------------------------------------- device functions

WIDE = 10  # numbers of a tile
BLOCKS = (64, 80, 128)
MASKS = ((True, True), (False, True), (True, False), (False, False))  # windows left, right
TOKENS = (192, 128, 48, 8)  # of a tile
PAGES = (
    (64, 8),
    (64, 64),
    (80, 8),
    (80, 16),
    (128, 8),
    (128, 32),
    (128, 128),
    (128, 384),
    (64, 512),
)
CONFIGURATIONS = list(itertools.product(TOKENS[:2], BLOCKS[::2], MASKS))
LENGTHS = {"packed": (False, False), "paged": (True, False), "appended": (True, True)}
PACKED = list(
    zip(itertools.cycle(LENGTHS), itertools.product(TOKENS, BLOCKS, MASKS), strict=False)
)
SHIM = r"""
#include "warp.h"
#include "rows.h"

using Find = std::function<bool(int *tile, int number, int *state)>;
constexpr int WIDE = attn::TARGET + 1;

// A launch of `ctas` programs, one step of one of them after the other in random order. found:
// tiles by number, WIDE numbers each. -1: lanes diverged, -2: a number was given twice.
static int launch(const Find &find, int ctas, int tiles, int *counter, int *found, int most,
                  unsigned seed) {
  struct Cta {
    int number, steps = 0, state[32][2] = {};
    bool more[32];
  };
  std::vector<Cta> running(ctas);
  std::vector<int> left, given(most, 0);
  for (int cta = 0; cta < ctas; ++cta) {
    running[cta].number = cta;
    left.push_back(cta);
  }
  while (!left.empty()) {
    seed = seed * 1664525u + 1013904223u;
    int pick = (seed >> 8) % left.size();
    Cta &cta = running[left[pick]];
    int tile[WIDE] = {};
    bool met = run_warp([&] {
      int lane = threadIdx.x;
      int number = cta.steps ? attn::next_number(counter, ctas) : cta.number;
      cta.number = number;
      cta.more[lane] = find(tile, number, cta.state[lane]);
      if (!cta.more[lane]) {
        attn::close_counter(counter, number, tiles >= 0 ? tiles : cta.state[lane][1], ctas);
      }
    });
    ++cta.steps;
    if (!met || std::count(cta.more, cta.more + 32, cta.more[0]) != 32) {
      return -1;
    }
    if (!cta.more[0]) {
      left.erase(left.begin() + pick);
    } else if (cta.number >= most || given[cta.number]++) {
      return -2;
    } else {
      std::copy(tile, tile + WIDE, found + WIDE * cta.number);
    }
  }
  return std::count(given.begin(), given.end(), 1);
}

#define EQUAL(NAME, ...)                                                                     \
  extern "C" int NAME(int ctas, int tiles, int blocks, int section, int heads, int s_q,      \
                      int s_kv, int left, int right, int *counter, int *found, int most,     \
                      unsigned seed) {                                                       \
    auto find = [&](int *tile, int number, int *) {                                          \
      return attn::equal_tile<__VA_ARGS__>(tile, number, tiles, blocks, section, heads, s_q, \
                                           s_kv, left, right);                               \
    };                                                                                       \
    return launch(find, ctas, tiles, counter, found, most, seed);                            \
  }
#define PARTS(NAME, ...)                                                                     \
  extern "C" int NAME(int ctas, int tiles, int blocks, int section, int heads, int s_q,      \
                      int s_kv, int left, int right, int requests, int splits, int *counter, \
                      int *found, int most, unsigned seed) {                                 \
    auto find = [&](int *tile, int number, int *) {                                          \
      return attn::part_of_tile<__VA_ARGS__>(tile, number, tiles, blocks, section, heads,    \
                                             s_q, s_kv, left, right, requests, splits);      \
    };                                                                                       \
    return launch(find, ctas, tiles, counter, found, most, seed);                            \
  }
#define PACKED(NAME, ...)                                                                    \
  extern "C" int NAME(int ctas, const int *offsets, const int *lengths, int rows,            \
                      int requests, int together, int heads, int left, int right,            \
                      int *counter, int *found, int most, unsigned seed) {                   \
    auto find = [&](int *tile, int number, int *state) {                                     \
      return attn::packed_tile<__VA_ARGS__>(tile, number, state, offsets, lengths, rows,     \
                                            requests, together, heads, left, right);         \
    };                                                                                       \
    return launch(find, ctas, -1, counter, found, most, seed);                               \
  }
#define POOL(NAME, ...)                                                                      \
  extern "C" int NAME(const int *table, int width, int request, int n, int length,           \
                      int beyond, int *found) {                                              \
    return run_warp([&] {                                                                    \
      found[threadIdx.x] =                                                                   \
          attn::page_of<__VA_ARGS__>(table, width, request, n, length, beyond);              \
    });                                                                                      \
  }
"""


def flags(*values):
    return ", ".join(str(x).lower() for x in values)


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """The device functions of every configuration below, compiled for the host."""
    folder = tmp_path_factory.mktemp("warp")
    text = [SHIM]
    for i, (tokens, block, masks) in enumerate(CONFIGURATIONS):
        text.append(f"EQUAL(equal_{i}, {flags(tokens, block, *masks)})")
        text.append(f"PARTS(parts_{i}, {flags(tokens, block, *masks)})")
    for i, (layout, (tokens, block, masks)) in enumerate(PACKED):
        text.append(f"PACKED(packed_{i}, {flags(tokens, block, *masks, *LENGTHS[layout])})")
    text += [f"POOL(pool_{block}_{page}, {block}, {page})" for block, page in PAGES]
    return compiled("\n".join(text), folder)


def ints(values):
    return (ctypes.c_int * max(len(values), 1))(*values)


def tiles_in(found):
    return list(zip(*[iter(found)] * WIDE, strict=True))


def key_blocks(tokens, length, begin, per, block, left, right):
    """First block and number of blocks that rows begin .. begin + per - 1 of a request see."""
    seen = oracle.visible(tokens, length, False, left, right)[begin : begin + per]
    keys = seen.any(0).nonzero().flatten()
    if not len(keys):
        return None
    first = int(keys[0]) // block
    return first, int(keys[-1]) // block + 1 - first


def drawn_windows(rng, masks):
    """Windows left and right, -1 for none; some reach past everything."""
    drawn = (rng.choice((0, 1, *rng.sample(range(300), 4), 2**30 - 1)) for _ in masks)
    return [window if has else -1 for window, has in zip(drawn, masks, strict=True)]


def check_keys(tile, tokens, length, per, block, windows, begin):
    """A tile's position and its key blocks: those that its rows see, one if they see none."""
    _, live, _, _, shift, found_length, first, blocks, _, _ = tile
    assert (shift, found_length) == (begin + length - tokens, length)
    assert live == tokens - begin
    expected = key_blocks(tokens, length, begin, per, block, *windows)
    if expected is None:
        assert blocks == 1 and first >= 0
    else:
        assert (first, blocks) == expected


@pytest.mark.parametrize("index", range(len(CONFIGURATIONS)))
def test_tiles_of_equal_requests(index, device):
    per, block, masks = CONFIGURATIONS[index]
    rng = random.Random(index)
    for _ in range(12):
        windows = drawn_windows(rng, masks)
        batch, heads_kv, group = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 3)
        s_q = rng.choice((1, per, per + 1, rng.randint(1, 700)))
        s_kv = rng.choice((1, s_q, rng.randint(1, 900)))
        heads, blocks = heads_kv * group, -(-s_q // per)
        section = group * rng.randint(1, batch * heads_kv)
        tiles, lines = blocks * batch * heads, batch * heads
        ctas, counter, found = rng.randint(1, 20), ints([0]), ints([0] * WIDE * tiles)
        count = device[f"equal_{index}"](
            ctas, tiles, blocks, section, heads, s_q, s_kv, *windows, counter, found, tiles,
            rng.getrandbits(31),
        )  # fmt: skip
        assert (count, counter[0]) == (tiles, 0)
        given = tiles_in(found)
        # Section after section; in one the long tiles first, or heads one after the other.
        expected = []
        for start in range(0, lines, section):
            own = range(start, min(start + section, lines))
            inner = [(b, x) for b in range(blocks)[::-1] for x in own]
            outer = [(b, x) for x in own for b in range(blocks)]
            expected += inner if masks[1] else outer
        found_order = [(row // per, b * heads + h) for row, _, h, b, *_ in given]
        assert found_order == expected
        for tile in given:
            check_keys(tile, s_q, s_kv, per, block, windows, tile[0])


@pytest.mark.parametrize("index", range(len(CONFIGURATIONS)))
def test_parts_of_the_tiles_of_equal_requests(index, device):
    """Side by side, even shares of the tile's blocks; without any, what lies behind the keys."""
    per, block, masks = CONFIGURATIONS[index]
    rng = random.Random(index)
    for _ in range(12):
        windows = drawn_windows(rng, masks)
        batch, heads_kv, group = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 3)
        s_q = rng.choice((1, per, per + 1, rng.randint(1, 400)))
        s_kv = rng.choice((1, s_q, rng.randint(1, 3000)))
        heads, blocks, splits = heads_kv * group, -(-s_q // per), rng.randint(2, 9)
        tiles, section = blocks * batch * heads, group * rng.randint(1, batch * heads_kv)
        ctas, counter = rng.randint(1, 20), ints([0])
        sizes = (blocks, section, heads, s_q, s_kv, *windows)
        whole, found = (ints([0] * WIDE * n) for n in (tiles, tiles * splits))
        device[f"equal_{index}"](ctas, tiles, *sizes, counter, whole, tiles, rng.getrandbits(31))
        count = device[f"parts_{index}"](
            ctas, tiles * splits, *sizes, batch, splits, counter, found, tiles * splits,
            rng.getrandbits(31),
        )  # fmt: skip
        assert (count, counter[0]) == (tiles * splits, 0)
        parts = tiles_in(found)
        for number, tile in enumerate(tiles_in(whole)):
            own = parts[number * splits : (number + 1) * splits]
            assert {part[:6] for part in own} == {tile[:6]}
            assert [part[9] for part in own] == [x * batch + tile[3] for x in range(splits)]
            first, blocks_seen = tile[6:8]
            behind = -(-s_kv // block), 1
            shares = [part[6:8] for part in own if part[6:8] != behind]
            assert len(shares) == min(splits, blocks_seen)
            assert max(n for _, n in shares) - min(n for _, n in shares) <= (splits < blocks_seen)
            walked = [x for begin, n in shares for x in range(begin, begin + n)]
            assert walked == list(range(first, first + blocks_seen))


def drawn_requests(rng):
    """(tokens, keys) of up to 100 requests, some of them empty."""

    def length(most):
        return rng.choice((0, 1, rng.randint(0, most), rng.randint(0, most)))

    count = rng.choice((0, 1, 2, 5, 31, 32, 33, 64, 100))
    most = 600 if count < 10 else 60
    return [(length(most), length(600)) for _ in range(count)]


@pytest.mark.parametrize("index", range(len(PACKED)))
def test_tiles_of_packed_requests(index, device):
    layout, (per, block, masks) = PACKED[index]
    rng = random.Random(index)
    for _ in range(6):
        windows = drawn_windows(rng, masks)
        requests, heads, together = drawn_requests(rng), rng.randint(1, 5), rng.randint(0, 1)
        padding = rng.choice((0, 0, 1, 200))
        tokens = [t for t, _ in requests] + [padding]
        offsets = [0, *itertools.accumulate(tokens)]
        keys = [0, *itertools.accumulate(n for _, n in requests)]
        lengths = [n + t if layout == "appended" else n for t, n in requests] + [0]
        most = (sum(tokens) // per + len(tokens)) * heads
        ctas, counter, found = rng.randint(1, 20), ints([0]), ints([0] * WIDE * most)
        given_lengths = keys if layout == "packed" else [n for _, n in requests]
        count = device[f"packed_{index}"](
            ctas, ints(offsets[:-1]), ints(given_lengths), sum(tokens), len(requests), together,
            heads, *windows, counter, found, most, rng.getrandbits(31),
        )  # fmt: skip
        blocks = [-(-t // per) for t in tokens]
        pairs = [(b, x) for b in range(len(tokens)) for x in range(blocks[b])[::-1]]
        if together and len(requests) <= 31:  # the last blocks of all, then those before
            pairs.sort(key=lambda pair: blocks[pair[0]] - pair[1])
        expected = [(b, x, head) for b, x in pairs for head in range(heads)]
        assert (count, counter[0]) == (len(expected), 0)
        for tile, (b, x, head) in zip(tiles_in(found), expected, strict=False):
            assert (tile[0], tile[2], tile[3]) == (offsets[b] + x * per, head, b)
            assert tile[8] == (keys[b] if layout == "packed" and b < len(requests) else 0)
            check_keys(tile, tokens[b], lengths[b], per, block, windows, x * per)


@pytest.mark.parametrize("block, page", PAGES)
def test_pages_of_blocks(block, page, device):
    """Each lane has its page; behind the keys or the table that is behind the pool."""
    rng = random.Random(0)
    for _ in range(20):
        width, requests, beyond = rng.randint(1, 12), 3, 10**6
        table = [rng.randrange(1000) for _ in range(requests * width)]
        request, length = rng.randrange(requests), rng.randint(1, (width + 1) * page)
        length = rng.choice((length, -(-length // page) * page))  # or whole pages
        for x in range(-(-length // page), width):
            table[request * width + x] = -1
        n, found = rng.randrange(-(-length // block)), ints([0] * 32)
        call = device[f"pool_{block}_{page}"]
        assert call(ints(table), width, request, n, length, beyond, found)
        for lane in range(max(block // page, 1)):
            key = n * block + lane * page
            at = beyond
            if key < min(length, width * page):
                at = table[request * width + key // page]
            assert found[lane] == at
