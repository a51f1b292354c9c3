"""Block selection's kernel: exact ids, groups, widths, rounds, ties, padding."""

import pytest
import torch

from ops_registry.attention.nsa_topk import NSA_TOPK
from tests import oracle
from tests.cases import nsa_packing
from tileops.kernels.common.machine import overriding

BF16, F16 = torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "warps": 4, "stages": 1}


@pytest.fixture
def small():
    """Tiles so small that a request of few tokens and chunks takes many of them."""
    with overriding("nsa_topk", SMALL):
        yield


@pytest.fixture
def select(target):
    def call(*args, selected=6, scale=0.25, bs=4):
        return NSA_TOPK.op(*args, scale, selected, bs, target)

    return call


def inputs(lens=(9, 0, 21), bs=4, h=4, h_kv=2, d=16, dtype=F16):
    packing = nsa_packing(list(lens), bs)
    shapes = (sum(lens), h, d), (int(packing["chunk_offsets"][-1]), h_kv, d)
    return (*(torch.randn(s).to(dtype) for s in shapes), *packing.values())


def check(select, args, selected=6, scale=0.25, bs=4):
    ids = select(*args, selected=selected, scale=scale, bs=bs)
    assert torch.equal(ids, oracle.nsa_topk(*args[:4], scale, selected, bs))
    return ids


@pytest.mark.parametrize("group", [1, 3, 7, 16, 71, 130])
def test_groups(select, small, group):
    check(select, inputs((21, 0, 2), h=group, h_kv=1))
    check(select, inputs((5, 1), h=3 * group, h_kv=3))


@pytest.mark.parametrize("selected", [1, 2, 3, 16, 17, 40])
def test_widths(select, small, selected):
    """Over three blocks of chunks; more than a block's width takes several rounds."""
    args = inputs((40, 5), 1, 2, 1)
    ids = select(*args, selected=selected, bs=1)
    oracle.check_nsa_topk(ids, oracle.nsa_topk_scores(*args[:4], 0.25, 1))


def test_as_configured(select):
    """The tiles that devices run: tokens that straddle the ends of requests, 16 slots of 20."""
    check(select, inputs((40, 0, 7), 2, 16, 1, 32), selected=16, bs=2)


@pytest.mark.parametrize("dim", [1, 8, 80, 200, 257, 576])
def test_dims(select, small, dim):
    args = inputs((9, 12), d=dim)
    ids = select(*args, scale=dim**-0.5)
    oracle.check_nsa_topk(ids, oracle.nsa_topk_scores(*args[:4], dim**-0.5, 4))


@pytest.mark.parametrize("bs", [1, 3, 32, 2**62])
def test_block_sizes(select, small, bs):
    ids = select(*inputs((1, 20, 0, 40), min(bs, 100), 2, 1), bs=bs, selected=3)
    if bs > 100:
        assert (ids == torch.tensor([0, -1, -1])).all()


def test_the_scaled_query_is_rounded_before_the_product(select):
    args = inputs((100,), 4, 16, 1, 64, dtype=BF16)
    wide = oracle.nsa_topk(args[0].double(), *args[1:4], 1 / 3, 8, 4)
    ids = check(select, args, 8, 1 / 3)
    assert not torch.equal(wide, ids)


def test_equal_scores_keep_the_lower_id(select, small):
    args = inputs((80,), 4)
    args[0].zero_()
    ids = check(select, args)
    assert (ids[79] == torch.tensor([0, 18, 19, 1, 2, 3])).all()


def test_what_is_not_closed_does_not_leak(select, small):
    q, k, *packing = inputs((9, 5, 6))
    before = check(select, (q, k, *packing), 3)
    for poison in (NAN, INF):
        # Chunks 2, 4 and 6 are the open ones of the three requests.
        k[[2, 4, 6]] = poison
        assert torch.equal(select(q, k, *packing, selected=3), before)


@pytest.mark.parametrize("lens", [(), (0,), (0, 0), (3,), (1, 1, 1)])
def test_few_tokens(select, small, lens):
    check(select, inputs(lens))


@pytest.mark.parametrize("end", [0, 9, 14])
def test_rows_past_the_last_offset(select, small, end):
    args = inputs((9, 5, 6))
    before = select(*args)
    args[0][end:] = NAN
    args[2].clamp_(max=end)
    ids = select(*args)
    assert torch.equal(ids[:end], before[:end])
    assert (ids[end:] == -1).all()
