"""Compressed attention's kernel: groups, dims, chunk sizes, packed lengths, padding."""

import pytest
import torch

from ops_registry.accuracy import FORWARD, LSE
from ops_registry.attention.nsa_compressed import NSA_COMPRESSED_FWD
from tests import checks, oracle
from tests.cases import nsa_packing
from tileops.kernels.common.machine import overriding

F16 = torch.float16
INF, NAN = float("inf"), float("nan")
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "warps": 4, "stages": 1}


@pytest.fixture(params=(0, 1), ids=("loop", "first"))
def small(request):
    """Tiles so small that a request of few tokens and chunks takes many of them; the first block
    of keys in the loop, and before it."""
    with overriding("nsa_compressed", {**SMALL, "FIRST": request.param}):
        yield


@pytest.fixture
def attend(target):
    def call(*args, scale=0.25, bs=4):
        return NSA_COMPRESSED_FWD.op(*args, scale, bs, target)

    return call


def inputs(lens=(9, 0, 21), bs=4, h=4, h_kv=2, dk=16, dv=16):
    packing = nsa_packing(list(lens), bs)
    chunks = int(packing["chunk_offsets"][-1])
    shapes = (sum(lens), h, dk), (chunks, h_kv, dk), (chunks, h_kv, dv)
    return (*(torch.randn(s).to(F16) for s in shapes), *packing.values())


def check(attend, args, bs=4, scale=0.25):
    o, lse = attend(*args, scale=scale, bs=bs)
    wanted = oracle.nsa_compressed_fwd(*args[:5], scale, bs)
    checks.assert_close(o, wanted[0], FORWARD[F16], "o")
    checks.assert_close(lse, wanted[1], LSE[F16], "lse")
    return o, lse


@pytest.mark.parametrize("group", [1, 3, 7, 16, 71, 130])
def test_groups(attend, group):
    check(attend, inputs(h=group, h_kv=1))
    check(attend, inputs((5, 1), h=3 * group, h_kv=3))


@pytest.mark.parametrize("group", [1, 3, 16, 21])
def test_small_tiles(attend, small, group):
    """A group of 21 takes two tiles of heads; 40 chunks take three blocks."""
    check(attend, inputs((40, 0, 7), 1, group, 1), bs=1)


@pytest.mark.parametrize("dk, dv", [(1, 1), (8, 48), (80, 20), (128, 64), (200, 130)])
def test_dims(attend, dk, dv):
    check(attend, inputs(dk=dk, dv=dv), scale=dk**-0.5)


@pytest.mark.parametrize("dk, dv", [(257, 16), (16, 257), (576, 300)])
def test_dims_in_parts(attend, small, dk, dv):
    check(attend, inputs((9, 0, 12), dk=dk, dv=dv), scale=dk**-0.5)


@pytest.mark.parametrize("bs", [1, 2, 3, 32])
def test_chunk_sizes(attend, small, bs):
    check(attend, inputs((1, 33, 0, 64), bs, 2, 1), bs)


@pytest.mark.parametrize("bs", [2**31, 2**62])
def test_a_chunk_longer_than_every_request(attend, bs):
    o, lse = check(attend, inputs(bs=bs), bs)
    assert (o == 0).all()
    assert (lse == -INF).all()


def test_many_requests(attend):
    lens = torch.randint(0, 4, (70,)).tolist()
    check(attend, inputs(lens, 2, 2, 1), bs=2)


@pytest.mark.parametrize("lens", [(), (0,), (0, 0), (3,), (4,)])
def test_few_tokens(attend, lens):
    check(attend, inputs(lens))


def test_what_is_not_closed_does_not_leak(attend, small):
    q, k, v, offsets, chunk_offsets, tokens = inputs((9, 5, 6))
    before = check(attend, (q, k, v, offsets, chunk_offsets, tokens))
    for poison in (NAN, INF):
        # Chunks 2, 4 and 6 are the open ones of the three requests.
        k[[2, 4, 6]], v[[2, 4, 6]] = poison, poison
        after = attend(q, k, v, offsets, chunk_offsets, tokens)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("end", [0, 9, 14, 16])
def test_rows_past_the_last_offset(attend, end):
    args = inputs((9, 5, 6))
    before = attend(*args)
    args[0][end:] = NAN
    args[3].clamp_(max=end)
    args[4].copy_(torch.tensor([0, *(-(-torch.diff(args[3]) // 4)).cumsum(0)]))
    o, lse = attend(*args)
    whole = 9 if end >= 9 else 0
    assert torch.equal(o[:whole], before[0][:whole])
    assert (o[end:] == 0).all()
    assert (lse[:, end:] == -INF).all()


def test_rows_of_wider_tensors(attend):
    q, k, v, *packing = inputs(h=4, h_kv=2)
    wide = torch.randn(30, 9, 16).to(F16)
    kv = torch.randn(len(k), 5, 16).to(F16)
    check(attend, (wide[:, 1:5], kv[:, :2], kv[:, 3:], *packing))
