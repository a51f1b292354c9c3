"""Calls of the operators that a TileLang kernel serves, on meta tensors, and what they launch."""

from typing import Any

import torch

from ops_registry.contract import BUILTIN_KERNELS, CONTRACTS
from tests import aot
from tileops.kernels.common.machine import H200, Machine
from tileops.kernels.common.recorder import recording
from tileops.kernels.common.tilelang_launch import Launch

BF16, I32, F32 = torch.bfloat16, torch.int32, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(name: str, **given: Any) -> Any:
    return CONTRACTS[name].Call(**given)


def scales(dtype: torch.dtype, batch: int, heads_kv: int) -> dict[str, Any]:
    """What calls on tensors of e4m3 have beside them."""
    if dtype.itemsize > 1:
        return {}
    found = {f"{x}_scale": meta(batch, heads_kv, dtype=F32) for x in "qkv"}
    return found | {"out_dtype": BF16}


def dense(*, rows=300, keys=900, heads=8, heads_kv=2, dim=128, dtype=BF16, batch=2, **options):
    q = meta(batch, rows, heads, dim, dtype=dtype)
    kv = {x: meta(batch, keys, heads_kv, dim, dtype=dtype) for x in "kv"}
    return call("gqa_dense_fwd", **{"q": q, **kv, **scales(dtype, batch, heads_kv), **options})


def packed(*, rows=600, keys=900, heads=8, heads_kv=2, dim=128, dtype=BF16, batch=3, **options):
    q = meta(rows, heads, dim, dtype=dtype)
    kv = {x: meta(keys, heads_kv, dim, dtype=dtype) for x in "kv"}
    offsets = {f"cu_seqlens_{x}": meta(batch + 1, dtype=I32) for x in ("q", "kv")}
    given = {"q": q, **kv, **offsets, **scales(dtype, batch, heads_kv), **options}
    return call("gqa_varlen_fwd", **given)


def paged(
    *, rows=600, pages=50, page=64, heads=8, heads_kv=2, dim=128, dtype=BF16, batch=3, **options
):
    pools = {x: meta(pages, page, heads_kv, dim, dtype=dtype) for x in ("k_pages", "v_pages")}
    given = {
        "q": meta(rows, heads, dim, dtype=dtype),
        **pools,
        "page_table": meta(batch, 2048 // page, dtype=I32),
        "cache_seqlens": meta(batch, dtype=I32),
        "cu_seqlens_q": meta(batch + 1, dtype=I32),
    }
    return call("gqa_paged_fwd", **{**given, **options})


def appended(
    *, rows=600, pages=50, page=64, heads=8, heads_kv=2, dim=128, dtype=BF16, batch=3, **options
):
    new = {x: meta(rows, heads_kv, dim, dtype=dtype) for x in ("k_new", "v_new")}
    pools = {x: meta(pages * page, heads_kv, dim, dtype=dtype) for x in ("k_pages", "v_pages")}
    given = {
        "q": meta(rows, heads, dim, dtype=dtype),
        **new,
        **pools,
        "k_scale": meta(1, dtype=F32),
        "v_scale": meta(1, dtype=F32),
        "cu_seqlens_q": meta(batch + 1, dtype=I32),
        "cache_seqlens": meta(batch, dtype=I32),
        "block_table": meta(batch, 2048 // page, dtype=I32),
        "page_size": page,
        "max_seqlen_q": rows,
    }
    return call("gqa_prefill_paged_fwd", **{**given, **options})


def latent(*, batch=3, keys=900, heads=128, heads_kv=1, dim=512, pe=64, dtype=BF16, **options):
    """Latent decode."""
    given = {
        "q": meta(batch, heads, dim, dtype=dtype),
        "q_pe": meta(batch, heads, pe, dtype=dtype),
        "k": meta(batch, keys, heads_kv, dim, dtype=dtype),
        "k_pe": meta(batch, keys, heads_kv, pe, dtype=dtype),
    }
    return call("mla_decode_fwd", **{**given, **options})


def indexed(
    *, batch=2, rows=3, keys=900, heads=128, heads_kv=1, dim=512, tail=64, slots=500, dtype=BF16,
    **options,
):  # fmt: skip
    """Attention of queries at the end of the keys over rows of them that indices name."""
    given = {
        "q": meta(batch, rows, heads, dim + tail, dtype=dtype),
        "kv": meta(batch, keys, heads_kv, dim + tail, dtype=dtype),
        "indices": meta(batch, rows, heads_kv, slots, dtype=I32),
        "dim_tail": tail,
        "stride_kv": 1,
        "q_start_index_s": max(keys - rows, 0),
    }
    return call("dsa_decode_fwd", **{**given, **options})


GQA_CALLS = {
    "gqa_dense_fwd": dense,
    "gqa_varlen_fwd": packed,
    "gqa_paged_fwd": paged,
    "gqa_prefill_paged_fwd": appended,
}
LATENT_CALLS = {"mla_decode_fwd": latent, "dsa_decode_fwd": indexed}
CALLS = GQA_CALLS | LATENT_CALLS


def refusal(call: Any, machine: Machine = H200) -> str | None:
    """Why the TileLang kernel declines a call on a machine."""
    with recording(machine):
        return _kernel(call).refusal(call)


def launches_of(call: Any) -> list[Any]:
    """All launches of a call that is served, Triton's and one of TileLang."""
    assert refusal(call) is None
    kernel = _kernel(call)
    with recording(H200) as found:
        kernel.run(aot.infers()[name_of(call)](call), call)
    return found


def pools(call: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Pools like those of a call, of a dtype."""
    shapes = {x: getattr(call, x).shape for x in ("k_pages", "v_pages")}
    return {x: meta(*shape, dtype=dtype) for x, shape in shapes.items()}


def launch_of(call: Any) -> Launch:
    """The one TileLang launch of a call that is served."""
    [launch] = [x for x in launches_of(call) if isinstance(x, Launch)]
    return launch


def run_of(call: Any) -> Any:
    """What runs the call on Hopper: `(out, call) -> None`."""
    return _kernel(call).run


def name_of(call: Any) -> str:
    return type(call).__name__.removesuffix("_call")


def _kernel(call: Any) -> Any:
    return next(k for k in BUILTIN_KERNELS[name_of(call)] if k.name == "tilelang")
