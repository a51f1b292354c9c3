"""Latent decode's kernel: heads, dims, lengths, caches as views, every cut into ranges."""

import pytest
import torch

from ops_registry.accuracy import FORWARD
from ops_registry.attention.mla_decode import MLA_DECODE_FWD
from tests import checks, oracle
from tileops.kernels.common import recorder
from tileops.kernels.common.machine import Machine, overriding

F16, NAN, INF = torch.float16, float("nan"), float("inf")
SMALL = {
    "BLOCK_H": 16, "BLOCK_N": 16, "EARLY": 0, "TILES": 0, "programs": 1, "warps": 4, "stages": 1,
}  # fmt: skip


@pytest.fixture
def decode(target):
    return lambda *args: MLA_DECODE_FWD.op(*args, target)


def inputs(b=2, n=37, h=4, h_kv=1, d=32, pe=8, dtype=F16):
    shapes = (b, h, d), (b, h, pe), (b, n, h_kv, d), (b, n, h_kv, pe)
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def check(decode, args):
    o = decode(*args)
    checks.assert_close(o, oracle.mla_decode_fwd(*args), FORWARD[F16])
    return o


@pytest.mark.parametrize("group", [1, 3, 16, 17, 71, 128])
@pytest.mark.parametrize("h_kv", [1, 3])
def test_groups(decode, group, h_kv):
    check(decode, inputs(h=group * h_kv, h_kv=h_kv))


@pytest.mark.parametrize(
    "d, pe", [(1, 1), (1, 0), (16, 0), (24, 6), (33, 7), (64, 64), (96, 48), (256, 64), (512, 64)]
)
def test_dims(decode, d, pe):
    check(decode, inputs(b=1, h=5, d=d, pe=pe))


@pytest.mark.parametrize("d, pe", [(576, 64), (1024, 128), (16, 512)])
def test_dims_beyond_models(decode, d, pe):
    check(decode, inputs(b=1, h=3, n=20, d=d, pe=pe))


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 63, 64, 65, 130])
def test_lengths(decode, n):
    o = check(decode, inputs(n=n))
    assert n or (o == 0).all()


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize(
    "processors, b, n",
    [(1, 3, 90), (2, 5, 40), (5, 1, 300), (7, 3, 90), (13, 7, 40), (300, 1, 300), (6, 11, 1),
     (5, 2, 0)],
)  # fmt: skip
def test_ranges(decode, monkeypatch, processors, b, n, early):
    """Ranges of several rows, parts of one, both at once, and none."""
    monkeypatch.setattr(recorder, "machine_of", lambda index: Machine("cuda", 90, processors))
    with overriding("mla_decode", {**SMALL, "EARLY": early}):
        check(decode, inputs(b=b, n=n, h=40, h_kv=2, d=20, pe=3))


@pytest.mark.parametrize("d, pe", [(32, 16), (64, 0)])
@pytest.mark.parametrize("h_kv", [1, 2])
@pytest.mark.parametrize("n", [1, 16, 37])
def test_blocks_through_descriptors(decode, d, pe, h_kv, n):
    q, q_pe, _, _ = inputs(h=4, h_kv=h_kv, d=d, pe=pe)
    cache = torch.randn(2, n + 3, h_kv, d + pe).half()
    cache[:, n:] = NAN
    args = q, q_pe, cache[:, :n, :, :d], cache[:, :n, :, d:]
    with overriding("mla_decode", {**SMALL, "TILES": 1}):
        check(decode, args)


# ----------------------------------------------------------------------------------- caches


@pytest.mark.parametrize("h_kv", [1, 2])
@pytest.mark.parametrize("pe", [8, 5, 0])
def test_views_of_one_cache_are_not_copied(decode, monkeypatch, h_kv, pe):
    """Latent and rotated part side by side, in a cache with room for more rows."""
    q, q_pe, _, _ = inputs(h=4, h_kv=h_kv, pe=pe)
    room = torch.randn(2, 50, h_kv, 32 + pe).half()
    room[:, 37:] = NAN
    args = q, q_pe, room[:, :37, :, :32], room[:, :37, :, 32:]
    wanted = oracle.mla_decode_fwd(*args)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    checks.assert_close(decode(*args), wanted, FORWARD[F16])


def test_requests_share_a_cache(decode):
    q, q_pe, k, k_pe = inputs(b=3)
    check(decode, (q, q_pe, k[:1].expand_as(k), k_pe[:1].expand_as(k_pe)))


def test_rows_that_repeat(decode):
    q, q_pe, k, k_pe = inputs()
    check(decode, (q, q_pe, k[:, :1].expand_as(k), k_pe[:, :1].expand_as(k_pe)))


@pytest.mark.parametrize("poison", [NAN, INF])
def test_requests_and_heads_do_not_touch_each_other(decode, poison):
    q, q_pe, k, k_pe = inputs(b=3, h=4, h_kv=2)
    wanted = decode(q, q_pe, k, k_pe)
    k[1, :, 1] = poison
    o = decode(q, q_pe, k, k_pe)
    assert torch.equal(o[[0, 2]], wanted[[0, 2]]) and torch.equal(o[1, :2], wanted[1, :2])
    assert o[1, 2:].isnan().all()


def test_large_logits(decode):
    q, q_pe, k, k_pe = inputs(n=50)
    check(decode, (q * 200, q_pe, k * 20, k_pe))


def test_what_is_too_large_is_refused_in_words(target):
    args = inputs(b=1, n=1, h=1, d=1025, pe=0)
    with pytest.raises(ValueError, match="serves keys of at most 1152 columns"):
        MLA_DECODE_FWD.op(*args, target)
