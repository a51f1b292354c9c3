"""The kernel of attention over indexed rows: names of every kind, heads, dims, limits, ranges."""

import pytest
import torch

from ops_registry.accuracy import FORWARD
from ops_registry.attention.dsa_decode import DSA_DECODE_FWD
from tests import checks, oracle
from tests.cases.dsa_decode import indices
from tileops.kernels.common import recorder
from tileops.kernels.common.machine import Machine, overriding

F16, NAN = torch.float16, float("nan")
I32 = torch.int32
SMALL = {
    "BLOCK_H": 16, "BLOCK_N": 16, "EARLY": 0, "TILES": 0, "programs": 1, "warps": 4, "stages": 1,
}  # fmt: skip


@pytest.fixture
def attend(target):
    def call(q, kv, index, tail=8, stride=1, start=100, scale=None, causal=True):
        return DSA_DECODE_FWD.op(q, kv, index, tail, stride, start, scale, causal, target)

    return call


def inputs(b=2, s=3, s_kv=40, h=4, h_kv=2, d=16, tail=8, slots=20, dtype=F16):
    q = torch.randn(b, s, h, d + tail).to(dtype)
    kv = torch.randn(b, s_kv, h_kv, d + tail).to(dtype)
    return q, kv, indices(torch.Generator().manual_seed(slots), b, s, h_kv, s_kv, slots)


def check(attend, args, tail=8, stride=1, start=100, scale=None, causal=True):
    o = attend(*args, tail, stride, start, scale, causal)
    wanted = oracle.dsa_decode_fwd(*args, tail, stride, start, scale, causal)
    checks.assert_close(o, wanted, FORWARD[F16])
    return o


@pytest.mark.parametrize("group", [1, 3, 16, 71, 128])
@pytest.mark.parametrize("h_kv", [1, 2])
def test_groups(attend, group, h_kv):
    check(attend, inputs(b=1, s=2, h=group * h_kv, h_kv=h_kv))


@pytest.mark.parametrize("d, tail", [(1, 0), (1, 1), (16, 0), (20, 3), (64, 64), (512, 64)])
def test_dims(attend, d, tail):
    check(attend, inputs(b=1, s=2, d=d, tail=tail), tail)


@pytest.mark.parametrize("slots", [0, 1, 15, 16, 17, 64, 65, 130])
@pytest.mark.parametrize("causal", [True, False])
def test_slots(attend, slots, causal):
    o = check(attend, inputs(s=2, slots=slots), start=20, causal=causal)
    assert slots or (o == 0).all()


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize(
    "processors, b, s, slots",
    [(1, 1, 3, 90), (3, 1, 1, 200), (50, 1, 1, 200), (3, 2, 3, 40), (6, 1, 7, 33), (6, 3, 2, 0)],
)
def test_ranges(attend, monkeypatch, processors, b, s, slots, early):
    """Parts of rows, ranges of several rows, and whole rows where they are many."""
    monkeypatch.setattr(recorder, "machine_of", lambda index: Machine("cuda", 90, processors))
    with overriding("dsa_decode", {**SMALL, "EARLY": early}):
        check(attend, inputs(b=b, s=s, h=40, d=20, tail=3, slots=slots), 3, start=25)


@pytest.mark.parametrize(
    "stride, start", [(1, 0), (4, 0), (4, 21), (7, 3), (1000, 0), (2**62, 0), (2**62, 2**62)]
)
def test_limits(attend, stride, start):
    args = inputs(s=9)
    o = check(attend, args, stride=stride, start=start)
    hidden = [s for s in range(9) if start + s < stride - 1]
    assert (o[:, hidden] == 0).all()


@pytest.mark.parametrize("start", [2**31 - 2, 2**31, 2**63 - 1])
def test_far_positions_see_everything(attend, start):
    args = inputs()
    assert torch.equal(attend(*args, start=start), attend(*args, causal=False))


# ------------------------------------------------------------------------------------ names


def named(*names, times=1):
    return torch.tensor(names, dtype=I32).repeat(times).expand(2, 3, 2, -1).contiguous()


@pytest.mark.parametrize("dead", [-1, 40, 2**30, 2**31 - 1, -(2**31)])
def test_padding_of_every_kind(attend, dead):
    """Before, behind and between the live slots, more of it than a tile holds."""
    q, kv, _ = inputs()
    wanted = check(attend, (q, kv, named(3, 17, 0)))
    pad = named(dead, times=70)
    live = named(3, 17, 0)
    for index in ([live, pad], [pad, live], [live[..., :1], pad, live[..., 1:], pad]):
        o = attend(q, kv, torch.cat(index, -1))
        checks.assert_close(o, wanted.double(), FORWARD[F16])
    assert (attend(q, kv, pad) == 0).all()


def test_rows_that_no_live_slot_names_are_not_read(attend):
    """Nor is row 0, nor the last one, in place of the dead."""
    q, kv, _ = inputs()
    index = named(3, -1, 17, 5, 40, 19, 39, 2**31 - 1)
    wanted = attend(q, kv, index, start=17)
    # Row 19 is live for the last query only, row 39 for none.
    kv[:, [i for i in range(40) if i not in (3, 5, 17, 19)]] = NAN
    assert torch.equal(attend(q, kv, index, start=17), wanted)
    kv[:, 19] = NAN
    assert torch.equal(attend(q, kv, index, start=17)[:, :2], wanted[:, :2])


def test_each_head_and_request_has_its_names(attend):
    q, kv, index = inputs(b=3)
    whole = attend(q, kv, index)
    for b in range(3):
        for r in range(2):
            part = (x[b : b + 1] for x in (q[:, :, 2 * r : 2 * r + 2], kv, index))
            heads, rows, names = part
            alone = attend(heads, rows[:, :, r : r + 1], names[:, :, r : r + 1])
            assert torch.equal(whole[b : b + 1, :, 2 * r : 2 * r + 2], alone)


@pytest.mark.parametrize("sizes", [dict(b=0), dict(s=0), dict(s_kv=0)])
@pytest.mark.parametrize("causal", [True, False])
def test_nothing_to_do(attend, sizes, causal):
    args = inputs(**sizes)
    o = attend(*args, causal=causal)
    assert o.shape == (*args[0].shape[:3], 16) and (o == 0).all()


def test_scale(attend):
    check(attend, inputs(), scale=0.7)
    args = inputs()
    assert torch.equal(attend(*args), attend(*args, scale=24**-0.5))


def test_views_of_the_cache_are_not_copied(attend, monkeypatch):
    q, _, index = inputs()
    room = torch.randn(2, 60, 2, 40).half()
    kv = room[:, :40, :, 5:29]
    wanted = oracle.dsa_decode_fwd(q, kv, index, 8, 1, 100)
    kept = torch.Tensor.contiguous

    def contiguous(x):
        assert x.dtype == I32, "a cache was copied"
        return kept(x)

    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    checks.assert_close(attend(q, kv, index), wanted, FORWARD[F16])
