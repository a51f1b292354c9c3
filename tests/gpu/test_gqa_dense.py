"""Dense keys that are views of a cache, on a GPU: values, and no copy of the cache."""

import pytest
import torch

from ops_registry.accuracy import FORWARD
from ops_registry.attention.gqa_dense import GQA_DENSE_FWD
from tests import checks, oracle
from tests.cache_views import views

NAMES = [name for name, _, _ in views()]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries", [1, 4, 70])
@pytest.mark.parametrize("name", NAMES)
def test_views_of_a_cache(name, queries, dim):
    k, v = next((k, v) for found, k, v in views("cuda", dim=dim) if found == name)
    q = torch.randn(k.shape[0], queries, 8, dim, device="cuda").to(k.dtype)
    expected = oracle.gqa_dense_fwd(q.cpu(), k.cpu(), v.cpu(), is_causal=True)
    for _ in range(3):
        o, _ = GQA_DENSE_FWD.op(q, k, v)
        checks.assert_close(o.cpu(), expected, FORWARD[k.dtype])


@pytest.mark.parametrize("name", NAMES)
def test_views_in_a_compiled_program(name):
    def attend(q, k, v):
        return GQA_DENSE_FWD.op(q, k, v)[0]

    k, v = next((k, v) for found, k, v in views("cuda", dim=64) if found == name)
    with checks.fresh_dynamo():
        compiled = torch.compile(attend, fullgraph=True, dynamic=True)
        for queries in (3, 40):
            q = torch.randn(k.shape[0], queries, 8, 64, device="cuda").to(k.dtype)
            expected = oracle.gqa_dense_fwd(q.cpu(), k.cpu(), v.cpu(), is_causal=True)
            checks.assert_close(compiled(q, k, v).cpu(), expected, FORWARD[k.dtype])


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_compiled_decode_step_reads_its_cache_in_place(heads_first):
    """Slices of growing length inside the program: right, and no copy of the cache."""

    def step(q, caches, filled):
        caches = caches.transpose(2, 3) if heads_first else caches
        k, v = caches[:, :, :filled]
        return GQA_DENSE_FWD.op(q, k, v)[0]

    shape = (2, 4, 2, 1 << 16, 64) if heads_first else (2, 4, 1 << 16, 2, 64)
    caches = torch.randn(shape, device="cuda", dtype=torch.float16)
    q = torch.randn(4, 1, 8, 64, device="cuda", dtype=torch.float16)
    with checks.fresh_dynamo():
        compiled, used = torch.compile(step, fullgraph=True, dynamic=True), []
        for filled in (50_000, 50_001, 65_535, 37):
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            found = compiled(q, caches, filled)
            used.append(torch.cuda.max_memory_allocated() - held)
            checks.assert_close(found, step(q, caches, filled).double(), FORWARD[torch.float16])
    assert max(used[1:]) < 16 << 20


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_decode_step_does_not_copy_its_cache(heads_first):
    shape = (2, 4, 2, 1 << 16, 128) if heads_first else (2, 4, 1 << 16, 2, 128)
    cache = torch.randn(shape, device="cuda", dtype=torch.float16)
    k, v = (cache.transpose(2, 3) if heads_first else cache)[:, :, :60000]
    q = torch.randn(4, 1, 8, 128, device="cuda", dtype=torch.float16)
    GQA_DENSE_FWD.op(q, k, v)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    GQA_DENSE_FWD.op(q, k, v)
    assert torch.cuda.max_memory_allocated() - held < 16 << 20
