"""Dense GQA beyond the shared harness: gradients, refusals, odd shapes, laws, autocast."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tileops
from ops_registry.accuracy import BACKWARD, FORWARD
from ops_registry.attention.gqa_dense import GQA_DENSE_BWD, GQA_DENSE_FWD
from ops_registry.contract import E4M3
from ops_registry.errors import GradientError
from tests import checks, oracle
from tileops.attention import GQABwdOp, GQADenseFwdOp
from tileops.kernels.attention.gqa_dense import reference

BF16, F16 = torch.bfloat16, torch.float16
INF = float("inf")


def inputs(b=2, s_q=5, s_kv=7, h=4, h_kv=2, d=16, dtype=F16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, s_q, h, d), (b, s_kv, h_kv, d), (b, s_kv, h_kv, d)
    return tuple(torch.randn(*s, generator=generator).to(dtype) for s in shapes)


def close(o, ref, row=FORWARD, what="o"):
    checks.assert_close(o, ref, row[o.dtype], what)


# --------------------------------------------------------------------------------- values


@pytest.mark.parametrize("d", [1, 16, 40, 72, 80, 96, 112, 160, 192, 256, 512])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_head_dims(d, dtype):
    q, k, v = inputs(d=d, dtype=dtype)
    close(GQADenseFwdOp()(q, k, v), oracle.gqa_dense_fwd(q, k, v))


@pytest.mark.parametrize("gradients", [GQA_DENSE_BWD.op, None], ids=["eager", "packaged"])
def test_no_query_heads(gradients):
    q, k, v = inputs(h=0)
    o, lse = GQA_DENSE_FWD.op(q, k, v)
    assert o.shape == q.shape and lse.shape == (2, 0, 5)
    call = GQA_DENSE_BWD.Call(q, k, v, o, q, lse)
    if gradients is None:
        found = tuple(torch.full_like(x, INF) for x in (q, k, v))
        reference.gqa_dense_bwd(found, call)
    else:
        found = gradients(*call)
    for gradient, x in zip(found, (q, k, v), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("h, h_kv", [(1, 1), (3, 1), (7, 7), (71, 1), (22, 2), (13, 1)])
def test_groups(h, h_kv):
    q, k, v = inputs(h=h, h_kv=h_kv, s_q=9, s_kv=9)
    close(GQADenseFwdOp()(q, k, v), oracle.gqa_dense_fwd(q, k, v))


@pytest.mark.parametrize("s_kv", [1, 2, 31, 33, 63, 64, 65, 127, 128, 129, 257, 1025])
def test_decode_lengths_and_misaligned_base(s_kv):
    q, k, v = inputs(b=1, s_q=1, s_kv=s_kv + 1)
    k, v = k[:, 1:], v[:, 1:]
    close(GQADenseFwdOp()(q, k, v), oracle.gqa_dense_fwd(q, k, v))


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed):
    """Every option at random against the float64 oracle."""
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    causal = pick(True, False)
    s_kv = pick(0, 1, 5, 17, 64, 130, 300)
    s_q = min(s_kv, pick(1, 4, 33, 129)) if causal else pick(0, 1, 4, 33, 129)
    h_kv, g, d = pick(1, 2, 3), pick(1, 2, 3, 5), pick(8, 20, 64)
    q, k, v = inputs(pick(1, 2), s_q, s_kv, h_kv * g, h_kv, d, pick(F16, BF16), seed)
    options = {
        "is_causal": causal,
        "window_size_left": pick(-1, 0, 3, 40),
        "window_size_right": pick(-1, 0, 2, 50),
        "sm_scale": pick(None, 0.05, 0.7),
        "softcap": pick(None, 0.0, 1.0, 30.0, 1000.0),
    }
    o = GQADenseFwdOp(**options)(q, k, v)
    close(o, oracle.gqa_dense_fwd(q, k, v, **options), what=str(options))


def test_small_softcap_does_not_leak_the_future():
    q, k, v = inputs(s_q=8, s_kv=8)
    op = GQADenseFwdOp(softcap=1.0)
    before = op(q, k, v)
    k[:, 7], v[:, 7] = 30.0, -30.0
    assert torch.equal(before[:, :7], op(q, k, v)[:, :7])


def test_a_row_that_sees_no_key_is_zero_and_its_lse_minus_infinity():
    q, k, v = inputs(b=1, s_q=6, s_kv=2)
    v.fill_(7.0)
    op = GQADenseFwdOp(is_causal=False, window_size_left=1, window_size_right=0)
    o = op(q, k, v)
    assert (o[:, :4] == 0).all()
    assert (o[:, 4:] == 7).all()
    lse = torch.ops.tileops.gqa_dense_fwd(
        q, k, v, is_causal=False, window_size_left=1, window_size_right=0
    )[1]
    assert (lse[..., :4] == -INF).all()
    assert lse[..., 4:].isfinite().all()


@pytest.mark.parametrize("left", [0, 1])
def test_a_window_counts_keys_besides_the_own_position(left):
    q, k, _ = inputs(b=1, s_q=4, s_kv=4, h=1, h_kv=1, d=4)
    v = torch.eye(4, dtype=F16)[None, :, None, :]
    seen = GQADenseFwdOp(window_size_left=left)(q, k, v)[0, :, 0] > 0
    assert torch.equal(seen, oracle.visible(4, 4, True, left))


def test_empty_shapes():
    op = GQADenseFwdOp(is_causal=False)
    q, k, v = inputs(s_kv=0)
    assert torch.equal(op(q, k, v), torch.zeros_like(q))
    q, k, v = inputs(s_q=0)
    assert op(q, k, v).shape == (2, 0, 4, 16)
    q, k, v = inputs(b=0)
    assert op(q, k, v).shape == (0, 5, 4, 16)


def test_one_instance_serves_dtypes_and_shapes():
    op = GQADenseFwdOp()
    for dtype, s in ((F16, 3), (BF16, 65), (F16, 128)):
        q, k, v = inputs(s_q=s, s_kv=s, dtype=dtype)
        close(op(q, k, v), oracle.gqa_dense_fwd(q, k, v))


def test_rows_of_the_tables_past_the_keys_are_never_read():
    q, k, v = inputs(d=32)
    cos, sin = oracle.rope_table(32, 12, 10000.0, F16)
    op = GQADenseFwdOp(pos_encoding_mode="rope")
    before = op(q, k, v, rope_cos=cos, rope_sin=sin)
    cos[7:], sin[7:] = float("nan"), float("nan")
    assert torch.equal(before, op(q, k, v, rope_cos=cos, rope_sin=sin))


def test_lse_is_natural_log_and_merges():
    q = torch.zeros(1, 1, 2, 16, dtype=F16)
    k = torch.zeros(1, 8, 1, 16, dtype=F16)
    _, lse = torch.ops.tileops.gqa_dense_fwd(q, k, k, is_causal=False)
    torch.testing.assert_close(lse, torch.full((1, 2, 1), 8.0).log())
    q, k, v = inputs(b=1, s_q=3, s_kv=20)
    fwd = torch.ops.tileops.gqa_dense_fwd
    whole = fwd(q, k, v, is_causal=False)[0].double()
    parts = [fwd(q, k[:, s], v[:, s], is_causal=False) for s in (slice(0, 9), slice(9, 20))]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(o.double() * (lse - total).exp().transpose(1, 2)[..., None] for o, lse in parts)
    torch.testing.assert_close(merged, whole, atol=2e-3, rtol=2e-3)


# ------------------------------------------------------------------------------- gradients


def reference_gradients(q, k, v, do, **options):
    leaves = [oracle.f64(x).requires_grad_() for x in (q, k, v)]
    o = torch.stack(
        [oracle.gqa_request(*(x[b] for x in leaves), **options)[0] for b in range(q.shape[0])]
    )
    return torch.autograd.grad(o, leaves, oracle.f64(do))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": False},
        {"window_size_left": 2},
        {"softcap": 5.0, "sm_scale": 2.0},
        {"is_causal": False, "window_size_left": 1, "window_size_right": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_gradients(options, dtype):
    q, k, v = (x.requires_grad_() for x in inputs(h=6, dtype=dtype, s_q=7, s_kv=7))
    do = torch.randn_like(q)
    got = torch.autograd.grad(GQADenseFwdOp(**options)(q, k, v), (q, k, v), do)
    for name, a, e in zip("qkv", got, reference_gradients(q, k, v, do, **options), strict=True):
        close(a, e, BACKWARD, f"d{name}")


def test_gradients_are_rotated_back():
    q, k, v = (x.requires_grad_() for x in inputs(d=32))
    cos, sin = oracle.rope_table(16, 9, 10000.0, F16)
    do = torch.randn_like(q)
    op = GQADenseFwdOp(pos_encoding_mode="rope", rotary_dim=16, rope_layout="interleaved")
    got = torch.autograd.grad(op(q, k, v, rope_cos=cos, rope_sin=sin), (q, k, v), do)
    kw = {"rope_cos": cos, "rope_sin": sin, "rope_layout": "interleaved"}
    for a, e in zip(got, reference_gradients(q, k, v, do, **kw), strict=True):
        close(a, e, BACKWARD)


def test_gradient_through_an_expanded_or_transposed_output():
    q, k, v = (x.requires_grad_() for x in inputs())
    op = GQADenseFwdOp()
    summed = torch.autograd.grad(op(q, k, v).sum(), (q, k, v))
    ones = torch.autograd.grad(op(q, k, v), (q, k, v), torch.ones_like(q))
    turned = torch.autograd.grad(op(q, k, v).transpose(1, 2).sum(), (q, k, v))
    for a, b, c in zip(summed, ones, turned, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)


def test_gradient_of_a_query_whose_head_dim_is_not_contiguous():
    q, k, v = inputs()
    odd = q.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    plain = q.clone().requires_grad_()
    for x in (odd, plain):
        GQADenseFwdOp()(x, k, v).square().sum().backward()
    assert torch.equal(odd.grad, plain.grad)


def test_only_the_gradients_asked_for():
    q, k, v = inputs()
    v.requires_grad_()
    GQADenseFwdOp()(q, k, v).sum().backward()
    assert v.grad is not None
    assert q.grad is None


def test_empty_keys_give_zero_and_empty_gradients():
    q, k, v = (x.requires_grad_() for x in inputs(s_kv=0))
    GQADenseFwdOp(is_causal=False)(q, k, v).sum().backward()
    assert torch.equal(q.grad, torch.zeros_like(q))
    assert k.grad.shape == k.shape


def test_bwd_op_is_the_gradient_of_the_forward():
    q, k, v = inputs(s_q=9, s_kv=9, dtype=BF16)
    o, lse = torch.ops.tileops.gqa_dense_fwd(q, k, v)
    do = torch.randn_like(q)
    got = GQABwdOp()(q, k, v, o, do, lse)
    for a, e in zip(got, reference_gradients(q, k, v, do), strict=True):
        close(a, e, BACKWARD)


def test_bwd_ignores_rows_without_a_key():
    q, k, v = inputs(s_q=3, s_kv=3)
    o, lse = torch.ops.tileops.gqa_dense_fwd(q, k, v)
    lse[0, :, 1] = -INF
    dq, *rest = GQABwdOp()(q, k, v, o, torch.randn_like(o), lse)
    assert (dq[0, 1] == 0).all()
    assert all(x.isfinite().all() for x in rest)


def test_compiled_training_step_equals_eager():
    q, k, v = inputs(dtype=BF16)
    op = GQADenseFwdOp()

    def step(q, k, v):
        return op(q * 2, k, v).square().sum()

    grads = []
    for fn in (step, torch.compile(step, fullgraph=True, dynamic=True)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        fn(*leaves).backward()
        grads.append([x.grad for x in leaves])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


# Dynamo reads .grad of the sliced view.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_backward_of_key_slices_under_dynamic_compile():
    q, k, v = inputs(b=1, s_q=8, s_kv=64)
    op = GQADenseFwdOp()
    compiled = torch.compile(lambda *x: op(*x), fullgraph=True, dynamic=True)
    compiled(q, k, v)
    results = []
    for fn in (op, compiled):
        leaf = k.clone().requires_grad_()
        fn(q, leaf[:, :32], v[:, :32]).sum().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(*results)
    assert (results[0][:, 32:] == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0, "window_size_left": 2},
        {"is_causal": False, "window_size_left": 1, "window_size_right": 0, "sm_scale": 0.7},
        {"pos_encoding_mode": "rope", "rotary_dim": 4, "rope_layout": "interleaved"},
    ],
    ids=str,
)
def test_the_reference_passes_gradcheck(options):
    """Forward joined to its backward, called directly in float64 (the op admits 16-bit only)."""
    tables = {}
    if "rotary_dim" in options:
        cos, sin = oracle.rope_table(4, 6, 10000.0, torch.float64)
        tables = {"rope_cos": cos, "rope_sin": sin}

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            o, lse = torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])
            call = GQA_DENSE_FWD.Call(q, k, v, **tables, **options)
            reference.gqa_dense_fwd((o, lse), call)
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        def backward(ctx, do):
            q, k, v, o, lse = ctx.saved_tensors
            out = tuple(torch.empty_like(x) for x in (q, k, v))
            call = GQA_DENSE_BWD.Call(q, k, v, o, do, lse, **tables, **options)
            reference.gqa_dense_bwd(out, call)
            return out

    leaves = [x.requires_grad_() for x in inputs(1, 3, 5, 4, 2, 6, dtype=torch.float64)]
    assert torch.autograd.gradcheck(Attention.apply, leaves)


def test_checkpointing():
    q, k, v = (x.requires_grad_() for x in inputs())
    op = GQADenseFwdOp()
    plain = torch.autograd.grad(op(q, k, v).sum(), (q, k, v))
    again = torch.autograd.grad(checkpoint(op, q, k, v, use_reentrant=False).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_second_derivatives_are_refused_when_executed():
    q, k, v = (x.requires_grad_() for x in inputs())
    (dq,) = torch.autograd.grad(GQADenseFwdOp()(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(GradientError, match="gqa_dense_bwd: second derivatives"):
        dq.sum().backward()


def test_gradients_that_do_not_exist_name_the_argument():
    q, k, v = inputs(d=32)
    cos, sin = oracle.rope_table(32, 9, 10000.0, F16)
    op = GQADenseFwdOp(pos_encoding_mode="rope")
    o = op(q, k, v, rope_cos=cos.requires_grad_(), rope_sin=sin)
    with pytest.raises(GradientError, match="gqa_dense_fwd: rope_cos has no gradient"):
        o.sum().backward()
    scale = torch.ones(2, 2, requires_grad=True)
    q8, k8, v8 = (x.to(E4M3) for x in (q, k, v))
    o = GQADenseFwdOp(out_dtype=F16)(q8, k8, v8, scale, scale.detach(), scale.detach())
    with pytest.raises(GradientError, match="gqa_dense_fwd: q_scale has no gradient"):
        o.sum().backward()


# -------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_autocast_casts_q_k_and_v(dtype):
    q, k, v = inputs(dtype=torch.float32)
    op = GQADenseFwdOp()
    with torch.autocast("cpu", dtype=dtype):
        o = op(q, k, v.to(dtype))
        compiled = torch.compile(op, fullgraph=True)(q, k, v.to(dtype))
    assert o.dtype == dtype
    assert torch.equal(o, op(q.to(dtype), k.to(dtype), v.to(dtype)))
    assert torch.equal(o, compiled)
    with pytest.raises(ValueError, match="gqa_dense_fwd: q must be float16"):
        op(q, k, v)


def test_autocast_gradients_reach_float32_leaves():
    q, k, v = (x.requires_grad_() for x in inputs(dtype=torch.float32))
    with torch.autocast("cpu", dtype=BF16):
        GQADenseFwdOp()(q, k, v).sum().backward()
    assert q.grad.dtype == torch.float32


# -------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "parameters, sentence",
    [
        ({"sm_scale": 0.0}, "sm_scale must be finite and > 0, got 0.0"),
        ({"sm_scale": float("nan")}, "sm_scale must be finite and > 0, got nan"),
        ({"softcap": -1.0}, "softcap must be None, 0 or a finite number > 0, got -1.0"),
        ({"softcap": INF}, "softcap must be None, 0 or a finite number > 0, got inf"),
        ({"window_size_left": -2}, r"window_size_left must be -1 \(unlimited\) or >= 0, got -2"),
        ({"window_size_right": -5}, "window_size_right must be -1"),
        ({"pos_encoding_mode": "alibi"}, "pos_encoding_mode must be 'none' or 'rope'"),
        ({"rope_layout": "gptj"}, "rope_layout must be 'neox' or 'interleaved', got 'gptj'"),
        ({"rotary_dim": 8}, "rotary_dim must be None with pos_encoding_mode='none', got 8"),
        ({"pos_encoding_mode": "rope", "rotary_dim": 7}, "rotary_dim must be positive and even"),
        ({"pos_encoding_mode": "rope", "rotary_dim": 0}, "rotary_dim must be positive and even"),
        ({"out_dtype": torch.float32}, "out_dtype must be None, float16 or bfloat16"),
        ({"target": "nobody"}, "target must be None or one of 'builtin', got 'nobody'"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_parameter_rules(parameters, sentence):
    with pytest.raises(ValueError, match=f"gqa_dense_fwd: {sentence}"):
        GQADenseFwdOp(**parameters)
    if "target" not in parameters:
        with pytest.raises(ValueError, match=f"gqa_dense_fwd: {sentence}"):
            torch.ops.tileops.gqa_dense_fwd(*inputs(), **parameters)


def tensor_rules():
    q, k, v = inputs(d=16)
    cos, sin = oracle.rope_table(16, 7, 10000.0, F16)
    rope = {"pos_encoding_mode": "rope"}
    ones = torch.ones(2, 2)
    q8, k8, v8 = (x.to(E4M3) for x in (q, k, v))
    yield {}, (q[0], k, v), r"q must have shape \[B, S_q, H, D\], got \[5, 4, 16\]"
    yield {}, (q, k[:1], v), r"k must have shape .* with B=2, D=16, got \[1, 7, 2, 16\]"
    yield {}, (q, k, v[:, :3]), r"v must have shape .* got \[2, 3, 2, 16\]"
    yield {}, (q[..., :0], k[..., :0], v[..., :0]), "q must have D > 0, got 0"
    yield {}, (q.float(), k, v), "q must be float16 or bfloat16 or float8_e4m3fn, got float32"
    yield {}, (q, k.bfloat16(), v), "k must have the dtype of q, float16, got bfloat16"
    yield {}, (q[:, :, :3], k, v), "k must have a number of heads that divides the 3 query heads"
    yield {}, (q, k[:, :, :0], v[:, :, :0]), "divides the 4 query heads, got 0"
    yield {}, (q, k[:, :3], v[:, :3]), "q must not be longer than k with is_causal=True"
    yield {}, (q, k.to("meta"), v), "k must be on the device of q, cpu, got meta"
    yield {"out_dtype": BF16}, (q, k, v), "out_dtype must be None or the dtype of q, float16"
    yield {}, (q8, k8, v8, ones, ones, ones), "out_dtype must name float16 or bfloat16"
    yield {"out_dtype": F16}, (q8, k8, v8, ones, ones), "v_scale must be given for float8_e4m3fn"
    yield {}, (q, k, v, ones), "q_scale must be None without float8_e4m3fn q, k and v"
    yield (
        {"out_dtype": F16},
        (q8, k8, v8, ones, ones, ones.half()),
        "v_scale must be float32, got float16",
    )
    yield (
        {"out_dtype": F16},
        (q8, k8, v8, ones[:, :1], ones, ones),
        r"q_scale must be float32 \[2, 2\], got float32 \[2, 1\]",
    )
    none = (None, None, None)
    yield rope, (q, k, v), "rope_cos must be given with pos_encoding_mode='rope'"
    yield rope, (q, k, v, *none, cos), "rope_sin must be given"
    yield {}, (q, k, v, *none, cos, sin), "rope_cos must be None with pos_encoding_mode='none'"
    yield (
        rope,
        (q, k, v, *none, cos[:, :4], sin),
        r"rope_cos must have shape \[P, R/2\] with R/2=8",
    )
    yield rope, (q, k, v, *none, cos.float(), sin), "rope_cos must have the output dtype float16"
    yield rope, (q, k, v, *none, cos, sin[:5]), "rope_sin must have the shape of rope_cos"
    yield rope, (q, k, v, *none, cos[:5], sin[:5]), "rope_cos must have at least S_kv=7 rows"
    yield rope | {"rotary_dim": 32}, (q, k, v, *none, cos, sin), "rotary_dim must be at most"
    yield (
        rope | {"is_causal": False},
        (q, k[:, :3], v[:, :3], *none, cos, sin),
        "q must not be longer than k with pos_encoding_mode='rope'",
    )


@pytest.mark.parametrize("parameters, tensors, sentence", list(tensor_rules()))
def test_tensor_rules_say_the_same_everywhere(parameters, tensors, sentence):
    sentence = f"gqa_dense_fwd: .*{sentence}"
    op = GQADenseFwdOp(**parameters)
    with pytest.raises(ValueError, match=sentence):
        op(*tensors)
    meta = [x if x is None else x.to("meta") for x in tensors]
    if "device" not in sentence:
        with pytest.raises(ValueError, match=sentence):
            op(*meta)
        with pytest.raises(ValueError, match=sentence):
            torch.export.export(op, tuple(tensors))
        torch._dynamo.reset()
        with pytest.raises(Exception, match=sentence):
            torch.compile(op, fullgraph=True)(*tensors)


def test_bwd_rules():
    q, k, v = inputs(s_q=5, s_kv=5)
    o, lse = torch.ops.tileops.gqa_dense_fwd(q, k, v)
    op = GQABwdOp()
    with pytest.raises(ValueError, match="gqa_dense_bwd: lse must be float32, got float16"):
        op(q, k, v, o, o, lse.half())
    with pytest.raises(ValueError, match="gqa_dense_bwd: do must have shape"):
        op(q, k, v, o, o[:, :3], lse)
    with pytest.raises(ValueError, match="k must have the sequence length of q, 5, got 7"):
        op(q, *inputs()[1:], o, o, lse)
    with pytest.raises(ValueError, match="gqa_dense_bwd: q must be float16 or bfloat16"):
        op(*(x.to(E4M3) for x in (q, k, v, o, o)), lse)
    with pytest.raises(TypeError, match=r"gqa_dense_bwd: lse must be a torch.Tensor, got float"):
        op(q, k, v, o, o, 1.0)


def test_wrong_types():
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"gqa_dense_fwd: k must be a torch.Tensor, got list"):
        GQADenseFwdOp()(q, [1.0], v)
    with pytest.raises(TypeError, match="window_size_left must be an integer, got a bool"):
        GQADenseFwdOp(window_size_left=True)
    with pytest.raises(TypeError, match="is_causal must be a bool, got int 1"):
        GQADenseFwdOp(is_causal=1)
    with pytest.raises(TypeError, match="sm_scale must be a number, got str"):
        GQADenseFwdOp(sm_scale="0.5")


def test_repr_and_explain():
    op = GQADenseFwdOp(softcap=30)
    assert repr(op).startswith("GQADenseFwdOp(is_causal=True, window_size_left=-1")
    assert "softcap=30.0" in repr(op)
    text = tileops.explain(op, *inputs())
    assert "builtin/cpu: serves" in text
    assert "builtin/reference: would serve" in text
