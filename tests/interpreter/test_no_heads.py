"""Calls without query heads: no output, zero gradients, and an append happens all the same."""

import pytest
import torch

from ops_registry.attention.gqa_dense import GQA_DENSE_BWD, GQA_DENSE_FWD
from ops_registry.attention.gqa_paged import GQA_PAGED_FWD
from ops_registry.attention.gqa_prefill_paged import GQA_PREFILL_PAGED_FWD
from ops_registry.attention.gqa_varlen import GQA_VARLEN_BWD, GQA_VARLEN_FWD
from tests.triton_target import TARGET

F16, I32 = torch.float16, torch.int32
OFFSETS = torch.tensor([0, 3], dtype=I32)
ROPE = {
    "rope_cos": torch.ones(3, 8, dtype=F16),
    "rope_sin": torch.ones(3, 8, dtype=F16),
    "pos_encoding_mode": "rope",
}


@pytest.mark.parametrize("options", [{}, ROPE], ids=["plain", "rope"])
def test_dense_and_packed(options):
    q, k = torch.empty(1, 3, 0, 16, dtype=F16), torch.ones(1, 3, 2, 16, dtype=F16)
    o, lse = GQA_DENSE_FWD.op(q, k, k, **options, target=TARGET)
    assert o.shape == q.shape and lse.shape == (1, 0, 3)
    dq, *dkv = GQA_DENSE_BWD.op(q, k, k, q, q, lse, **options, target=TARGET)
    assert dq.shape == q.shape and all((x == 0).all() and x.shape == k.shape for x in dkv)

    q, k = q[0], k[0]
    o, lse = GQA_VARLEN_FWD.op(q, k, k, OFFSETS, OFFSETS, **options, target=TARGET)
    assert o.shape == q.shape and lse.shape == (0, 3)
    sinks = torch.empty(0)
    call = GQA_VARLEN_BWD.Call(
        q=q,
        k=k,
        v=k,
        o=q,
        do=q,
        lse=lse,
        cu_seqlens_q=OFFSETS,
        cu_seqlens_kv=OFFSETS,
        sinks=sinks,
        target=TARGET,
        **options,
    )
    dq, dk, dv, dsinks = GQA_VARLEN_BWD.op(*call)
    assert dq.shape == q.shape and dsinks.shape == (0,)
    assert all((x == 0).all() and x.shape == k.shape for x in (dk, dv))


@pytest.mark.parametrize("options", [{}, ROPE], ids=["plain", "rope"])
def test_paged(options):
    q, pool = torch.empty(3, 0, 16, dtype=F16), torch.ones(1, 4, 2, 16, dtype=F16)
    table, length = torch.zeros(1, 1, dtype=I32), torch.tensor([3], dtype=I32)
    o = GQA_PAGED_FWD.op(q, pool, pool, table, length, OFFSETS, **options, target=TARGET)
    assert o.shape == q.shape


@pytest.mark.parametrize("fuse_rope", [False, True])
def test_append(fuse_rope):
    q, row = torch.empty(3, 0, 16, dtype=F16), torch.ones(3, 2, 16, dtype=F16)
    pools = torch.zeros(4, 2, 16, dtype=F16), torch.zeros(4, 2, 16, dtype=F16)
    table, length = torch.zeros(1, 1, dtype=I32), torch.zeros(1, dtype=I32)
    options = {"fuse_rope": True, "max_position": 8} if fuse_rope else {}
    one = torch.ones(1)
    o = GQA_PREFILL_PAGED_FWD.op(
        q, row, row, *pools, one, one, OFFSETS, length, table, 4, 3, **options, target=TARGET
    )
    assert o.shape == q.shape
    assert torch.equal(pools[1][:3], row) and (pools[1][3:] == 0).all()
