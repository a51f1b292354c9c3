"""Cases of dense GQA, forward and backward."""

import torch

from ops_registry.accuracy import (
    BACKWARD,
    FORWARD,
    FORWARD_ROPE,
    FP8,
    FP8_ROPE,
    LSE,
    LSE_ROPE,
    Tolerance,
)
from ops_registry.attention.gqa_dense import GQA_DENSE_BWD, GQA_DENSE_FWD
from ops_registry.contract import E4M3
from tests import oracle
from tests.cases import Case, randn

H, H_KV, D = 6, 2, 32
BF16, F16 = torch.bfloat16, torch.float16
# Logits carry the requantization of both operands: 5e-2 of their size.
LSE_FP8 = Tolerance(None, 2e-1, 5e-2)


def build(dtype, *, square=False, rope=None, fp8=False, **options):
    """size -> S_q = size, S_kv = size + 3 (square: size), B = size // 2 + 1."""

    def make(size, generator):
        batch = size // 4 + 2 if size > 1 else size
        s_kv = size if square or size < 2 else size + 3
        args = {
            "q": randn(generator, batch, size, H, D, dtype=dtype),
            "k": randn(generator, batch, s_kv, H_KV, D, dtype=dtype),
            "v": randn(generator, batch, s_kv, H_KV, D, dtype=dtype),
        } | options
        if fp8:
            args |= {name: args[name].to(E4M3) for name in "qkv"}
            for index, name in enumerate(("q_scale", "k_scale", "v_scale")):
                args[name] = 0.5 + torch.rand(batch, H_KV, generator=generator) + 0.1 * index
            args["out_dtype"] = dtype
        if rope is not None:
            rotary_dim, layout = rope
            rows = s_kv + 2 if size > 1 else s_kv
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


def options_of(call):
    kw = {
        name: getattr(call, name)
        for name in ("is_causal", "window_size_left", "window_size_right", "sm_scale", "softcap")
    }
    if call.pos_encoding_mode == "rope":
        kw |= {
            "rope_cos": call.rope_cos,
            "rope_sin": call.rope_sin,
            "rope_layout": call.rope_layout,
        }
    return kw


def expected(call):
    if call.q.shape[0] == 0:
        return torch.zeros(call.q.shape), torch.zeros(0, call.q.shape[2], call.q.shape[1])
    return oracle.gqa_dense_fwd(*call[:6], return_lse=True, **options_of(call))


def forward_case(variant, dtype, tolerances, **kw):
    axes = {0: "B", 1: "S_q"}, {0: "B", 1: "S_kv"}
    if kw.get("square"):
        axes = ({0: "B", 1: "S"},) * 2
    dynamic = {"q": axes[0], "k": axes[1], "v": axes[1]}
    if kw.get("fp8"):
        dynamic |= {name: {0: "B"} for name in ("q_scale", "k_scale", "v_scale")}
    if kw.get("rope"):
        dynamic |= {"rope_cos": {0: "P"}, "rope_sin": {0: "P"}}
    return Case(
        contract=GQA_DENSE_FWD,
        variant=variant,
        build=build(dtype, **kw),
        expected=expected,
        tolerances=tolerances,
        dynamic=dynamic,
    )


def softmax_of(call):
    """Float64 autograd through the oracle: o, lse and the gradients of q, k, v."""
    q, k, v = (oracle.f64(x).requires_grad_() for x in call[:3])
    kw = options_of(call)
    pairs = [oracle.gqa_request(q[b], k[b], v[b], **kw) for b in range(q.shape[0])]
    return q, k, v, torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


def build_backward(dtype, **kw):
    forward = build(dtype, **kw)

    def make(size, generator):
        args = forward(size, generator)
        args.pop("out_dtype", None)
        call = GQA_DENSE_FWD.Call(**args)
        batch, s_q = call.q.shape[:2]
        if batch:
            *_, o, lse = softmax_of(call)
        else:
            o, lse = torch.zeros(call.q.shape), torch.zeros(0, H, s_q)
        args["o"] = o.detach().to(dtype)
        args["do"] = randn(generator, *call.q.shape, dtype=dtype)
        args["lse"] = lse.detach().to(torch.float32)
        return args

    return make


@torch.enable_grad()
def expected_backward(call):
    if call.q.shape[0] == 0:
        return tuple(torch.zeros(x.shape) for x in call[:3])
    forward = GQA_DENSE_FWD.Call(
        **{n: getattr(call, n) for n in call._fields if n in GQA_DENSE_FWD.Call._fields}
    )
    q, k, v, o, _ = softmax_of(forward)
    return torch.autograd.grad(o, (q, k, v), oracle.f64(call.do))


def backward_case(variant, dtype, **kw):
    axes = {0: "B", 1: "S_q"}, {0: "B", 1: "S_kv"}
    dynamic = {name: axes[0] for name in ("q", "o", "do")}
    dynamic |= {"k": axes[1], "v": axes[1], "lse": {0: "B", 2: "S_q"}}
    if kw.get("rope"):
        dynamic |= {"rope_cos": {0: "P"}, "rope_sin": {0: "P"}}
    return Case(
        contract=GQA_DENSE_BWD,
        variant=variant,
        build=build_backward(dtype, **kw),
        expected=expected_backward,
        tolerances=(BACKWARD[dtype],) * 3,
        dynamic=dynamic,
        expandable=("do",),
    )


CASES = [
    forward_case("bf16", BF16, (FORWARD[BF16], LSE[BF16])),
    forward_case("fp16-square", F16, (FORWARD[F16], LSE[F16]), square=True),
    forward_case(
        "windows-softcap",
        F16,
        (FORWARD[F16], LSE[F16]),
        is_causal=False,
        window_size_left=5,
        window_size_right=2,
        softcap=3.0,
        sm_scale=0.3,
    ),
    forward_case("rope", F16, (FORWARD_ROPE[F16], LSE_ROPE[F16]), rope=(None, "neox")),
    forward_case("fp8-rope", BF16, (FP8_ROPE[BF16], LSE_FP8), rope=(16, "interleaved"), fp8=True),
    forward_case("fp8", F16, (FP8[F16], LSE[F16]), fp8=True, is_causal=False),
    backward_case("bf16", BF16),
    backward_case(
        "windows-softcap",
        F16,
        is_causal=False,
        window_size_left=5,
        window_size_right=2,
        softcap=3.0,
        sm_scale=0.3,
    ),
    backward_case("rope", F16, rope=(16, "interleaved")),
]
