"""The lightning indexer beyond the shared harness: quantization, windows, refusals."""

import copy
import pickle

import pytest
import torch

import tileops
from ops_registry.accuracy import INDEXER
from ops_registry.contract import E4M3
from ops_registry.errors import GradientError
from tests import checks, oracle
from tileops.attention import FP8LightningIndexerFwdOp

BF16, F32 = torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")


def inputs(b=2, s=5, s_kv=20, h=4, g=2, d=16, kind="scaled", seed=0):
    """kind: "bf16", or e4m3 keys that are "scaled" or "plain"."""
    generator = torch.Generator().manual_seed(seed)
    dtype = BF16 if kind == "bf16" else E4M3
    q = torch.randn(b, s, h, d, generator=generator).to(dtype)
    k = torch.randn(b, s_kv, g, d, generator=generator).to(dtype)
    weights = torch.randn(s, h, generator=generator)
    start = torch.randint(-2, s_kv + 1, (s,), generator=generator).to(torch.int32)
    end = torch.randint(-1, s_kv + 3, (s,), generator=generator).to(torch.int32)
    scale = torch.rand(b, s_kv, g, generator=generator) + 0.1 if kind == "scaled" else None
    return q, k, weights, start, end, scale


def windows(args, start, end):
    """The same call with these windows."""
    made = [torch.tensor(x, dtype=torch.int32).expand(args[0].shape[1]) for x in (start, end)]
    return (*args[:3], *made, args[5])


def check(args):
    logits = FP8LightningIndexerFwdOp()(*args)
    checks.assert_close(logits, oracle.fp8_lightning_indexer(*args), INDEXER[F32], "logits")
    return logits


# --------------------------------------------------------------------------------- values


@pytest.mark.parametrize("seed", range(20))
def test_random_calls(seed):
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    g, per = pick(1, 2, 3), pick(1, 3, 16)
    sizes = pick(0, 1, 3), pick(0, 1, 17, 70), pick(0, 1, 33, 200)
    kind = pick("bf16", "scaled", "plain")
    args = inputs(*sizes, g * per, g, pick(8, 20, 64), kind, seed)
    logits = check(args)
    unclean = FP8LightningIndexerFwdOp(False)(*args)
    inside = logits > -INF
    assert torch.equal(unclean[inside], logits[inside])


@pytest.mark.parametrize("s_kv", [1, 63, 65, 257, 300, 513, 1023, 1025, 2500])
def test_key_counts(s_kv):
    args = inputs(1, 3, s_kv, 2, 1)
    assert check(windows(args, 0, s_kv)).isfinite().all()
    check(args)


def test_many_heads():
    check(windows(inputs(1, 9, 40, 64, 1, 128), 0, 40))


def test_windows_are_clamped_and_inverted_ones_are_empty():
    args = inputs(1, 8, 20)
    start = [0, -5, 3, 19, 20, 7, -(2**31), 5]
    end = [20, 4, 99, 20, 25, 7, 2**31 - 1, 2]
    args = windows(args, start, end)
    logits = check(args)
    inside = (logits > -INF).sum((0, 2, 3)).tolist()
    assert inside == [2 * n for n in (20, 4, 17, 1, 0, 0, 20, 0)]


def test_no_window_at_all():
    for end in (0, -1):
        logits = FP8LightningIndexerFwdOp()(*windows(inputs(), 0, end))
        assert (logits == -INF).all()


def test_keys_outside_the_window_do_not_leak():
    args = windows(inputs(1, 4, 512), 100, 120)
    expected = check(args)
    k = args[1].clone()
    k.view(torch.uint8)[:, :100] = 0x7F
    k.view(torch.uint8)[:, 120:] = 0xFF
    scale = args[5].clone()
    scale[:, :100], scale[:, 120:] = NAN, INF
    op = FP8LightningIndexerFwdOp()
    assert torch.equal(op(args[0], k, *args[2:5], scale), expected)


def test_groups_see_their_own_heads():
    args = windows(inputs(g=2), 0, 20)
    logits = check(args)
    q, k, weights, start, end, scale = args
    for g in range(2):
        alone = FP8LightningIndexerFwdOp()(
            q[:, :, 2 * g : 2 * g + 2],
            k[:, :, g : g + 1],
            weights[:, 2 * g : 2 * g + 2],
            start,
            end,
            scale[:, :, g : g + 1],
        )
        torch.testing.assert_close(alone[..., 0], logits[..., g])


def test_relu_comes_before_the_weight():
    q = torch.tensor([1.0, -1.0]).to(E4M3).reshape(1, 1, 2, 1)
    k = torch.ones(1, 1, 1, 1).to(E4M3)
    weights = torch.tensor([[-2.0, -3.0]])
    window = torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    assert FP8LightningIndexerFwdOp()(q, k, weights, *window).item() == -2.0


# ---------------------------------------------------------------------------- quantization


def test_a_bf16_call_is_the_e4m3_call_on_its_codes():
    q, k, weights, start, end, _ = windows(inputs(kind="bf16"), 0, 20)
    op = FP8LightningIndexerFwdOp()
    codes, scale = oracle.quantize_index_keys(k)
    expected = op(oracle.to_e4m3(q.float()), codes, weights, start, end, scale)
    torch.testing.assert_close(op(q, k, weights, start, end), expected)


def test_bf16_queries_saturate():
    q, k, weights, start, end, _ = windows(inputs(kind="bf16"), 0, 20)
    op = FP8LightningIndexerFwdOp()
    q[:] = q.sign()
    assert torch.equal(op(q * 1000, k, weights, start, end), op(q * 448, k, weights, start, end))


def test_zero_keys_give_zeros():
    q, k, weights, start, end, _ = windows(inputs(kind="bf16"), 0, 20)
    assert (FP8LightningIndexerFwdOp()(q, torch.zeros_like(k), weights, start, end) == 0).all()
    args = windows(inputs(), 0, 20)
    assert (FP8LightningIndexerFwdOp()(*args[:5], torch.zeros_like(args[5])) == 0).all()


def test_tiny_and_large_keys_keep_their_precision():
    q, k, weights, start, end, _ = windows(inputs(kind="bf16", d=64), 0, 20)
    op = FP8LightningIndexerFwdOp()
    base = op(q, k, weights, start, end)
    torch.testing.assert_close(op(q, k * 1024, weights, start, end), base * 1024)
    check((q, k * 2.0**-20, weights, start, end, None))


def test_a_bf16_call_is_similar_to_the_unquantized_formula():
    q, k, weights, start, end, _ = windows(inputs(1, 128, 1024, 32, 1, 64, "bf16"), 0, 1024)
    logits = FP8LightningIndexerFwdOp()(q, k, weights, start, end)[0, :, :, 0].double()
    dots = torch.einsum("shd,td->sht", q[0].double(), k[0, :, 0].double())
    exact = torch.einsum("sht,sh->st", dots.relu(), weights.double())
    similarity = 2 * (logits * exact).sum() / (logits.square().sum() + exact.square().sum())
    assert 1 - similarity <= 1e-3


def test_without_a_scale_it_is_one():
    args = windows(inputs(kind="plain"), 0, 20)
    op = FP8LightningIndexerFwdOp()
    assert torch.equal(op(*args), op(*args[:5], torch.ones(2, 20, 2)))


# ----------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("sizes", [dict(b=0), dict(s=0), dict(s_kv=0)])
@pytest.mark.parametrize("kind", ["bf16", "scaled"])
def test_nothing_to_do(sizes, kind):
    args = inputs(**sizes, kind=kind)
    shape = (args[0].shape[0], args[0].shape[1], args[1].shape[1], 2)
    assert FP8LightningIndexerFwdOp()(*args).shape == shape


def test_no_query_heads():
    check(inputs(h=0))


def test_autocast_does_not_change_the_arithmetic():
    args = inputs(kind="bf16")
    op = FP8LightningIndexerFwdOp()
    expected = op(*args)
    with torch.autocast("cpu", BF16):
        assert torch.equal(op(*args), expected)


def test_a_gradient_is_refused_when_it_is_executed():
    args = inputs(kind="bf16")
    args[2].requires_grad_()
    op = FP8LightningIndexerFwdOp()
    for fn in (op, torch.compile(op, fullgraph=True)):
        logits = fn(*args)
        with pytest.raises(GradientError, match="fp8_lightning_indexer has no gradient"):
            logits.sum().backward()


# -------------------------------------------------------------------------------- refusals


def rules():
    q, k, w, start, end, scale = inputs()
    half = inputs(kind="bf16")
    yield (q[0], k, w, start, end, scale), r"index_q must have shape \[B, S, H, D\]"
    yield (q, k[:1], w, start, end, scale), "index_k must have shape .* with B=2"
    yield (q[..., :8], k, w, start, end, scale), "index_k must have shape"
    yield (q, k, w[:3], start, end, scale), r"weights must have shape \[S, H\] with S=5, H=4"
    yield (q, k, w[:, :1], start, end, scale), "weights must have shape"
    yield (q, k, w, start[:3], end, scale), r"cu_seqlen_ks must have shape \[S\] with S=5"
    yield (q, k, w, start, end[:3], scale), "cu_seqlen_ke must have shape"
    yield (q, k, w, start, end, scale[:, :3]), "index_k_scale must have shape"
    yield (q, k, w, start, end, scale[..., 0]), "index_k_scale must have shape"
    yield (q[..., :0], k[..., :0], w, start, end, scale), "index_q must have D > 0, got 0"
    yield (
        (half[0].half(), half[1].half(), w, start, end),
        "index_q must be bfloat16 or float8_e4m3fn, got float16",
    )
    yield (half[0], k, w, start, end), "index_k must have the dtype of index_q"
    yield (q, half[1], w, start, end, scale), "index_k must have the dtype of index_q"
    yield (q, k, w.double(), start, end, scale), "weights must be float32, got float64"
    yield (q, k, w, start.long(), end, scale), "cu_seqlen_ks must be int32, got int64"
    yield (q, k, w, start, end.long(), scale), "cu_seqlen_ke must be int32, got int64"
    yield (q, k, w, start, end, scale.half()), "index_k_scale must be float32, got float16"
    yield (*half[:5], scale), "index_k_scale must be None for bfloat16 inputs"
    yield (q[:, :, :3], k, w[:, :3], start, end, scale), "index_k must have a number of heads"
    yield (q, k[:, :, :0], w, start, end), "index_k must have a number of heads"


@pytest.mark.parametrize("tensors, sentence", list(rules()))
def test_tensor_rules(tensors, sentence):
    op = FP8LightningIndexerFwdOp()
    with pytest.raises(ValueError, match=f"fp8_lightning_indexer: {sentence}"):
        op(*tensors)
    with pytest.raises(ValueError, match=f"fp8_lightning_indexer: {sentence}"):
        op(*(x.to("meta") for x in tensors))


def test_devices_must_agree():
    args = inputs()
    with pytest.raises(ValueError, match="index_k must be on the device of index_q, cpu, got"):
        FP8LightningIndexerFwdOp()(args[0], args[1].to("meta"), *args[2:])


def test_parameter_types():
    with pytest.raises(TypeError, match="clean_logits must be a bool, got int 1"):
        FP8LightningIndexerFwdOp(1)
    args = inputs()
    with pytest.raises(TypeError, match="weights must be a torch.Tensor, got NoneType"):
        FP8LightningIndexerFwdOp()(*args[:2], None, *args[3:])


def test_the_object():
    op = FP8LightningIndexerFwdOp()
    assert repr(op) == "FP8LightningIndexerFwdOp(clean_logits=True)"
    args = inputs()
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert torch.equal(other(*args), op(*args))
    assert "builtin/reference: serves" in tileops.explain(op, *args)
