"""How each contestant runs a row: ours, torch's own, and the packages of a peer's site.

A contestant's builder takes the row's op, shape, options and our inputs and returns a call that
gives outputs as ours does. It raises `Unserved` with the reason for a row it has no call for.
Imports of this package and of the peers happen in the builders, in a process that has only one
of the two `tileops` in its path.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.inputs import DTYPES, Shape, Tensors

Call: TypeAlias = Callable[[], Any]
Builder: TypeAlias = Callable[[str, Shape, Shape, Tensors], Call]

OURS = "ours"


class Unserved(Exception):
    """The contestant has nothing for this row."""


CONTESTANTS: dict[str, Builder] = {}
SERVED: dict[str, tuple[str, ...]] = {}  # by contestant; () is every operator

# Peers of torch itself, and those that need the folder their packages were unpacked to.
TORCH = ("sdpa-cudnn", "sdpa-flash", "flex")
SITES = ("tileops", "fa4", "fla")
PEERS = (*TORCH, *SITES)


def contestant(name: str, *ops: str) -> Callable[[Builder], Builder]:
    def add(builder: Builder) -> Builder:
        CONTESTANTS[name], SERVED[name] = builder, ops
        return builder

    return add


def serves(name: str, op: str) -> bool:
    """Whether a contestant has a call for any row of an operator."""
    return not SERVED[name] or op in SERVED[name]


def with_dtypes(options: Shape) -> Shape:
    """Constructor arguments: the dtypes in them by value."""
    return {k: DTYPES[v] if k.endswith("dtype") and v else v for k, v in options.items()}


def only(options: Shape, *names: str) -> None:
    """Unserved if an option beside these is given."""
    extra = sorted(set(options) - set(names))
    if extra:
        raise Unserved(f"has no {', '.join(extra)}")


# -------------------------------------------------------------------------------- ours


def our_op(op: str, options: Shape) -> Any:
    ours: Any = importlib.import_module("tileops.attention")
    return getattr(ours, op)(**with_dtypes(options))


def our_arguments(module: Any, tensors: Tensors) -> tuple[torch.Tensor | None, ...]:
    """The tensors in the order of the operator's forward, to the last one given."""
    names = list(inspect.signature(module.forward).parameters)
    given = [tensors.get(name) for name in names]
    while given[-1] is None:
        given.pop()
    return tuple(given)


@contestant(OURS)
def ours(op: str, shape: Shape, options: Shape, t: Tensors) -> Call:
    module = our_op(op, options)
    arguments = our_arguments(module, t)
    return lambda: module(*arguments)


@contextlib.contextmanager
def overriding(numbers: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Our Triton kernels take these numbers instead of those in the files, and serve all calls."""
    with contextlib.ExitStack() as stack:
        if numbers:
            targets: Any = importlib.import_module("ops_registry.targets")
            stack.enter_context(targets.aside("tilelang"))
        for name, found in numbers.items():
            machine: Any = importlib.import_module("tileops.kernels.common.machine")
            stack.enter_context(machine.overriding(name, found))
        yield


def serving(op: str, options: Shape, t: Tensors) -> str:
    """The kernel that serves our call: its name, with its target unless that is ours."""
    import tileops  # noqa: F401  registers the operators
    from ops_registry.contract import BUILTIN_KERNELS
    from ops_registry.targets import BUILTIN, select

    module = our_op(op, options)
    given = our_arguments(module, t)
    given += (None,) * (len(module.contract.tensors) - len(given))
    call = module.contract.Call(*module.bound(*given))
    kernel = select(module.contract, call, BUILTIN_KERNELS[module.contract.name])
    return kernel.name if kernel.target == BUILTIN else f"{kernel.target}/{kernel.name}"


# ------------------------------------------------------------------------- torch itself


def sdpa(backend: SDPBackend) -> Builder:
    def build(op: str, shape: Shape, options: Shape, t: Tensors) -> Call:
        only(options, "is_causal", "sm_scale")
        if shape["dtype"] == "e4m3":
            raise Unserved("has no FP8")
        causal = options.get("is_causal", True)
        q, k, v = (t[x].transpose(1, 2) for x in "qkv")
        bias = None
        if q.shape[2] == 1:
            causal = False  # the one query sees every key
        elif causal and q.shape[2] != k.shape[2]:
            if backend is SDPBackend.CUDNN_ATTENTION:
                raise Unserved("aligns its causal mask to the top left")
            from torch.nn.attention.bias import causal_lower_right

            bias, causal = causal_lower_right(q.shape[2], k.shape[2]), False
        keywords = {
            "attn_mask": bias,
            "is_causal": causal,
            "scale": options.get("sm_scale"),
            "enable_gqa": q.shape[1] != k.shape[1],
        }

        def forward() -> torch.Tensor:
            with sdpa_kernel(backend):
                o = scaled_dot_product_attention(q, k, v, **keywords)
            return o.transpose(1, 2)

        if op == "GQADenseFwdOp":
            return forward
        with torch.inference_mode(False), torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            o = forward()

        def backward() -> tuple[torch.Tensor, ...]:
            with torch.inference_mode(False), torch.enable_grad():
                found = torch.autograd.grad(o, (q, k, v), t["do"], retain_graph=True)
            return tuple(x.transpose(1, 2) for x in found)

        return backward

    return build


dense = ("GQADenseFwdOp", "GQABwdOp")
contestant("sdpa-cudnn", *dense)(sdpa(SDPBackend.CUDNN_ATTENTION))
contestant("sdpa-flash", *dense)(sdpa(SDPBackend.FLASH_ATTENTION))


@contestant("flex", "GQADenseFwdOp")
def flex(op: str, shape: Shape, options: Shape, t: Tensors) -> Call:
    only(options, "is_causal", "sm_scale", "softcap", "window_size_left")
    if shape["dtype"] == "e4m3" or shape["s_q"] != shape["s_kv"]:
        raise Unserved("is compared at square 16-bit rows")
    if not options.get("is_causal", True):
        raise Unserved("is compared at causal rows")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    left, cap = options.get("window_size_left", -1), options.get("softcap") or 0.0

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (j >= i - left) if left >= 0 else j <= i

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return cap * torch.tanh(score / cap)

    torch.compiler.reset()  # every row is one more shape, and a few of those are the limit
    length, device = shape["s_q"], t["q"].device
    mask = create_block_mask(seen, None, None, length, length, device=device)
    q, k, v = (t[x].transpose(1, 2) for x in "qkv")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    keywords = {
        "score_mod": capped if cap else None,
        "block_mask": mask,
        "scale": options.get("sm_scale"),
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    return lambda: compiled(q, k, v, **keywords).transpose(1, 2)


# ------------------------------------------------------------------------ TileOPs 0.1.0


@contestant("tileops")
def tileops_release(op: str, shape: Shape, options: Shape, t: Tensors) -> Call:
    """Names, order and defaults of release 0.1.0, where they are not ours."""
    release: Any = importlib.import_module("tileops.attention")
    options = with_dtypes(options)
    causal = {"is_causal": options.get("is_causal", True)}

    if op in ("GQADenseFwdOp", "GQAVarlenFwdOp", "GQAPagedFwdOp"):
        module = getattr(release, op)(**options | causal)
        names = list(inspect.signature(module.forward).parameters)
        renamed = {"k_pages": "k_cache", "v_pages": "v_cache", "page_table": "block_table"}
        keywords = {renamed.get(k, k): x for k, x in t.items()}
        # Every tensor by position: a keyword costs the host time that ours does not pay.
        given = [keywords.get(name) for name in names]
        return lambda: module(*given)
    if op == "GQABwdOp":
        module = release.GQADenseBwdOp(**causal)
        return lambda: module(t["do"], t["q"], t["k"], t["v"], t["o"], t["lse"])
    if op == "GQAPrefillPagedWithKVCacheFwdOp":
        return write_then_read(release, shape, options, t)
    if op == "MHADecodePagedWithKVCacheFwdOp":
        module = release.MHAPagedFwdOp(**options)
        table, lengths = t["block_table"], t["real_seqlen_kv"]
        return lambda: module(t["q"], t["k"], t["v"], table, lengths)
    if op == "MLADecodeWithKVCacheFwdOp":
        module = release.MLADenseDecodeFwdOp()
        return lambda: module(t["q"], t["q_pe"], t["k"], t["k_pe"])
    if op == "DSADecodeWithKVCacheFwdOp":
        module = release.DSADenseFwdOp(**options)
        return lambda: module(t["q"], t["kv"], t["indices"])
    if op.startswith("NSA"):
        return release_nsa(release, op, options, t)
    if op == "FP8LightningIndexerFwdOp":
        module = release.FP8LightningIndexerFwdOp(**options)
        return lambda: module(*t.values())
    if op == "PagedKVCacheWriteFwdOp":
        module = release.PagedKVCacheWriteFwdOp()
        return lambda: module(*t.values())
    raise Unserved(f"has no {op}")


def release_nsa(release: Any, op: str, options: Shape, t: Tensors) -> Call:
    """The release has ours by the same name, keyword-only; the tensors keep their order."""
    keywords = {"sm_scale": options["scale"]}
    keywords["block_size"] = options.get("bs") or options["block_size"]
    keywords |= {k: options[k] for k in ("selected_block_num", "is_causal") if k in options}
    module = getattr(release, op)(**keywords)
    return lambda: module(*t.values())


def write_then_read(release: Any, shape: Shape, options: Shape, t: Tensors) -> Call:
    """The release has no fused append: its write and its paged read, one after the other."""
    if options.get("fuse_rope"):
        raise Unserved("has no append that rotates")
    if options.get("cache_dtype"):
        raise Unserved("reads the new rows of an FP8 cache quantized")
    page, device = options["page_size"], t["q"].device
    write = release.PagedKVCacheWriteFwdOp()
    masks = {k: options[k] for k in ("sm_scale", "softcap") if k in options}
    read = release.GQAPagedFwdOp(is_causal=options.get("is_causal", True), **masks)
    k_pages, v_pages = (t[x].view(-1, page, *t[x].shape[1:]) for x in ("k_pages", "v_pages"))
    slots = []
    for b, (n, old) in enumerate(zip(shape["q_lens"], shape["old_lens"], strict=True)):
        at = torch.arange(old, old + n, device=device)
        slots.append(t["block_table"][b, at // page].long() * page + at % page)
    mapping = torch.cat(slots)
    lengths = t["cache_seqlens"] + torch.tensor(shape["q_lens"], device=device, dtype=torch.int32)

    def call() -> torch.Tensor:
        write(t["k_new"], t["v_new"], k_pages, v_pages, mapping)
        return read(t["q"], k_pages, v_pages, t["block_table"], lengths, t["cu_seqlens_q"])

    return call


# ---------------------------------------------------------------------- FlashAttention-4


@contestant("fa4", "GQADenseFwdOp", "GQABwdOp", "GQAVarlenFwdOp", "GQAPagedFwdOp")
def fa4(op: str, shape: Shape, options: Shape, t: Tensors) -> Call:
    known = ("is_causal", "sm_scale", "softcap", "window_size_left", "window_size_right")
    only(options, *known)
    if "e4m3" in (shape["dtype"], shape.get("cache")):
        raise Unserved("has no FP8 on this device")
    interface: Any = importlib.import_module("flash_attn.cute.interface")
    causal = options.get("is_causal", True)
    if op == "GQABwdOp":
        q, k, v, o, do, lse = (t[x] for x in ("q", "k", "v", "o", "do", "lse"))
        scale = q.shape[-1] ** -0.5
        return lambda: interface._flash_attn_bwd(q, k, v, o, do, lse, scale, causal)[:3]

    window = tuple(options.get(f"window_size_{side}", -1) for side in ("left", "right"))
    keywords: dict[str, Any] = {
        "softmax_scale": options.get("sm_scale"),
        "causal": causal,
        "window_size": tuple(None if w < 0 else w for w in window),
        "softcap": options.get("softcap") or 0.0,
        "learnable_sink": t.get("sinks"),
    }

    def first(found: Any) -> torch.Tensor:
        return found[0] if isinstance(found, tuple) else found

    if op == "GQADenseFwdOp":
        return lambda: first(interface.flash_attn_func(t["q"], t["k"], t["v"], **keywords))
    keywords |= {"cu_seqlens_q": t["cu_seqlens_q"], "max_seqlen_q": max(shape["q_lens"])}
    keywords["max_seqlen_k"] = max(shape["kv_lens"])
    if op == "GQAVarlenFwdOp":
        keywords["cu_seqlens_k"] = t["cu_seqlens_kv"]
        k, v = t["k"], t["v"]
    else:
        keywords |= {"seqused_k": t["cache_seqlens"], "page_table": t["page_table"]}
        k, v = t["k_pages"], t["v_pages"]
    return lambda: first(interface.flash_attn_varlen_func(t["q"], k, v, **keywords))


# -------------------------------------------------------------- flash-linear-attention


@contestant("fla", "NSACompressedVarlenFwdOp", "NSATopKVarlenFwdOp", "NSAVarlenFwdOp")
def fla(op: str, shape: Shape, options: Shape, t: Tensors) -> Call:
    """Its NSA kernels; a batch of one packed sequence, offsets as cu_seqlens."""
    compression: Any = importlib.import_module("fla.ops.nsa.compression")
    parallel: Any = importlib.import_module("fla.ops.nsa.parallel")
    ends, scale = t["offsets"], options["scale"]
    ragged = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "token_indices_q": t["token_indices"]}
    q = t["q"][None]
    if op == "NSACompressedVarlenFwdOp":
        k, v = t["k_cmp"][None], t["v_cmp"][None]

        def compressed() -> tuple[torch.Tensor, None]:
            o, _ = compression.parallel_nsa_compression_fwd(
                q, k, v, TK=q.shape[1], block_size=options["bs"], scale=scale, **ragged
            )
            return o[0], None  # its lse is 0, not -inf, where no chunk is closed

        return compressed
    if op == "NSATopKVarlenFwdOp":
        k, count = t["k_cmp"][None], options["selected_block_num"]
        return lambda: parallel.parallel_nsa_topk(
            q,
            k,
            TK=q.shape[1],
            lse=None,
            block_counts=count,
            block_size=options["bs"],
            scale=scale,
            cu_seqlens=ends,
        )[0]
    k, v = t["k"][None], t["v"][None]
    blocks, counts = t["block_indices"][None], t["block_counts"][None]
    size = options["block_size"]
    return lambda: parallel.parallel_nsa_fwd(q, k, v, blocks, counts, size, scale, **ragged)[0][0]
