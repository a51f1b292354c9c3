"""Which latent rows the Hopper kernel serves, and how it gathers, weighs and stores them.

What the launcher decides is read from the launches that it asks for. The device functions run on
the host, a warp at a time (`tests/warp.h`).
"""

import ctypes
import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("tilelang")

from tests.host_warp import compiled, fragment, pointer
from tests.tilelang_calls import indexed, latent, launch_of, launches_of, meta
from tileops.kernels.common.machine import H200
from tileops.kernels.common.tilelang_latent import queries_by_head
from tileops.kernels.common.triton_latent import past_rows, schedule

SLOTS = HEADS = 64  # of a tile
BF16 = torch.bfloat16

# ---------------------------------------------------------------------------------- launcher

NAMES = (
    "q", "q_pe", "k", "k_pe", "indices", "o", "parts", "part_sums", "scale", "rows", "row_tiles",
    "range_tiles", "items", "head_blocks", "queries", "first", "phase", "stride", "ctas",
)  # fmt: skip


def asked(call):
    """The arguments of the launch by name, and what it is made for."""
    launch = launch_of(call)
    return dict(zip(NAMES, launch.args, strict=True)), launch.constants


CONSTANTS = [
    (latent(), {"dtype": "bfloat16", "gather": False, "causal": False, "whole": False}),
    (latent(), {"pair": True}),
    (latent(heads=64), {"pair": False}),
    (latent(heads=192), {"pair": False}),
    (latent(keys=256), {"gather": False, "whole": True}),
    (latent(batch=66), {"whole": True}),
    (latent(batch=50), {"whole": False}),
    (latent(batch=132, heads=64, dtype=torch.float16), {"dtype": "float16", "whole": True}),
    (indexed(), {"dtype": "bfloat16", "gather": True, "causal": True, "pair": False}),
    (indexed(is_causal=False), {"gather": True, "causal": False}),
    (indexed(batch=1, rows=200), {"gather": True, "whole": False}),
    (indexed(batch=1, rows=270, dtype=torch.float16), {"dtype": "float16", "whole": True}),
]


@pytest.mark.parametrize("call, wanted", CONSTANTS, ids=range(len(CONSTANTS)))
def test_what_a_launch_is_made_for(call, wanted, compiler):
    _, constants = asked(call)
    assert {name: constants[name] for name in wanted} == wanted


@pytest.mark.parametrize("heads, heads_kv", [(64, 1), (128, 1), (384, 2), (1024, 1)])
@pytest.mark.parametrize("build, rows", [(latent, {"batch": 7}), (indexed, {"rows": 5})])
def test_parts_are_joined(build, rows, heads, heads_kv, compiler):
    """Each range has room for the row that ends in it and the row that begins in it."""
    call = build(heads=heads, heads_kv=heads_kv, **rows)
    given, constants = asked(call)
    blocks = heads // heads_kv // HEADS
    ranges = given["items"] // blocks
    assert given["head_blocks"] == blocks and not constants["whole"]
    assert given["rows"] == given["o"].shape[0] * heads_kv
    assert ranges == -(-given["rows"] * given["row_tiles"] // given["range_tiles"])
    assert given["ctas"] == min(given["items"], H200.processors)
    assert given["parts"].shape == (ranges, 2, blocks, HEADS, 512)
    assert given["part_sums"].shape == (ranges, 2, blocks, 2, HEADS)
    assert given["parts"].dtype == given["part_sums"].dtype == torch.float32
    _, join = launches_of(call)
    joined = dict(zip(join.kernel.arg_names, join.args, strict=False)) | join.constexprs
    assert joined["HEADS_KV"] == heads_kv and joined["GROUP"] == heads // heads_kv
    assert joined["parts"].shape == given["parts"].shape
    assert joined["part_sums"].shape == given["part_sums"].shape
    assert all(joined[x] == given[x] for x in ("rows", "row_tiles", "range_tiles"))
    assert joined["o"].numel() == given["o"].numel()


@pytest.mark.parametrize("call", [latent(batch=66), indexed(rows=300)], ids=["mla", "dsa"])
def test_whole_rows_are_written_at_once(call, compiler):
    given, _ = asked(call)
    assert len(launches_of(call)) == 1
    assert given["parts"].shape == given["part_sums"].shape == (1,)
    assert given["range_tiles"] % given["row_tiles"] == 0


def test_slots_of_every_query(compiler):
    given, _ = asked(indexed(batch=2, rows=3, heads=128, heads_kv=2, slots=70))
    assert given["indices"].shape == (2 * 3 * 2, 70) and given["queries"] == 3
    assert given["row_tiles"] == 2
    given, _ = asked(latent(keys=129))
    assert given["indices"].shape == (1, 1) and given["queries"] == 1
    assert given["row_tiles"] == 3


def test_scales_and_limits(compiler):
    given, _ = asked(latent())
    assert given["scale"] == pytest.approx(576**-0.5 * np.log2(np.e))
    given, _ = asked(indexed(sm_scale=0.25, stride_kv=4, q_start_index_s=10))
    assert given["scale"] == pytest.approx(0.25 * np.log2(np.e))
    assert tuple(given[x] for x in ("first", "phase", "stride")) == past_rows(10, 4)
    given, _ = asked(indexed(is_causal=False))
    assert given["scale"] == pytest.approx(576**-0.5 * np.log2(np.e))
    assert tuple(given[x] for x in ("first", "phase", "stride")) == (0, 0, 1)


def test_caches_are_read_where_they_are(compiler):
    """In a cache with room for more rows; and the two parts of an indexed one."""
    cache = meta(3, 4096, 1, 576)[:, :900]
    given, _ = asked(latent(k=cache[..., :512], k_pe=cache[..., 512:]))
    assert given["k"].stride() == given["k_pe"].stride() == cache.stride()
    given, _ = asked(indexed(kv=cache[:2]))
    assert given["k"].shape == (2, 900, 1, 512) and given["k_pe"].shape == (2, 900, 1, 64)
    assert given["k"].stride() == given["k_pe"].stride() == cache.stride()
    assert given["k"].storage_offset() == 0 and given["k_pe"].storage_offset() == 512


def test_queries_that_the_copy_engine_can_read_are_not_copied():
    wide = torch.randn(2, 3, 5, 80).to(BF16)
    odd = torch.randn(2, 3, 5, 65).to(BF16)
    for x, copied in (
        (wide, False),
        (wide[..., 16:], False),
        (wide[..., 8:72], False),
        (wide[..., ::2], True),  # columns apart
        (wide[..., 4:68], True),  # 8 bytes off
        (odd[..., :64], True),  # rows of 130 bytes
        (wide[:, :, ::2], False),
        (wide[0], False),
        (wide.transpose(0, 1), True),  # tokens at no one stride
    ):
        found = queries_by_head(x)
        expected = x.reshape(-1, *x.shape[-2:]).transpose(0, 1)
        assert torch.equal(found, expected)
        assert (found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()) == copied
        assert found.stride(2) == 1 and not found.data_ptr() % 16
        assert all(step * 2 % 16 == 0 for step in found.stride()[:2])


# ------------------------------------------------------------------------- device functions

SHIM = r"""
#include "warp.h"
#include "rows.h"

// All that a program serves, five numbers of each.
extern "C" int walk(int cta, int ctas, int items, int head_blocks, int rows, int row_tiles,
                    int range_tiles, int *found, int most) {
  int at[5] = {cta, -1}, count = 0;
  while (count < most && attn::next_row(at, ctas, items, head_blocks, rows, row_tiles,
                                        range_tiles)) {
    std::copy(at, at + 5, found + 5 * count++);
  }
  return count;
}

extern "C" int last_row(bool causal, int query, long long first, long long phase,
                        long long stride, int rows) {
  return causal ? attn::last_row<true>(query, first, phase, stride, rows)
                : attn::last_row<false>(query, first, phase, stride, rows);
}

// names [32, 2] and live [32, 2], of every lane.
extern "C" int seek(const int *given, int tile, int end, int slots, int last, int *names,
                    unsigned *live) {
  int found[32];
  bool met = run_warp([=, &found] {
    int x = threadIdx.x;
    found[x] = attn::seek(given, tile, end, slots, last, names + 2 * x, live + 2 * x);
  });
  return met && std::count(found, found + 32, found[0]) == 32 ? found[0] : -1;
}

extern "C" void first_slots(int left, unsigned *live) { attn::first_slots(left, live); }

extern "C" bool gather(int panels, char *tile, const void *rows, long long stride,
                       const int *names, const unsigned *live, int warp) {
  shared_memory = tile;
  return run_warp([=] {
    const int *own = names + threadIdx.x % 32 * 2;
    panels == 1 ? attn::gather<1>(tile, rows, stride, own, live)
                : attn::gather<4>(tile, rows, stride, own, live);
  }, warp);
}

// s [32, 32]: what the lanes hold of a 64 x 64 tile.
extern "C" bool hide_dead(float *s, unsigned low, unsigned high, int warp) {
  return run_warp([=] { attn::hide_dead(s + threadIdx.x % 32 * 32, low, high); }, warp);
}

// l [32, 2]
extern "C" bool add_up(float *l) {
  return run_warp([=] { attn::add_up(l + threadIdx.x * 2); });
}

// What one warp puts into shared memory [64] and the same warp of the other group takes.
extern "C" bool pass_factors(const float *x, float *shared, float *to, int warp) {
  return run_warp([=] { attn::put_factors(shared, x + threadIdx.x % 32 * 2); }, warp) &&
         run_warp([=] { attn::get_factors(to + threadIdx.x % 32 * 2, shared); }, warp);
}

extern "C" bool write_part(const float *x, float *to, int warp) {
  return run_warp([=] { attn::write_part<256, 512>(x + threadIdx.x % 32 * 128, to); }, warp);
}

extern "C" bool write_sums(float *to, const float *m, const float *l, float scale, int warp) {
  return run_warp([=] {
    int x = threadIdx.x % 32 * 2;
    attn::write_sums(to, m + x, l + x, scale);
  }, warp);
}
"""
WARPS = range(4)  # of a group
NUMBERS = 5  # that `next_row` keeps


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    found = compiled(SHIM, tmp_path_factory.mktemp("latent"), latent=True)
    for name in ("gather", "hide_dead", "add_up", "pass_factors", "write_part", "write_sums"):
        getattr(found, name).restype = ctypes.c_bool
    return found


def served(device, ctas, items, blocks, rows, row_tiles, range_tiles):
    """(item, rank, row, begin, end) of every row of every program, in its order."""
    most = (rows + 1) * items
    room = np.zeros((most, NUMBERS), np.int32)
    for cta in range(ctas):
        work = (ctas, items, blocks, rows, row_tiles, range_tiles)
        count = device.walk(cta, *work, pointer(room), most)
        assert count < most
        yield from room[:count].tolist()


def plans():
    """Schedules of the launcher, and any other."""
    rng = random.Random(0)
    for uneven in (False, True):
        for rows in (1, 2, 7, 66, 132, 133, 300, 700):
            for slots in (1, 64, 65, 900, 2048):
                for blocks in (1, 2, 3):
                    running = H200.processors // blocks
                    plan = schedule(rows, slots, SLOTS, running, uneven)
                    yield rows, plan.row_tiles, plan.range_tiles, blocks, H200.processors
    for _ in range(150):
        rows, row_tiles = rng.randint(1, 30), rng.randint(1, 20)
        range_tiles = rng.randint(1, 2 * row_tiles + 3)
        yield rows, row_tiles, range_tiles, rng.randint(1, 4), rng.randint(1, 40)


def test_programs_serve_every_tile_of_every_row_once(device):
    for rows, row_tiles, range_tiles, blocks, processors in plans():
        ranges = -(-rows * row_tiles // range_tiles)
        items = ranges * blocks
        work = min(items, processors), items, blocks, rows, row_tiles, range_tiles
        times = np.zeros((rows, blocks, row_tiles), np.int32)
        places = set()
        for item, rank, row, begin, end in served(device, *work):
            own, block = divmod(item, blocks)
            assert row == rows - 1 - rank  # the last rows come first
            assert 0 <= begin < end <= row_tiles
            assert rank * row_tiles + begin >= own * range_tiles
            assert rank * row_tiles + end <= (own + 1) * range_tiles
            times[row, block, begin:end] += 1
            if end - begin < row_tiles:  # where the part goes
                place = own, begin == 0, block
                assert place not in places
                places.add(place)
        assert (times == 1).all(), work


def test_each_program_serves_the_rows_of_a_range_in_order(device):
    found = list(served(device, 1, 6, 2, 5, 3, 5))
    assert [tuple(x) for x in found] == [
        (item, rank, 4 - rank, begin, end)
        for first, shares in ((0, ((0, 0, 3), (1, 0, 2))), (1, ((1, 2, 3), (2, 0, 3), (3, 0, 1))),
                              (2, ((3, 1, 3), (4, 0, 3))))
        for item in (2 * first, 2 * first + 1)
        for rank, begin, end in shares
    ]  # fmt: skip


FAR = 2**31 - 1


@pytest.mark.parametrize("stride", [1, 2, 4, 64, 1000, 2**31, 2**62])
@pytest.mark.parametrize("start", [0, 1, 3, 62, 63, 64, 999, 2**31 - 2, 2**40, 2**62])
def test_the_last_row_of_a_query(start, stride, device):
    first, phase, step = (ctypes.c_longlong(x) for x in past_rows(start, stride))
    for rows in (1, 17, 5000, FAR):
        for query in (0, 1, 2, 3, 62, 63, 64, 1000, FAR):
            seen = min((start + query + 1) // stride, rows)
            assert device.last_row(True, query, first, phase, step, rows) == seen - 1
            assert device.last_row(False, query, first, phase, step, rows) == rows - 1


def bits(words):
    """[64] of two words of 32."""
    return np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)


@pytest.mark.parametrize("slots", [0, 1, 63, 64, 65, 200, 256])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_tiles_without_a_live_slot_are_passed_over(slots, share, device):
    rng = np.random.default_rng(slots)
    last, tiles = 500, max(-(-slots // SLOTS), 1)
    dead = rng.choice([-1, -(2**31), 501, 2**31 - 1], tiles * SLOTS)
    given = np.where(rng.random(tiles * SLOTS) < share, rng.integers(0, 501, dead.shape), dead)
    given = given.astype(np.int32)
    beyond = np.arange(tiles * SLOTS) >= slots
    given[beyond] = 7  # another query's
    alive = (given >= 0) & (given <= last) & ~beyond
    for end in range(1, tiles + 1):
        for tile in range(tiles + 1):
            names = np.full((32, 2), 99, np.int32)
            live = np.full((32, 2), 99, np.uint32)
            found = device.seek(
                pointer(given), tile, end, slots, last, pointer(names), pointer(live)
            )
            wanted = [t for t in range(tile, end) if alive[t * SLOTS : (t + 1) * SLOTS].any()]
            assert found == (wanted[0] if wanted else max(tile, end))
            if wanted:
                own = slice(found * SLOTS, (found + 1) * SLOTS)
                assert all(np.array_equal(bits(words), alive[own]) for words in live)
                seen = np.where(beyond[own], -1, given[own])
                assert np.array_equal(names.T.ravel(), seen)


def test_the_first_slots_of_a_tile(device):
    for left in (*range(1, 66), 127, 5000, FAR):
        live = np.zeros(2, np.uint32)
        device.first_slots(left, pointer(live))
        assert np.array_equal(bits(live), np.arange(SLOTS) < left)


@pytest.mark.parametrize("panels", [1, 4])
def test_rows_are_gathered_into_swizzled_panels(panels, device):
    """[panels, 64 rows, 8 places] of 16 bytes; place p of row r holds what is p ^ r % 8."""
    rng = np.random.default_rng(panels)
    rows = rng.integers(1, 256, (200, 10, 8, 16), np.uint8)  # wider ones than are gathered
    names = rng.integers(0, 200, SLOTS).astype(np.int32)
    alive = rng.random(SLOTS) < 0.7
    names[~alive] = rng.choice([-1, -(2**31), 2**31 - 1], SLOTS)[~alive]
    live = np.packbits(alive, bitorder="little").view(np.uint32)
    held = np.ascontiguousarray(names.reshape(2, 32).T)
    tile = np.full((panels, SLOTS, 8, 16), 255, np.uint8)
    for warp in WARPS:
        assert device.gather(
            panels, pointer(tile), pointer(rows), ctypes.c_longlong(rows[0].nbytes),
            pointer(held), pointer(live), warp,
        )  # fmt: skip
    for r in range(SLOTS):
        expected = rows[names[r], :panels] if alive[r] else np.zeros((panels, 8, 16), np.uint8)
        assert np.array_equal(tile[:, r, np.arange(8) ^ r % 8], expected)


@pytest.mark.parametrize("warp", WARPS)
def test_dead_slots_are_hidden(warp, device):
    rng = np.random.default_rng(warp)
    tile = rng.standard_normal((16, SLOTS), np.float32)
    for share in (0.0, 0.5, 1.0):
        alive = rng.random(SLOTS) < share
        low, high = np.packbits(alive, bitorder="little").view(np.uint32).tolist()
        held = fragment(tile)
        arguments = ctypes.c_uint(low), ctypes.c_uint(high), warp
        assert device.hide_dead(pointer(held), *arguments)
        assert np.array_equal(held, fragment(np.where(alive, tile, np.float32(-np.inf))))


def of_rows(x):
    """What the lanes of a warp hold of its 16 numbers, one of a row: [32, 2]."""
    return np.ascontiguousarray(np.repeat(x.reshape(2, 8), 4, axis=1).T)


def test_sums_of_a_row(device):
    own = np.random.default_rng(0).integers(0, 100, (32, 2)).astype(np.float32)
    added = own.copy()
    assert device.add_up(pointer(added))
    assert np.array_equal(added, np.repeat(own.reshape(8, 4, 2).sum(1), 4, axis=0))


def test_factors_reach_the_same_rows_of_the_other_group(device):
    factors = np.random.default_rng(0).standard_normal(HEADS).astype(np.float32)
    shared = np.zeros(HEADS, np.float32)
    for warp in WARPS:
        given = of_rows(factors[16 * warp : 16 * warp + 16])
        taken = np.zeros((32, 2), np.float32)
        assert device.pass_factors(*map(pointer, (given, shared, taken)), warp)
        assert np.array_equal(taken, given)
    assert np.array_equal(shared, factors)


def test_parts_are_written_as_they_are(device):
    tile = np.random.default_rng(0).standard_normal((HEADS, 256), np.float32)
    part = np.full((HEADS, 512), 7, np.float32)
    for warp in WARPS:
        held = fragment(tile[16 * warp : 16 * warp + 16])
        assert device.write_part(pointer(held), pointer(part), warp)
    assert np.array_equal(part[:, :256], tile) and (part[:, 256:] == 7).all()


def test_sums_of_parts(device):
    """Anchors are in base 2; -inf is that of a row without a live slot, at any scale."""
    rng = np.random.default_rng(0)
    anchors, sums = rng.standard_normal((2, HEADS), np.float32)
    anchors[5::11] = -np.inf
    written = np.zeros((2, HEADS), np.float32)
    for scale in (0.1, 0.0):
        for warp in WARPS:
            own = slice(16 * warp, 16 * warp + 16)
            held = [of_rows(x[own]) for x in (anchors, sums)]
            arguments = map(pointer, held)
            assert device.write_sums(pointer(written), *arguments, ctypes.c_float(scale), warp)
        with np.errstate(invalid="ignore"):
            scaled = np.where(anchors == -np.inf, anchors, anchors * np.float32(scale))
        assert np.array_equal(written[0], scaled) and np.array_equal(written[1], sums)
