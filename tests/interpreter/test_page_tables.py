"""Lengths past a page table, which nothing has checked: what lies behind it is not read."""

import pytest
import torch

from ops_registry.attention.gqa_paged import GQA_PAGED_FWD

PAGE, DIM = 16, 32


@pytest.mark.parametrize("queries", [1, 40])
def test_a_length_past_the_table(queries, target):
    pages = torch.randn(8, PAGE, 1, DIM, dtype=torch.float16)
    pages[4:] = torch.nan  # of the other request
    table = torch.tensor([[0, 1], [4, 5]], dtype=torch.int32)
    lengths = torch.tensor([3 * PAGE, 2 * PAGE], dtype=torch.int32)
    offsets = torch.tensor([0, queries, queries + 1], dtype=torch.int32)
    q = torch.randn(queries + 1, 2, DIM, dtype=torch.float16)
    o = GQA_PAGED_FWD.op(q, pages, pages, table, lengths, offsets, target=target)
    assert o[:queries].isfinite().all()
