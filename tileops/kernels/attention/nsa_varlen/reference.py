"""Attention over selected blocks in aten ops: every token gathers its own keys."""

from typing import Any

import torch
from torch import Tensor

from tileops.kernels.common.blockwise import Inputs, packed_lengths, take
from tileops.kernels.common.gathered import attend_gathered, last_slot


def nsa_varlen_fwd(out: Tensor, call: Any) -> None:
    """q, o [T, H, D]; k, v [T, H_kv, D]; block_indices [T, H_kv, SEL].

    The lanes of a token are its slots, each as wide as a block (or as the longest visible
    prefix, if that is less).
    """
    size = call.block_size

    def prepare(x: Inputs, rows: Tensor, live: Tensor) -> tuple[Inputs, Tensor]:
        # The request of a row; rows past the last offset fall into an empty one.
        request = (torch.searchsorted(x["first"], rows, right=True) - 1).clamp(min=0)
        first = take(x["first"], request)
        length = take(x["length"], request)
        local = rows - first
        limit = torch.where(local >= 0, length, 0)
        if call.is_causal:
            limit = torch.minimum(limit, local + 1)
        limit = torch.where(live, limit, 0)
        blocks = take(x["blocks"], rows).to(torch.int64)
        counts = take(x["counts"], rows)
        # Compared as block numbers: a huge id times the block size would overflow.
        last_block = torch.div(limit - 1, size, rounding_mode="floor")
        used = x["slots"] < counts[:, :, None]
        used = used & (blocks >= 0) & (blocks <= last_block[:, None, None])
        width = limit.amax().clamp(1, size)
        own = {
            "first": first,
            "limit": limit,
            "blocks": torch.where(used, blocks, -1),
            "width": width,
        }
        return own, last_slot(used, x["slots"]) * width

    def pick(x: Inputs, lanes: Tensor) -> tuple[Tensor, Tensor]:
        slot = torch.div(lanes, x["width"], rounding_mode="floor")
        block = take(x["blocks"], slot.clamp(max=x["blocks"].shape[2] - 1), dim=2)
        key = block * size + lanes % x["width"]
        first, limit = x["first"][:, None, None], x["limit"][:, None, None]
        return first + key, (block >= 0) & (key < limit)

    offsets = call.offsets.to(torch.int64)
    inputs = {
        "first": offsets,
        "length": packed_lengths(offsets),
        "blocks": call.block_indices,
        "counts": call.block_counts,
        "slots": torch.arange(call.block_indices.shape[2], device=call.q.device),
    }
    attend_gathered(
        call.q,
        call.k,
        call.v,
        inputs,
        prepare,
        pick,
        scale=call.scale,
        value_dim=call.q.shape[2],
        out=out,
    )
