"""Cases of packed variable-length GQA, forward and backward."""

import torch

from ops_registry.accuracy import (
    BACKWARD,
    FORWARD,
    FORWARD_ROPE,
    FP8,
    LSE,
    LSE_ROPE,
    Tolerance,
)
from ops_registry.attention.gqa_varlen import GQA_VARLEN_BWD, GQA_VARLEN_FWD
from ops_registry.contract import E4M3
from tests import oracle
from tests.cases import Case, offsets, randn
from tests.cases.gqa_dense import BF16, F16, H_KV, D, H, options_of

FLOAT32_SINKS = {F16: Tolerance(1.5e-3, 5e-3, 5e-3), BF16: Tolerance(8e-3, 3e-2, 3e-2)}


def request_lengths(size, *, nested=False):
    """Ragged query and key lengths; nested: every query length fits its key length."""
    if size == 0:
        return [], []
    if size == 1:
        return [1], [1]
    q, kv = [size, 0, 1, size + 2], [size + 1, 4, 3, 2 * size]
    return (q, kv) if nested else ([*q, size], [*kv, size // 2])


def build(dtype, *, rope=None, fp8=False, sinks=False, **options):
    def make(size, generator):
        q_lens, kv_lens = request_lengths(size, nested=rope is not None)
        t_q, t_kv, batch = sum(q_lens), sum(kv_lens), len(q_lens)
        args = {
            "q": randn(generator, t_q, H, D, dtype=dtype),
            "k": randn(generator, t_kv, H_KV, D, dtype=dtype),
            "v": randn(generator, t_kv, H_KV, D, dtype=dtype),
            "cu_seqlens_q": offsets(q_lens),
            "cu_seqlens_kv": offsets(kv_lens),
        } | options
        if fp8:
            args |= {name: args[name].to(E4M3) for name in "qkv"}
            for index, name in enumerate(("q_scale", "k_scale", "v_scale")):
                args[name] = 0.5 + torch.rand(batch, H_KV, generator=generator) + 0.1 * index
            args["out_dtype"] = dtype
        if sinks:
            args["sinks"] = torch.randn(H, generator=generator)
            args["sinks"][0] = -torch.inf
        if rope is not None:
            rotary_dim, layout = rope
            rows = max(kv_lens, default=0) + (3 if size > 1 else 0)
            cos, sin = oracle.rope_table(rotary_dim or D, rows, 10000.0, dtype)
            args |= {
                "rope_cos": cos,
                "rope_sin": sin,
                "pos_encoding_mode": "rope",
                "rotary_dim": rotary_dim,
                "rope_layout": layout,
            }
        return args

    return make


def attend(call, q, k, v, sinks):
    """o [T_q, H, D] and lse [H, T_q] in float64, request by request."""
    cu_q, cu_kv = oracle.ints(call.cu_seqlens_q), oracle.ints(call.cu_seqlens_kv)
    o = [q.new_zeros(0, H, D)]
    lse = [q.new_zeros(H, 0)]
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        one = oracle.gqa_request(q[rows], k[keys], v[keys], sinks=sinks, **options_of(call))
        o.append(one[0])
        lse.append(one[1])
    return torch.cat(o), torch.cat(lse, 1)


def expected(call):
    o = oracle.gqa_varlen_fwd(*call[:8], sinks=call.sinks, **options_of(call))
    if call.q.dtype == E4M3:
        return o, None
    return o, attend(call, *map(oracle.f64, call[:3]), None)[1]


def dynamic_of(names, kw):
    axes = {
        "q": {0: "T_q"},
        "k": {0: "T_kv"},
        "v": {0: "T_kv"},
        "o": {0: "T_q"},
        "do": {0: "T_q"},
        "lse": {1: "T_q"},
        "cu_seqlens_q": {0: "B+1"},
        "cu_seqlens_kv": {0: "B+1"},
    }
    if kw.get("fp8"):
        axes |= {name: {0: "B"} for name in ("q_scale", "k_scale", "v_scale")}
    if kw.get("rope"):
        axes |= {"rope_cos": {0: "P"}, "rope_sin": {0: "P"}}
    return {name: axis for name, axis in axes.items() if name in names}


def forward_case(variant, dtype, tolerances, **kw):
    return Case(
        contract=GQA_VARLEN_FWD,
        variant=variant,
        build=build(dtype, **kw),
        expected=expected,
        tolerances=tolerances,
        dynamic=dynamic_of(GQA_VARLEN_FWD.tensors, kw),
    )


def gradients(call, with_grad=("q", "k", "v", "sinks")):
    """Float64 autograd: o, lse and the leaves."""
    leaves = [oracle.f64(x).requires_grad_() for x in call[:3]]
    sinks = None if call.sinks is None else oracle.f64(call.sinks).requires_grad_()
    o, lse = attend(call, *leaves, sinks)
    return leaves, sinks, o, lse


def build_backward(dtype, **kw):
    forward = build(dtype, **kw)

    def make(size, generator):
        args = forward(size, generator)
        args.pop("validate_inputs", None)
        _, _, o, lse = gradients(GQA_VARLEN_FWD.Call(**args))
        args["o"] = o.detach().to(dtype)
        args["do"] = randn(generator, *args["q"].shape, dtype=dtype)
        args["lse"] = lse.detach().to(torch.float32)
        return args

    return make


@torch.enable_grad()
def expected_backward(call):
    forward = GQA_VARLEN_FWD.Call(
        **{n: getattr(call, n) for n in call._fields if n in GQA_VARLEN_FWD.Call._fields}
    )
    leaves, sinks, o, _ = gradients(forward)
    if not o.requires_grad:  # no request at all
        o = o + sum(x.sum() for x in leaves)
    wanted = leaves if sinks is None else [*leaves, sinks]
    grads = torch.autograd.grad(o, wanted, oracle.f64(call.do), allow_unused=True)
    grads = tuple(
        torch.zeros_like(x) if g is None else g.nan_to_num(0.0)
        for x, g in zip(wanted, grads, strict=True)
    )
    return grads if sinks is not None else (*grads, torch.zeros(0))


def backward_case(variant, dtype, **kw):
    return Case(
        contract=GQA_VARLEN_BWD,
        variant=variant,
        build=build_backward(dtype, **kw),
        expected=expected_backward,
        tolerances=(BACKWARD[dtype],) * 3 + (FLOAT32_SINKS[dtype],),
        dynamic=dynamic_of(GQA_VARLEN_BWD.tensors, kw),
        expandable=("do",),
    )


CASES = [
    forward_case("bf16", BF16, (FORWARD[BF16], LSE[BF16])),
    forward_case(
        "window-sinks-validated",
        F16,
        (FORWARD[F16], LSE[F16]),
        sinks=True,
        window_size_left=4,
        validate_inputs=True,
    ),
    forward_case(
        "softcap", F16, (FORWARD[F16], LSE[F16]), is_causal=False, softcap=2.0, sm_scale=0.4
    ),
    forward_case("rope", BF16, (FORWARD_ROPE[BF16], LSE_ROPE[BF16]), rope=(16, "interleaved")),
    forward_case("fp8-sinks", BF16, (FP8[BF16], LSE[BF16]), fp8=True, sinks=True),
    backward_case("bf16", BF16),
    backward_case("sinks-softcap", F16, sinks=True, softcap=3.0, window_size_left=6),
    backward_case("rope", F16, rope=(None, "neox"), is_causal=False),
]
