"""Packed GQA beyond the shared harness: laws, gradients, poison, offsets, refusals."""

import pytest
import torch

import tileops
from ops_registry.accuracy import BACKWARD, FORWARD
from ops_registry.attention.gqa_varlen import GQA_VARLEN_BWD, GQA_VARLEN_FWD
from ops_registry.contract import E4M3
from ops_registry.errors import GradientError
from tests import checks, oracle
from tests.cases import offsets
from tileops.attention import GQADenseFwdOp, GQAVarlenFwdOp
from tileops.kernels.attention.gqa_varlen import reference

BF16, F16 = torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")


def inputs(q_lens=(3, 0, 5), kv_lens=(4, 2, 5), h=4, h_kv=2, d=16, dtype=F16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(q_lens), h, d), (sum(kv_lens), h_kv, d), (sum(kv_lens), h_kv, d)
    packed = (torch.randn(*s, generator=generator).to(dtype) for s in shapes)
    return (*packed, offsets(list(q_lens)), offsets(list(kv_lens)))


def close(o, ref, row=FORWARD, what="o"):
    checks.assert_close(o, ref, row[o.dtype], what)


# --------------------------------------------------------------------------------- values


@pytest.mark.parametrize("gradients", [GQA_VARLEN_BWD.op, None], ids=["eager", "packaged"])
@pytest.mark.parametrize("sinks", [None, torch.empty(0)], ids=["", "sinks"])
def test_no_query_heads(gradients, sinks):
    q, k, v, *cu = inputs(h=0)
    o, lse = GQA_VARLEN_FWD.op(q, k, v, *cu, sinks=sinks)
    assert o.shape == q.shape and lse.shape == (0, 8)
    names = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), cu, strict=True))
    call = GQA_VARLEN_BWD.Call(q=q, k=k, v=v, o=o, do=q, lse=lse, sinks=sinks, **names)
    if gradients is None:
        found = (*(torch.full_like(x, INF) for x in (q, k, v)), torch.empty(0))
        reference.gqa_varlen_bwd(found, call)
    else:
        found = gradients(*call)
    for gradient, x in zip(found, (q, k, v, torch.empty(0)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed):
    """Every option at random against the float64 oracle."""
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    batch = pick(0, 1, 3, 6)
    q_lens = [pick(0, 1, 2, 17, 65, 130) for _ in range(batch)]
    kv_lens = [pick(0, 1, 3, 20, 64, 200) for _ in range(batch)]
    h_kv, g, d = pick(1, 2, 3), pick(1, 3, 5), pick(8, 20, 64)
    args = inputs(q_lens, kv_lens, h_kv * g, h_kv, d, pick(F16, BF16), seed)
    options = {
        "is_causal": pick(True, False),
        "window_size_left": pick(-1, 0, 3, 40),
        "window_size_right": pick(-1, 0, 2, 50),
        "sm_scale": pick(None, 0.05, 0.7),
        "softcap": pick(None, 1.0, 30.0),
    }
    sinks = pick(None, torch.randn(h_kv * g, generator=draw))
    o = GQAVarlenFwdOp(**options)(*args, sinks=sinks)
    close(o, oracle.gqa_varlen_fwd(*args, sinks=sinks, **options), what=str(options))


def test_each_request_is_the_dense_operator():
    q, k, v, cu_q, cu_kv = inputs((3, 0, 5, 1), (7, 2, 5, 40))
    o = GQAVarlenFwdOp(window_size_left=3)(q, k, v, cu_q, cu_kv)
    dense = GQADenseFwdOp(window_size_left=3)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        close(o[rows], dense(q[rows][None], k[keys][None], v[keys][None])[0])


@pytest.mark.parametrize("h, h_kv", [(3, 1), (71, 1), (7, 7), (48, 8)])
def test_groups(h, h_kv):
    args = inputs((1, 37, 1, 5), (6, 37, 1, 9), h=h, h_kv=h_kv)
    close(GQAVarlenFwdOp()(*args), oracle.gqa_varlen_fwd(*args))


def test_sinks_at_the_extremes():
    args = inputs()
    op = GQAVarlenFwdOp()
    none = op(*args)
    assert torch.equal(none, op(*args, sinks=torch.full((4,), -INF)))
    assert (op(*args, sinks=torch.full((4,), INF)) == 0).all()
    assert (op(*args, sinks=torch.full((4,), 300.0)) == 0).all()
    for value in (-1e4, 0.0, 5.0):
        sinks = torch.full((4,), value)
        close(op(*args, sinks=sinks), oracle.gqa_varlen_fwd(*args, sinks=sinks))


def test_a_sink_is_an_extra_key_whose_value_is_zero():
    q, k, v, cu_q, cu_kv = inputs((4,), (4,), h=1, h_kv=1)
    sinks = torch.tensor([0.3])
    o = GQAVarlenFwdOp(is_causal=False)(q, k, v, cu_q, cu_kv, sinks=sinks)
    scores = (q[:, 0].double() @ k[:, 0].double().T) * 16**-0.5
    scores = torch.cat([scores, torch.full((4, 1), 0.3).double()], 1)
    close(o[:, 0], torch.softmax(scores, 1)[:, :4] @ v[:, 0].double())


def test_rows_without_keys_are_zero_with_every_sink():
    q, k, v, cu_q, cu_kv = inputs((5, 3), (2, 0))
    for sinks in (None, torch.tensor([0.0, -INF, INF, 5.0])):
        o = GQAVarlenFwdOp()(q, k, v, cu_q, cu_kv, sinks=sinks)
        assert (o[:3] == 0).all()
        assert (o[5:] == 0).all()
    close(o[3], oracle.gqa_varlen_fwd(q, k, v, cu_q, cu_kv, sinks=sinks)[3])


def test_no_keys_at_all():
    q, k, v, cu_q, cu_kv = inputs((2, 1), (0, 0))
    assert torch.equal(GQAVarlenFwdOp()(q, k, v, cu_q, cu_kv), torch.zeros_like(q))
    nothing = inputs((), ())
    assert GQAVarlenFwdOp()(*nothing).shape == (0, 4, 16)


def test_neighbours_and_padding_rows_do_not_leak():
    q, k, v, cu_q, cu_kv = inputs((3, 4, 6), (5, 4, 7))
    op = GQAVarlenFwdOp()
    before = op(q, k, v, cu_q, cu_kv)
    k[:5], v[:5], k[9:], v[9:] = NAN, INF, NAN, NAN
    assert torch.equal(before[3:7], op(q, k, v, cu_q, cu_kv)[3:7])
    padded = cu_q.clone()
    padded[-1] = 9
    q[9:] = NAN
    o, lse = torch.ops.tileops.gqa_varlen_fwd(
        q[:], *inputs((3, 4, 6), (5, 4, 7))[1:3], padded, cu_kv
    )
    assert (o[9:] == 0).all()
    assert (lse[:, 9:] == -INF).all()


def test_the_lse_of_an_empty_chunk_leaves_a_merge_alone():
    q, k, v, cu_q, cu_kv = inputs((2,), (6,))
    empty = torch.zeros(2, dtype=torch.int32)
    fwd = torch.ops.tileops.gqa_varlen_fwd
    _, a = fwd(q, k[:0], v[:0], cu_q, empty, is_causal=False)
    o, b = fwd(q, k, v, cu_q, cu_kv, is_causal=False)
    assert (a == -INF).all()
    total = torch.logaddexp(a, b)
    assert torch.equal(total, b)
    assert o.isfinite().all()


def test_memory_stays_safe_whatever_the_offsets_hold():
    q, k, v, cu_q, cu_kv = inputs()
    for bad in ([0, 3, 3, 900], [0, 5, 2, 8], [-4, 3, 3, 8]):
        with pytest.raises(IndexError, match="cu_seqlens_q must not decrease and stay in"):
            GQAVarlenFwdOp()(q, k, v, torch.tensor(bad, dtype=torch.int32), cu_kv)


# -------------------------------------------------------------------------------- offsets


def bad_offsets():
    yield [1, 3, 3, 8], [0, 4, 6, 11], r"cu_seqlens_q must start at 0 \(index 0, got 1\)"
    yield [0, 3, 2, 8], [0, 4, 6, 11], r"cu_seqlens_q must not decrease \(index 2, got 2\)"
    yield [0, 3, 3, 7], [0, 4, 6, 11], r"cu_seqlens_q must end at .* \(index 3, got 7\)"
    yield [0, 3, 3, 8], [0, 4, 6, 99], r"cu_seqlens_kv must end at .* \(index 3, got 99\)"


@pytest.mark.parametrize("cu_q, cu_kv, sentence", list(bad_offsets()))
def test_malformed_offsets_are_named(cu_q, cu_kv, sentence):
    q, k, v, *_ = inputs()
    cu_q, cu_kv = (torch.tensor(x, dtype=torch.int32) for x in (cu_q, cu_kv))
    op = GQAVarlenFwdOp(validate_inputs=True)
    with pytest.raises(ValueError, match=f"gqa_varlen_fwd: {sentence}"):
        op(q, k, v, cu_q, cu_kv)
    opening = sentence.split(r" \(")[0].split(" .*")[0]
    with pytest.raises(RuntimeError, match=f"gqa_varlen_fwd: {opening}"):
        torch.compile(op, fullgraph=True, dynamic=True)(q, k, v, cu_q, cu_kv)


def test_rope_positions_are_checked():
    q, k, v, cu_q, cu_kv = inputs((3,), (6,), d=8)
    cos, sin = oracle.rope_table(8, 5, 10000.0, F16)
    op = GQAVarlenFwdOp(pos_encoding_mode="rope", validate_inputs=True)
    with pytest.raises(ValueError, match="gqa_varlen_fwd: .*rope_cos"):
        op(q, k, v, cu_q, cu_kv, rope_cos=cos, rope_sin=sin)
    q, k, v, cu_q, cu_kv = inputs((6,), (3,), d=8)
    with pytest.raises(ValueError, match="gqa_varlen_fwd: "):
        op(q, k, v, cu_q, cu_kv, rope_cos=cos, rope_sin=sin)


def test_validation_passes_good_offsets_eagerly_and_compiled():
    args = inputs()
    op = GQAVarlenFwdOp(validate_inputs=True)
    expected = GQAVarlenFwdOp()(*args)
    assert torch.equal(op(*args), expected)
    assert torch.equal(torch.compile(op, fullgraph=True, dynamic=True)(*args), expected)


def test_offsets_computed_in_the_graph_need_no_break_and_few_compilations():
    backend = checks.CountingBackend()
    op = GQAVarlenFwdOp()

    def step(q, k, v, lens):
        cu = torch.cat([lens.new_zeros(1), lens.cumsum(0)]).to(torch.int32)
        return op(q, k, v, cu, cu)

    with checks.fresh_dynamo():
        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
        for n in range(2, 12):
            lens = [n, 0, 3, 2 * n]
            q, k, v, cu, _ = inputs(lens, lens)
            torch.testing.assert_close(compiled(q, k, v, torch.tensor(lens)), op(q, k, v, cu, cu))
    assert backend.count <= 2


# ------------------------------------------------------------------------------- gradients


def reference_gradients(args, do, sinks=None, **options):
    q, k, v, cu_q, cu_kv = args
    leaves = [oracle.f64(x).requires_grad_() for x in (q, k, v)]
    extra = [] if sinks is None else [oracle.f64(sinks).requires_grad_()]
    parts = []
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        parts.append(
            oracle.gqa_request(
                leaves[0][rows],
                leaves[1][keys],
                leaves[2][keys],
                sinks=extra[0] if extra else None,
                **options,
            )[0]
        )
    o = torch.cat(parts)
    return torch.autograd.grad(o, leaves + extra, oracle.f64(do)[: o.shape[0]])


@pytest.mark.parametrize(
    "options", [{}, {"window_size_left": 2}, {"is_causal": False, "softcap": 4.0}], ids=str
)
@pytest.mark.parametrize("lens", [((1, 65, 130), (1, 65, 130)), ((5, 0, 3), (2, 7, 9))], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients(options, lens, with_sinks):
    args = inputs(*lens, h=6)
    for x in args[:3]:
        x.requires_grad_()
    sinks = torch.randn(6, requires_grad=True) if with_sinks else None
    do = torch.randn(args[0].shape).to(F16)
    leaves = [*args[:3], *([sinks] if with_sinks else [])]
    got = torch.autograd.grad(GQAVarlenFwdOp(**options)(*args, sinks=sinks), leaves, do)
    expected = reference_gradients(args, do, sinks, **options)
    for name, a, e in zip(("q", "k", "v", "sinks"), got, expected, strict=False):
        row = BACKWARD[F16]
        checks.assert_close(a, e, row, f"d{name}")


def test_zero_length_segments_get_exact_zero_gradients():
    args = inputs((0, 5, 3, 0), (7, 0, 2, 11), h=4, h_kv=1, d=64)
    for x in args[:3]:
        x.requires_grad_()
    o = GQAVarlenFwdOp()(*args)
    o.backward(torch.ones_like(o))
    q, k, v = args[:3]
    assert (o[:5] == 0).all()
    assert (k.grad[:7] == 0).all()
    assert (k.grad[9:] == 0).all()
    assert (v.grad[9:] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_padding_rows_get_no_gradient():
    q, k, v, *_ = inputs((20,), (20,))
    cu = torch.tensor([0, 7, 15], dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = GQAVarlenFwdOp()(q, k, v, cu, cu)
    do = torch.ones_like(o)
    do[15:] = NAN
    grads = torch.autograd.grad(o, leaves, do)
    assert (o[15:] == 0).all()
    assert all((g[15:] == 0).all() and g.isfinite().all() for g in grads)


@pytest.mark.parametrize(
    "run", [GQA_VARLEN_BWD.op, reference.gqa_varlen_bwd], ids=["op", "packaged"]
)
def test_gradients_read_no_padding_row(run):
    """The rows of no request may hold NaN in everything, their stored lse included."""
    q, k, v, cu_q, cu_kv = inputs()
    sinks, do = torch.randn(4), torch.ones_like(q)
    o, lse = GQA_VARLEN_FWD.op(q, k, v, cu_q, cu_kv, sinks=sinks)
    padded = [torch.cat([x, torch.full_like(x[:2], NAN)]) for x in (q, o, do)]
    stale = torch.cat([lse, torch.full_like(lse[:, :2], NAN)], dim=1)

    def gradients(q, o, do, lse):
        call = GQA_VARLEN_BWD.Call(q, k, v, cu_q, cu_kv, o, do, lse, sinks=sinks)
        if run is GQA_VARLEN_BWD.op:
            return run(*call)
        out = tuple(torch.empty_like(x) for x in (q, k, v, sinks))
        run(out, call)
        return out

    dq, *others = gradients(*padded, stale)
    expected, *wanted = gradients(q, o, do, lse)
    assert not dq[len(q) :].any()
    for a, b in zip((dq[: len(q)], *others), (expected, *wanted), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0, "window_size_left": 2},
        {"pos_encoding_mode": "rope", "rotary_dim": 4, "is_causal": False},
    ],
    ids=str,
)
def test_the_reference_passes_gradcheck(options):
    """Forward joined to its backward, called directly in float64 (the op admits 16-bit only)."""
    tables = {}
    if "rotary_dim" in options:
        cos, sin = oracle.rope_table(4, 6, 10000.0, torch.float64)
        tables = {"rope_cos": cos, "rope_sin": sin}
    *leaves, cu_q, cu_kv = inputs(
        (2, 0, 1), (3, 2, 0 if not tables else 1), h=2, h_kv=1, d=4, dtype=torch.float64
    )
    leaves.append(torch.randn(2, dtype=torch.float64))

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, sinks):
            o, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
            call = GQA_VARLEN_FWD.Call(q, k, v, cu_q, cu_kv, sinks=sinks, **tables, **options)
            reference.gqa_varlen_fwd((o, lse), call)
            ctx.save_for_backward(q, k, v, sinks, o, lse)
            return o

        @staticmethod
        def backward(ctx, do):
            q, k, v, sinks, o, lse = ctx.saved_tensors
            out = tuple(torch.empty_like(x) for x in (q, k, v, sinks))
            call = GQA_VARLEN_BWD.Call(
                q, k, v, cu_q, cu_kv, o, do, lse, sinks=sinks, **tables, **options
            )
            reference.gqa_varlen_bwd(out, call)
            return out

    assert torch.autograd.gradcheck(Attention.apply, [x.requires_grad_() for x in leaves])


def test_compiled_training_step_equals_eager():
    args = inputs(dtype=BF16)
    op = GQAVarlenFwdOp()
    results = []
    for fn in (op, torch.compile(op, fullgraph=True, dynamic=True)):
        leaves = [x.clone().requires_grad_() for x in args[:3]]
        sinks = torch.zeros(4, requires_grad=True)
        fn(*leaves, *args[3:], sinks=sinks).square().sum().backward()
        results.append([x.grad for x in (*leaves, sinks)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_and_fp8_gradients_are_refused_when_executed():
    args = inputs()
    args[0].requires_grad_()
    (dq,) = torch.autograd.grad(GQAVarlenFwdOp()(*args).sum(), args[0], create_graph=True)
    with pytest.raises(GradientError, match="gqa_varlen_bwd: second derivatives"):
        dq.sum().backward()
    q, k, v = (x.detach().to(E4M3) for x in args[:3])
    ones = torch.ones(3, 2)
    sinks = torch.zeros(4, requires_grad=True)
    o = GQAVarlenFwdOp(out_dtype=F16)(q, k, v, *args[3:], ones, ones, ones, sinks=sinks)
    with pytest.raises(GradientError, match="gqa_varlen_fwd: sinks has no gradient in a float8"):
        o.sum().backward()


# -------------------------------------------------------------------------------- refusals


def rules():
    q, k, v, cu_q, cu_kv = inputs()
    yield (q, k, v, cu_q.long(), cu_kv), "cu_seqlens_q must be int32, got int64"
    yield (
        (q, k, v, cu_q, cu_kv[:-1]),
        r"cu_seqlens_kv must have shape \[B\+1\] with B=3, got \[3\]",
    )
    yield (q, k, v, cu_q[:0], cu_kv[:0]), r"cu_seqlens_q must have shape \[B\+1\], got \[0\]"
    yield (q[None], k, v, cu_q, cu_kv), r"q must have shape \[T_q, H, D\], got \[1, 8, 4, 16\]"
    yield (q, k, v[:5], cu_q, cu_kv), "v must have shape"
    yield (q, k.bfloat16(), v, cu_q, cu_kv), "k must have the dtype of q"
    yield (q[:, :3], k, v, cu_q, cu_kv), "k must have a number of heads that divides the 3"
    none = (None,) * 5
    yield (q, k, v, cu_q, cu_kv, *none, torch.zeros(4).half()), "sinks must be float32"
    yield (q, k, v, cu_q, cu_kv, *none, torch.zeros(3)), r"sinks must have shape \[H\] with H=4"
    yield (q, k, v, cu_q, cu_kv, torch.ones(3, 2)), "q_scale must be None without float8_e4m3fn"


@pytest.mark.parametrize("tensors, sentence", list(rules()))
def test_tensor_rules(tensors, sentence):
    with pytest.raises(ValueError, match=f"gqa_varlen_fwd: {sentence}"):
        GQAVarlenFwdOp()(*tensors)
    with pytest.raises(ValueError, match=f"gqa_varlen_fwd: {sentence}"):
        GQAVarlenFwdOp()(*(x if x is None else x.to("meta") for x in tensors))


def test_the_constructor_takes_validate_inputs_by_position():
    op = GQAVarlenFwdOp(True, -1, -1, None, None, None, "none", None, "neox", True)
    assert op.validate_inputs
    assert "serves" in tileops.explain(op, *inputs())
