"""Attention over indexed rows on CUDA tensors: model shapes, every way of loading tiles, names."""

import pytest
import torch

from ops_registry.accuracy import FORWARD
from ops_registry.attention.dsa_decode import DSA_DECODE_FWD
from ops_registry.targets import aside
from tests import checks
from tileops.kernels.common.machine import H200, configuration, overriding

ATTEND = DSA_DECODE_FWD.op
BF16, F16, NAN, I32 = torch.bfloat16, torch.float16, float("nan"), torch.int32
TILES = [
    dict(EARLY=early, BLOCK_N=block_n, stages=stages)
    for early in (0, 1)
    for block_n, stages in ((64, 2), (32, 2), (32, 4))
]


def names(b, s, h_kv, s_kv, slots, dead):
    """Distinct rows in random slots; a share of the slots is dead in one way or another."""
    found = torch.rand(b, s, h_kv, max(s_kv, slots), device="cuda").argsort(-1)[..., :slots]
    odd = torch.tensor([-1, s_kv, 2**31 - 1, -(2**31)], device="cuda")
    pad = odd[torch.randint(4, found.shape, device="cuda")]
    drop = (torch.rand(found.shape, device="cuda") < dead) | (found >= s_kv)
    return torch.where(drop, pad, found).to(I32)


def inputs(b, s, s_kv, h, h_kv=1, d=512, tail=64, slots=2048, dead=0.1, dtype=BF16):
    q = torch.randn(b, s, h, d + tail, device="cuda").to(dtype)
    kv = torch.randn(b, s_kv, h_kv, d + tail, device="cuda").to(dtype)
    return q, kv, names(b, s, h_kv, s_kv, slots, dead)


def reference(q, kv, index, tail, stride, start, scale, causal):
    """Also the rows that no live slot names are NaN from here on."""
    b, s, h, width = q.shape
    s_kv, h_kv = kv.shape[1:3]
    index = index.long()
    live = (index >= 0) & (index < s_kv)
    if causal:
        position = start + torch.arange(s, device="cuda")
        live &= (index + 1) * stride - 1 <= position[None, :, None, None]
    weight = torch.zeros(b, s, h_kv, s_kv + 1, dtype=torch.bool, device="cuda")
    seen = weight.scatter_(-1, torch.where(live, index, s_kv), True)[..., :s_kv]
    kv.masked_fill_(~seen.any(1).transpose(1, 2)[..., None], NAN)
    keys = kv.double().nan_to_num()
    queries = q.double().view(b, s, h_kv, h // h_kv, width)
    scores = torch.einsum("bsrgw,bnrw->bsrgn", queries, keys) * (scale or width**-0.5)
    p = scores.masked_fill(~seen[:, :, :, None], -torch.inf).softmax(-1).nan_to_num()
    o = torch.einsum("bsrgn,bnrd->bsrgd", p, keys[..., : width - tail])
    return o.reshape(b, s, h, width - tail)


def check(args, tail=64, stride=1, start=10**6, scale=None, causal=True, times=1):
    options = tail, stride, start, scale, causal
    wanted = reference(*args, *options)
    for _ in range(times):
        checks.assert_close(ATTEND(*args, *options), wanted, FORWARD[args[0].dtype])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "b, s, s_kv, h", [(1, 40, 4096, 128), (64, 1, 3000, 128), (2, 1, 5000, 128), (1, 70, 3000, 16)]
)
def test_models(b, s, s_kv, h, dtype):
    check(inputs(b, s, s_kv, h, dtype=dtype))


@pytest.mark.usefixtures("kernel")
def test_the_first_queries_of_a_prompt():
    check(inputs(1, 300, 300, 128, dead=0.0), start=0)


@pytest.mark.usefixtures("kernel")
def test_more_rows_than_programs():
    check(inputs(1, 700, 64, 128, slots=130, dead=0.5))


@pytest.mark.parametrize("numbers", TILES, ids=str)
@pytest.mark.parametrize("b, s, slots", [(1, 3, 2048), (2, 150, 256), (5, 1, 1), (1, 1, 3000)])
def test_every_way_of_loading_tiles(numbers, b, s, slots):
    """Again and again: what races is not wrong every time."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the numbers are for Hopper")
    numbers = {**configuration("dsa_decode", "w576h64", H200), **numbers}
    with aside("tilelang"), overriding("dsa_decode", numbers):
        check(inputs(b, s, 3000, 128, slots=slots), times=5)


@pytest.mark.parametrize("h, h_kv", [(1, 1), (3, 1), (71, 1), (6, 2), (5, 5), (48, 2), (256, 2)])
@pytest.mark.parametrize("d, tail", [(512, 64), (33, 7), (1, 0), (128, 0), (256, 64), (1024, 128)])
def test_heads_and_dims(h, h_kv, d, tail):
    check(inputs(2, 3, 200, h, h_kv, d, tail, slots=100), tail)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("h, h_kv", [(64, 1), (384, 2), (1024, 1)])
def test_blocks_of_heads(h, h_kv):
    for b, s, slots in ((1, 2, 300), (2, 3, 1000), (2, 150, 70)):
        check(inputs(b, s, 2000, h, h_kv, slots=slots), times=3)


def test_queries_that_share_memory():
    q, kv, index = inputs(2, 3, 200, 128, slots=100)
    check((q[:, :1].expand(-1, 3, -1, -1), kv, index))
    check((q[:, :, :1].expand(-1, -1, 128, -1), kv, index))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("slots", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("stride, start", [(1, 0), (4, 3), (64, 1000)])
@pytest.mark.parametrize("causal", [True, False])
def test_slots_and_limits(slots, stride, start, causal):
    check(inputs(2, 20, 100, 128, slots=slots), 64, stride, start, 0.1, causal)


@pytest.mark.usefixtures("kernel")
def test_rows_far_away():
    """A cache of more than 2 ** 31 elements, and only its last rows are named."""
    rows = 4_000_000
    kv = torch.full((1, rows, 1, 576), NAN, dtype=BF16, device="cuda")
    kv[:, -500:] = torch.randn(1, 500, 1, 576, device="cuda").to(BF16)
    q = torch.randn(1, 2, 128, 576, device="cuda").to(BF16)
    index = names(1, 2, 1, 500, 300, 0.1)
    options = 64, 1, 0, None, False
    wanted = reference(q, kv[:, -500:].clone(), index, *options)
    far = torch.where((index >= 0) & (index < 500), index + (rows - 500), -1).to(I32)
    checks.assert_close(ATTEND(q, kv, far, *options), wanted, FORWARD[BF16])


@pytest.mark.usefixtures("kernel")
def test_no_live_slot():
    q, kv, index = inputs(2, 3, 50, 128, slots=40, dead=1.0)
    kv.fill_(NAN)
    assert (ATTEND(q, kv, index, 64, 1, 100) == 0).all()
    assert (ATTEND(q, kv[:, :0], index, 64, 1, 100) == 0).all()
    assert (ATTEND(q, kv, index[..., :0], 64, 1, 100) == 0).all()
