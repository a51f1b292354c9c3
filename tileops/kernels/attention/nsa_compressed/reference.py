"""Compressed attention in aten ops, a block of chunks at a time."""

from typing import Any

import torch
from torch import Tensor

from tileops.kernels.common.blockwise import (
    ClosedChunks,
    Inputs,
    attend,
    packed_lengths,
    take,
    unwrapped,
)


def nsa_compressed_fwd(out: tuple[Tensor, Tensor], call: Any) -> None:
    """q [T, H, DK]; k_cmp [C, H_kv, DK]; v_cmp [C, H_kv, DV] -> o [T, H, DV], lse [H, T]."""
    o, lse = attend(
        call.q,
        call.offsets,
        packed_lengths(call.chunk_offsets),
        {"k": call.k_cmp, "v": call.v_cmp, "first": call.chunk_offsets.to(torch.int64)},
        load_chunks,
        ClosedChunks(call.bs),
        scale=call.scale,
        heads_kv=call.k_cmp.shape[1],
        value_dim=call.v_cmp.shape[2],
    )
    out[0].copy_(o)
    out[1].copy_(lse)


def load_chunks(x: Inputs, b: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of chunks [n] of request b; a row outside the pool raises."""
    rows = unwrapped(take(x["first"], b) + chunks)
    k, v = (take(x[name], rows).to(torch.float32) for name in ("k", "v"))
    return k, v
