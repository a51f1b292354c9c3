"""Which keys and lengths of random calls a TileLang kernel serves."""

from collections.abc import Mapping
from typing import Any

import torch

from ops_registry.contract import E4M3
from tileops.kernels.common import tilelang_limits

BF16 = torch.bfloat16
PLAIN = {"heads": 8, "heads_kv": 2, "dtype": BF16, "is_causal": True, "misaligned": False}
LATENT = {"heads": 128, "heads_kv": 1, "dim": 512, "dtype": BF16, "misaligned": False}
TAILS = {"mla_decode_fwd": "rotary", "dsa_decode_fwd": "dim_tail"}  # columns of keys alone

# A key of each operator with a TileLang kernel, whose calls it serves; half of all are such.
LONG: dict[str, dict[str, Any]] = {
    "gqa_dense_fwd": PLAIN | {"dim": 128, "softcap": 20.0},
    "gqa_varlen_fwd": PLAIN | {"dim": 64, "sinks": True, "window_size_left": 127},
    "gqa_paged_fwd": PLAIN
    | {"dim": 128, "sinks": False, "window_size_left": 300, "page_size": 16, "pool": BF16},
    "gqa_prefill_paged_fwd": PLAIN | {"dim": 64, "page_size": 64},
    "mla_decode_fwd": LATENT | {"rotary": 64},
    "dsa_decode_fwd": LATENT | {"dim_tail": 64, "stride_kv": 1, "is_causal": True, "slots": 512},
}
LONG = {op: key | {"long": True} for op, key in LONG.items()}


def on_hopper(op: str, key: Mapping[str, Any]) -> bool:
    """Whether a TileLang kernel serves aligned calls of the key that are long enough."""
    if op in TAILS:
        columns = key["dim"], key[TAILS[op]]
        shared = key["heads_kv"] * tilelang_limits.LATENT_HEADS
        return columns == tilelang_limits.LATENT_COLUMNS and key["heads"] % shared == 0
    wide = E4M3 not in (key.get("pool"), key.get("cache_dtype")) or key["dtype"] == BF16
    return key["dim"] in tilelang_limits.DIMS and key["dtype"] != E4M3 and wide


def fewest_rows(key: Mapping[str, Any]) -> int:
    """Query rows of a request, on average, from which on that kernel serves packed calls."""
    read = E4M3 not in (key.get("pool"), key.get("cache_dtype"))
    if "page_size" in key:
        read = read and tilelang_limits.reads_pages_of(key["page_size"])
        read = read and "pos_encoding_mode" not in key
    if read:
        return tilelang_limits.FEWEST_PACKED
    copied = -(-tilelang_limits.FEWEST_COPIED * key["heads_kv"] // key["heads"])
    return max(tilelang_limits.FEWEST_PACKED, copied)
