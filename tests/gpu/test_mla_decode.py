"""Latent decode on CUDA tensors: model shapes, every way of loading tiles, cuts, addresses."""

import pytest
import torch

from ops_registry.accuracy import FORWARD
from ops_registry.attention.mla_decode import MLA_DECODE_FWD
from ops_registry.targets import aside
from tests import checks
from tileops.kernels.common.machine import H200, configuration, overriding

DECODE = MLA_DECODE_FWD.op
BF16, F16, NAN = torch.bfloat16, torch.float16, float("nan")
TILES = [
    dict(EARLY=early, TILES=tiles, BLOCK_N=block_n, stages=stages)
    for early in (0, 1)
    for tiles in (0, 1)
    for block_n, stages in ((64, 2), (32, 2), (32, 4))
]


def inputs(b, n, h, h_kv=1, d=512, pe=64, dtype=BF16, room=0):
    """k and k_pe are parts of one cache, which has room for more rows."""
    cache = torch.randn(b, n + room, h_kv, d + pe, device="cuda").to(dtype)
    cache[:, n:] = NAN
    q, q_pe = (torch.randn(b, h, x, device="cuda").to(dtype) for x in (d, pe))
    return q, q_pe, cache[:, :n, :, :d], cache[:, :n, :, d:]


def reference(q, q_pe, k, k_pe):
    (b, h, d), h_kv = q.shape, k.shape[2]
    queries = torch.cat([q, q_pe], -1).double().view(b, h_kv, h // h_kv, -1)
    keys = torch.cat([k, k_pe], -1).double()
    scores = torch.einsum("brgw,bnrw->brgn", queries, keys) * keys.shape[-1] ** -0.5
    o = torch.einsum("brgn,bnrd->brgd", scores.softmax(-1), keys[..., :d])
    return o.reshape(b, h, d)


def check(args, times=1):
    wanted = reference(*args)
    for _ in range(times):
        checks.assert_close(DECODE(*args), wanted, FORWARD[args[0].dtype])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("b, n, h", [(16, 4096, 128), (4, 8192, 128), (24, 2048, 16), (1, 70, 64)])
def test_models(b, n, h, dtype):
    check(inputs(b, n, h, dtype=dtype))


@pytest.mark.parametrize("numbers", TILES, ids=str)
@pytest.mark.parametrize("b, n", [(3, 1), (5, 1000), (80, 513), (1, 9000)])
def test_every_way_of_loading_tiles(numbers, b, n):
    """Again and again: what races is not wrong every time."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the numbers are for Hopper")
    numbers = {**configuration("mla_decode", "w576h64", H200), **numbers}
    with aside("tilelang"), overriding("mla_decode", numbers):
        check(inputs(b, n, 128, room=7), times=5)


@pytest.mark.parametrize("h, h_kv", [(1, 1), (3, 1), (71, 1), (6, 2), (5, 5), (48, 2), (256, 2)])
@pytest.mark.parametrize("d, pe", [(512, 64), (33, 7), (1, 1), (128, 0), (256, 64), (1024, 128)])
def test_heads_and_dims(h, h_kv, d, pe):
    check(inputs(2, 200, h, h_kv, d, pe))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 129, 4095])
@pytest.mark.parametrize("b", [1, 33, 67, 133])
def test_cuts(b, n):
    check(inputs(b, n, 128, room=1))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("h, h_kv", [(64, 1), (384, 2), (1024, 1)])
def test_blocks_of_heads(h, h_kv):
    for b, n in ((1, 300), (5, 1000), (140, 130)):
        check(inputs(b, n, h, h_kv, room=3), times=3)


def test_queries_that_share_memory():
    q, q_pe, k, k_pe = inputs(3, 200, 128)
    check((q[:1].expand(3, -1, -1), q_pe[:1].expand(3, -1, -1), k, k_pe))
    check((q[:, :1].expand(-1, 128, -1), q_pe[:, :1].expand(-1, 128, -1), k, k_pe))


@pytest.mark.parametrize("h", [16, 128])
def test_rows_far_away(h):
    """A cache of more than 2 ** 31 elements."""
    q, q_pe, k, k_pe = inputs(2, 1_900_000, h)
    k[:, :-1000] = 0
    o = DECODE(q * 0, q_pe * 0, k, k_pe)
    wanted = k[:, -1000:].double().sum(1).expand(2, h, 512) / 1_900_000
    assert (o.double() - wanted).norm() <= 6e-3 * wanted.norm()


def test_no_rows():
    assert (DECODE(*inputs(2, 0, 128)) == 0).all()
    assert DECODE(*inputs(0, 5, 128)).shape == (0, 128, 512)
