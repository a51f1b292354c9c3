"""The kernels of attention over selected blocks: unions, repetitions, sentinels, block sizes.

Over unions, and token by token.
"""

import contextlib

import pytest
import torch

from ops_registry.accuracy import FORWARD
from ops_registry.attention.nsa_varlen import NSA_VARLEN_FWD
from tests import checks, oracle
from tests.cases import nsa_packing
from tileops.kernels.attention.nsa_varlen import triton as triton_shared
from tileops.kernels.attention.nsa_varlen import triton_apart
from tileops.kernels.common.launch import launch
from tileops.kernels.common.machine import overriding

F16 = torch.float16
INF, NAN = float("inf"), float("nan")
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "TOKENS": 4, "warps": 4, "stages": 1}
SHARED = {"BLOCK_M": 64, "BLOCK_N": 16, "TOKENS": 16, "warps": 4, "stages": 1}
TOKEN = {"BLOCK_N": 16, "warps": 1, "stages": 1}


@pytest.fixture
def small():
    """Tiles so small that a request of few tokens takes many of them."""
    with overriding("nsa_varlen", SMALL):
        yield


@contextlib.contextmanager
def marking(apart):
    """Tiles are apart where their unions have more than apart / 64 of the selections."""
    numbers = SHARED | {"APART": apart}
    with (
        pytest.MonkeyPatch.context() as patch,
        overriding("nsa_varlen", numbers),
        overriding("nsa_varlen_apart", TOKEN),
    ):
        patch.setattr(triton_apart, "LONG", 0)
        patch.setattr(triton_apart, "LEAST_SIZE", 1)
        yield


@pytest.fixture
def launched(monkeypatch):
    """The arguments of the launches meanwhile, by kernel."""
    found = {}

    def noting(kernel, grid, *args, **options):
        found[kernel.__name__] = args
        launch(kernel, grid, *args, **options)

    for module in (triton_shared, triton_apart):
        monkeypatch.setattr(module, "launch", noting)
    return found


@pytest.fixture
def apart():
    """Every tile that selects something is apart."""
    with marking(0):
        yield


@pytest.fixture(params=["together", "apart"])
def either(request):
    """Unions, with the numbers of the files; token by token."""
    if request.param == "apart":
        request.getfixturevalue("apart")


@pytest.fixture
def attend(target):
    def call(*args, causal=True, scale=0.25, bs=4):
        return NSA_VARLEN_FWD.op(*args, causal, scale, bs, target)

    return call


def inputs(lens=(9, 0, 14), bs=4, h=4, h_kv=2, d=16, slots=5):
    packing = nsa_packing(list(lens), bs)
    tokens = sum(lens)
    q, k, v = (torch.randn(tokens, n, d).to(F16) for n in (h, h_kv, h_kv))
    most = max([0, *lens]) // bs + 2
    blocks = torch.randint(-1, most, (tokens, h_kv, slots)).to(torch.int32)
    counts = torch.randint(-1, slots + 3, (tokens, h_kv)).to(torch.int32)
    return q, k, v, blocks, counts, packing["offsets"], packing["token_indices"]


def check(attend, args, causal=True, scale=0.25, bs=4):
    o = attend(*args, causal=causal, scale=scale, bs=bs)
    wanted = oracle.nsa_fwd(*args[:6], causal, scale, min(bs, 2**40))
    checks.assert_close(o, wanted, FORWARD[F16], "o")
    return o


@pytest.mark.parametrize("group", [1, 3, 7, 16, 71, 130])
def test_groups(attend, group):
    check(attend, inputs((9, 0, 5), h=group, h_kv=1))


@pytest.mark.parametrize("group", [1, 2, 3, 16, 21])
@pytest.mark.parametrize("causal", [True, False])
def test_small_tiles(attend, small, group, causal):
    """One token of many heads to sixteen of one; a group of 21 takes two tiles."""
    check(attend, inputs((10, 0, 5), 3, group, 1), causal, bs=3)


@pytest.mark.parametrize("dim", [1, 20, 128, 200])
def test_dims(attend, dim):
    check(attend, inputs((9, 2), d=dim), scale=dim**-0.5)


@pytest.mark.parametrize("dim", [257, 576])
def test_dims_in_parts(attend, small, dim):
    check(attend, inputs((9, 2), d=dim), scale=dim**-0.5)


@pytest.mark.parametrize("slots", [0, 1, 17, 70])
def test_slots(attend, either, slots):
    check(attend, inputs((9, 0, 2), h=2, h_kv=1, slots=slots))


@pytest.mark.parametrize("bs", [1, 2, 3, 17, 48])
@pytest.mark.parametrize("causal", [True, False])
def test_block_sizes(attend, small, bs, causal):
    check(attend, inputs((1, 20, 0, 24), bs, 2, 1), causal, bs=bs)


@pytest.mark.parametrize("bs", [257, 2**20, 2**62])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_walked_one_by_one(attend, small, bs, causal):
    q, k, v, _, _, *packing = inputs((9, 0, 12))
    blocks = torch.tensor([2**31 - 1, 0, 1, 0, -1], dtype=torch.int32).expand(21, 2, 5)
    counts = torch.tensor([3, 5], dtype=torch.int32).expand(21, 2)
    check(attend, (q, k, v, blocks, counts, *packing), causal, bs=bs)


def test_large_blocks_side_by_side(attend):
    """Tokens at the end of a request select its two blocks, the others nothing."""
    q, k, v, blocks, counts, *packing = inputs((330,), h=1, h_kv=1)
    blocks[-4:] = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32)
    counts[:-4], counts[-4:] = 0, 4
    check(attend, (q, k, v, blocks, counts, *packing), bs=300)


@pytest.mark.parametrize("causal", [True, False])
def test_repetitions_count(attend, either, causal):
    """Tokens of a tile repeat different blocks differently often."""
    args = inputs((12, 20), h=2, h_kv=1, slots=20)
    args[3].clamp_(0, 2)
    args[4].copy_(torch.randint(0, 21, args[4].shape))
    check(attend, args, causal)


@pytest.mark.parametrize("dead", [-1, -(2**31), 30, 2**30])
def test_sentinels_contribute_nothing(attend, either, dead):
    q, k, v, blocks, counts, *packing = inputs((9, 5))
    sentinels = torch.full_like(blocks, dead)
    assert (attend(q, k, v, sentinels, counts, *packing) == 0).all()
    counts.fill_(3)
    wanted = attend(q, k, v, blocks, counts, *packing)
    blocks[..., 3:] = dead
    assert torch.equal(attend(q, k, v, blocks, counts, *packing), wanted)
    more = torch.cat([sentinels, blocks[..., :3]], -1)
    torch.testing.assert_close(attend(q, k, v, more, counts + 5, *packing), wanted)


@pytest.mark.parametrize("count", [-(2**31), -1, 2**31 - 1])
def test_counts_are_cut_to_the_slots(attend, either, count):
    args = inputs()
    args[4].fill_(count)
    o = check(attend, args)
    assert count > 0 or (o == 0).all()


def test_what_is_not_selected_does_not_leak(attend, either):
    q, k, v, _, _, *packing = inputs((9, 5, 16))
    blocks = torch.tensor([1, 0], dtype=torch.int32).expand(30, 2, 2)
    counts = torch.ones(30, 2, dtype=torch.int32)
    before = check(attend, (q, k, v, blocks, counts, *packing))
    selected = torch.zeros(30, dtype=torch.bool)
    selected[[4, 5, 6, 7, 13, 18, 19, 20, 21]] = True
    for poison in (NAN, INF):
        k[~selected], v[~selected] = poison, poison
        assert torch.equal(attend(q, k, v, blocks, counts, *packing), before)


@pytest.mark.parametrize("lens", [(), (0,), (0, 0), (1,), (1, 1, 1)])
def test_few_tokens(attend, either, lens):
    check(attend, inputs(lens))


@pytest.mark.parametrize("end", [0, 9, 14])
def test_rows_past_the_last_offset(attend, either, end):
    args = inputs((9, 5, 6))
    before = attend(*args)
    for x in args[:3]:
        x[end:] = NAN
    args[3][end:], args[4][end:] = 0, 5
    args[5].clamp_(max=end)
    o = attend(*args)
    assert torch.equal(o[:end], before[:end])
    assert (o[end:] == 0).all()


def test_rows_of_wider_tensors(attend, either):
    args = inputs((9, 5))
    joint = torch.randn(14, 9, 16).to(F16)
    check(attend, (joint[:, 1:5], joint[:, 5:7], joint[:, 7:], *args[3:]))


@pytest.mark.parametrize("group", [1, 3, 7, 16, 21])
@pytest.mark.parametrize("causal", [True, False])
def test_groups_apart(attend, apart, group, causal):
    """A group of 21 takes two parts."""
    check(attend, inputs((10, 0, 5), h=group, h_kv=1), causal)


@pytest.mark.parametrize("dim", [1, 20, 128])
def test_dims_apart(attend, apart, dim):
    check(attend, inputs((9, 2), d=dim), scale=dim**-0.5)


@pytest.mark.parametrize("bs", [3, 17, 32])
@pytest.mark.parametrize("causal", [True, False])
def test_block_sizes_apart(attend, apart, bs, causal):
    """Blocks of one step or two, with 1 key or 16 in the last; a request of two tiles."""
    check(attend, inputs((1, 20, 0, 40), bs, 2, 1), causal, bs=bs)


def test_some_tiles_apart(attend, launched):
    """Tiles of 32 tokens: the first and third select alike, the fourth nothing."""
    q, k, v, blocks, counts, *packing = inputs((160,), h=2, h_kv=1, slots=4)
    counts.fill_(4)
    blocks[:] = torch.rand(160, 1, 40).argsort(-1)[..., :4]
    blocks[:32] = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    blocks[64:96] = torch.tensor([0, 5, 9, 15], dtype=torch.int32)
    counts[96:128] = 0
    with marking(10):
        check(attend, (q, k, v, blocks, counts, *packing), causal=False)
    lengths = launched["nsa_apart_kernel"][6]
    assert (lengths[0, ::32, 0] < 0).tolist() == [False, True, False, False, True]


@pytest.mark.parametrize("causal", [True, False])
def test_keys_past_the_cut_of_a_block(attend, apart, causal):
    """What follows in a token's last block, or in the next request, is not read."""
    q, k, v, blocks, counts, *packing = inputs((21, 4), 16, h=2, h_kv=1, slots=3)
    counts.fill_(3)
    blocks[:] = torch.tensor([0, 1, 1], dtype=torch.int32)
    before = check(attend, (q, k, v, blocks, counts, *packing), causal, bs=16)
    end = 19 if causal else 21
    k[end:], v[end:] = NAN, NAN
    o = attend(q, k, v, blocks, counts, *packing, causal=causal, bs=16)
    assert torch.equal(o[:end], before[:end])


@pytest.mark.parametrize("lens, long", [((40, 40), True), ((39, 40), False)])
def test_long_requests_alone_have_tiles_apart(attend, apart, launched, monkeypatch, lens, long):
    """Long are two selections of five blocks of four keys, on average."""
    monkeypatch.setattr(triton_apart, "LONG", 2)
    check(attend, inputs(lens, h=2, h_kv=1))
    assert ("nsa_apart_kernel" in launched) == long
