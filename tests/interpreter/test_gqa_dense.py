"""Dense keys that are views of a cache: what is read, and that nothing else is."""

import pytest
import torch

from ops_registry.accuracy import FORWARD
from ops_registry.attention.gqa_dense import GQA_DENSE_FWD
from tests import checks, oracle
from tests.cache_views import views


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize(
    "name, k, v", list(views()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_views_of_a_cache(name, k, v, queries, target):
    q = torch.randn(k.shape[0], queries, 4, k.shape[-1]).to(k.dtype)
    o, _ = GQA_DENSE_FWD.op(q, k, v, target=target)
    expected = oracle.gqa_dense_fwd(q, k, v, is_causal=True)
    checks.assert_close(o, expected, FORWARD[k.dtype])
