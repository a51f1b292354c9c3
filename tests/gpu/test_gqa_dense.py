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
