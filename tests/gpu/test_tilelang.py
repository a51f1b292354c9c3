"""TileLang kernels on a Hopper GPU: graphs, streams, compilers. Values are in every other file."""

import pytest
import torch

from ops_registry.accuracy import FORWARD, LSE
from ops_registry.contract import CONTRACTS, E4M3
from ops_registry.targets import aside
from tests import checks, poison
from tests.gpu import draws, random_calls, test_graphs, twins
from tests.gpu.relength import relengthened
from tests.tilelang_calls import launch_of, refusal
from tileops import attention, explain
from tileops.attention import GQADenseFwdOp
from tileops.kernels.common import tilelang_launch

BF16, F16 = torch.bfloat16, torch.float16
DENSE = CONTRACTS["gqa_dense_fwd"]
SERVES = "  builtin/tilelang: serves"


def served():
    """Whether a TileLang kernel serves on this machine."""
    if not torch.cuda.is_available():
        return False
    return SERVES in explain(GQADenseFwdOp(), *noise(256)).splitlines()


def noise(rows, heads=8, heads_kv=2, dim=128, batch=2, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((batch, rows, heads, dim), *[(batch, rows + 64, heads_kv, dim)] * 2)
    return [torch.randn(s, generator=generator, device="cuda").to(BF16) for s in shapes]


pytestmark = pytest.mark.skipif(not served(), reason="no TileLang kernel serves here")
OP = GQADenseFwdOp()


def judge(o, given):
    """o against the float64 twin of the dense call."""
    call = OP.contract.Call(*OP.bound(*given, *[None] * 5))
    checks.assert_close(o, twins.twin(call)[0], FORWARD[BF16])


def graph_of(given, stream=None):
    """The graph of a call that was made before, and its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        o = OP(*given)
    return graph, o


def overwrite(given, seed):
    for x, new in zip(given, noise(given[0].shape[1], seed=seed), strict=True):
        x.copy_(new)


def test_explain_names_it():
    lines = explain(OP, *noise(256)).splitlines()
    assert lines[1:3] == [
        "  builtin/tilelang: serves",
        "  builtin/triton: would serve, a better one does",
    ]
    assert "serves 128 and more query rows" in explain(OP, *noise(5))


# ------------------------------------------------------------------- the other operators too


every_operator = pytest.mark.parametrize("name", draws.LONG)
# Options that operators have no default for.
REQUIRED = ("page_size", "max_seqlen_q", "dim_tail", "stride_kv", "q_start_index_s")


def long_call(name, seed=0):
    """A call that the kernel serves; of one seed, the same shapes and lengths."""
    return draws.draw_call(name, draws.LONG[name], draws.Draw(f"{name} {seed}", "cuda", 1 << 20))


def other_values(call, seed):
    """The call with other values, lengths and tables in the same shapes."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def value(x):
        if not torch.is_tensor(x) or not x.is_floating_point() or x.dim() < 3:
            return x
        return torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype)

    return relengthened(type(call)(*map(value, call)), seed)


def judge_call(name, result, static, call):
    """What a call on the tensors `static` gave and changed, for their contents in `call`."""
    contract = CONTRACTS[name]
    actual = (result,) if torch.is_tensor(result) else tuple(result)
    actual += tuple(getattr(static, x) for x in contract.mutated)
    random_calls.judge(name, draws.LONG[name], actual, call)


@every_operator
def test_explain_names_it_for_each(name):
    call = long_call(name)
    contract = CONTRACTS[name]
    required = {x: getattr(call, x) for x in REQUIRED if x in call._fields}
    op = getattr(attention, contract.op_class)(**required)
    said = explain(op, *(getattr(call, x) for x in contract.tensors))
    assert SERVES in said.splitlines()


@every_operator
@pytest.mark.parametrize("stale", [False, True])
def test_values_of_each(name, stale):
    for seed in range(4):
        call = long_call(name, seed)
        used = poison.poisoned(call) if stale else checks.clone(call)
        before = poison.poisoned(call) if stale else checks.clone(call)
        judge_call(name, CONTRACTS[name].op(*used), used, before)


@every_operator
def test_replays_with_other_lengths_and_tables(name):
    call = long_call(name)
    CONTRACTS[name].op(*checks.clone(call))
    graph, static, result = test_graphs.captured(CONTRACTS[name].op, call)
    for seed in range(4):
        other = other_values(call, seed) if seed else checks.clone(call)
        test_graphs.overwrite(static, other)
        graph.replay()
        judge_call(name, result, static, other)


@every_operator
def test_two_streams_of_each(name):
    op, calls = CONTRACTS[name].op, [long_call(name, seed) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in calls]
    used = [[checks.clone(call) for _ in range(10)] for call in calls]
    op(*checks.clone(calls[0]))
    torch.cuda.synchronize()
    found = [[], []]
    for index in range(10):
        for stream, given, results in zip(streams, used, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(op(*given[index]))
    torch.cuda.synchronize()
    for call, given, results in zip(calls, used, found, strict=True):
        for x, result in zip(given, results, strict=True):
            judge_call(name, result, x, checks.clone(call))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dim, group", [(64, 8), (64, 1), (128, 4), (128, 3), (256, 2), (256, 1)])
@pytest.mark.parametrize("rows", [128, 129, 255, 640, 1537])
def test_values(rows, dim, group, is_causal):
    op = GQADenseFwdOp(is_causal=is_causal)
    given = noise(rows, 2 * group, 2, dim)
    call = op.contract.Call(*op.bound(*given, *[None] * 5))
    expected = twins.twin(call)[0]
    for _ in range(3):
        checks.assert_close(op(*given), expected, FORWARD[BF16])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("growth", [1, 8, 200])
def test_scores_that_grow_with_the_keys(growth, dim):
    """Rows move their reference in most blocks; at the end their weights would overflow."""
    q, k, v = noise(1200, dim=dim)
    k *= torch.linspace(0, growth, k.shape[1], device="cuda").to(BF16)[:, None, None]
    judge(OP(q, k, v), (q, k, v))


@pytest.mark.parametrize("options", [{}, {"is_causal": False}, {"window_size_left": 200}], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize("rows", [128, 333, 1537])
def test_values_of_e4m3(rows, out_dtype, options):
    """With scales of either sign, and one that makes all scores equal."""
    op = GQADenseFwdOp(out_dtype=out_dtype, **options)
    given = [x.to(torch.float8_e4m3fn) for x in noise(rows)]
    q_scale, k_scale, v_scale = (torch.rand(2, 2, device="cuda") + 0.1 for _ in range(3))
    q_scale[0, 1] *= -1
    v_scale[1, 0] *= -1
    k_scale[1, 1] = 0
    call = op.contract.Call(*op.bound(*given, q_scale, k_scale, v_scale, None, None))
    assert SERVES in explain(op, *given, q_scale, k_scale, v_scale).splitlines()
    expected = twins.twin(call)[0]
    first = op(*given, q_scale, k_scale, v_scale)
    checks.assert_close(first, expected, FORWARD[out_dtype])
    for _ in range(3):
        assert torch.equal(first, op(*given, q_scale, k_scale, v_scale))


# ------------------------------------------------------- wide heads, pools and parts of tensors

WIDE = {"dim": 256, "heads": 4, "heads_kv": 2}
TURNED = {"pos_encoding_mode": "rope", "rotary_dim": None, "rope_layout": "neox"}
LATER = {"fuse_rope": True, "rotary_dim": 64, "max_position": 1 << 17, "rope_base": 10000.0}
BYTES = {"pool": E4M3, "scales": "tensor"}
NO_LEFT = {"window_size_left": -1}
OTHERS = [
    ("gqa_varlen_fwd", WIDE | NO_LEFT | {"sinks": False}),
    ("gqa_varlen_fwd", WIDE),
    ("gqa_varlen_fwd", WIDE | NO_LEFT | {"softcap": 20.0, "sinks": False}),
    ("gqa_paged_fwd", WIDE | NO_LEFT | {"page_size": 8}),
    ("gqa_paged_fwd", WIDE | {"sinks": True}),
    ("gqa_paged_fwd", WIDE | {"page_size": 32, "window_size_left": 127}),
    ("gqa_paged_fwd", WIDE | NO_LEFT | {"page_size": 64}),
    ("gqa_paged_fwd", WIDE | {"page_size": 256}),
    ("gqa_prefill_paged_fwd", WIDE | {"page_size": 16}),
    ("gqa_prefill_paged_fwd", WIDE | {"softcap": 20.0}),
    # Pools that are copied first.
    ("gqa_paged_fwd", {"page_size": 1, "dim": 64}),
    ("gqa_paged_fwd", {"page_size": 20, "dim": 256}),
    ("gqa_paged_fwd", BYTES | {"page_size": 64}),
    ("gqa_paged_fwd", TURNED | NO_LEFT | BYTES | {"scales": "head"}),
    ("gqa_paged_fwd", TURNED),
    ("gqa_paged_fwd", TURNED | {"rope_layout": "interleaved", "rotary_dim": 32}),
    ("gqa_prefill_paged_fwd", {"page_size": 20}),
    ("gqa_prefill_paged_fwd", {"cache_dtype": E4M3}),
    ("gqa_prefill_paged_fwd", LATER | {"cache_dtype": E4M3, "dim": 128, "page_size": 7}),
]


@pytest.mark.parametrize("op, own", OTHERS, ids=range(len(OTHERS)))
def test_values_of_wide_heads_and_of_copied_pools(op, own):
    key = draws.LONG[op] | own
    if key.get("window_size_left") == -1:
        del key["window_size_left"]
    for seed in range(4):
        call = draws.draw_call(op, key, draws.Draw(f"{op} {seed}", "cuda", 1 << 20))
        assert refusal(call) is None
        used, before = poison.poisoned(call), poison.poisoned(call)
        result = CONTRACTS[op].op(*used)
        actual = (result,) if torch.is_tensor(result) else tuple(result)
        actual += tuple(getattr(used, x) for x in CONTRACTS[op].mutated)
        random_calls.judge(op, key, actual, before)


def test_parts_of_one_tensor():
    """Projected together, heads first, keys in every other row, a request of many."""
    q, k, v = noise(300, 8, 2)
    rows = k.shape[1]
    together = torch.randn(2, rows, 12, 128, device="cuda").to(BF16)
    heads_first = torch.randn(2, 8, 300, 128, device="cuda").to(BF16).transpose(1, 2)
    every_other = torch.randn(2, 2 * rows, 2, 128, device="cuda").to(BF16)[:, ::2]
    for given in (
        (together[:, :300, :8], together[:, :, 8:10], together[:, :, 10:]),
        (heads_first, k, v),
        (q, every_other, v),
        (q[:1], together[:1, :, 8:10], together[1:, :, 10:]),
    ):
        assert SERVES in explain(OP, *given).splitlines()
        judge(OP(*given), given)
        assert torch.equal(OP(*given), OP(*(x.contiguous() for x in given)))


def test_pools_of_pages_that_hold_keys_and_values():
    """[N, 2, page, H_kv, D], and heads before the rows of a page."""
    op = CONTRACTS["gqa_paged_fwd"].op
    call = long_call("gqa_paged_fwd")
    expected = op(*call)
    both = torch.stack((call.k_pages, call.v_pages), 1)
    k, v = both.unbind(1)
    assert torch.equal(op(*call._replace(k_pages=k, v_pages=v)), expected)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    assert torch.equal(op(*call._replace(k_pages=k, v_pages=v)), expected)


def test_replays_of_copied_pools():
    op = CONTRACTS["gqa_paged_fwd"].op
    key = draws.LONG["gqa_paged_fwd"] | BYTES
    call = draws.draw_call("gqa_paged_fwd", key, draws.Draw("copied", "cuda", 1 << 20))
    op(*call)
    graph, static, result = test_graphs.captured(op, call)
    for seed in range(3):
        other = other_values(call, seed) if seed else checks.clone(call)
        test_graphs.overwrite(static, other)
        graph.replay()
        random_calls.judge("gqa_paged_fwd", key, (result,), other)


# ------------------------------------------------------------------------- keys in parts


def chunk(rows, keys, *, heads=8, heads_kv=2, dim=128, batch=1, dtype=BF16, **options):
    """A dense call of few rows over many keys."""
    generator = torch.Generator("cuda").manual_seed(rows + keys)
    shapes = ((batch, rows, heads, dim), *[(batch, keys, heads_kv, dim)] * 2)
    q, k, v = (torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes)
    return DENSE.Call(q, k, v, **options)


CHUNKS = [
    {"rows": 128, "keys": 2048, "heads": 32, "heads_kv": 8},
    {"rows": 129, "keys": 3001, "heads": 4, "batch": 3, "dtype": F16},
    {"rows": 150, "keys": 9000, "dim": 64, "heads": 32, "is_causal": False},
    {"rows": 700, "keys": 700, "heads_kv": 8},  # the first tiles have fewer blocks than parts
    {"rows": 1500, "keys": 1500, "heads": 1, "heads_kv": 1},
    {"rows": 300, "keys": 5000, "dim": 64, "softcap": 20.0, "dtype": F16},
    {"rows": 256, "keys": 5000, "window_size_left": 600},
    {"rows": 300, "keys": 4000, "dim": 64, "window_size_left": 700, "softcap": 10.0},
    {"rows": 300, "keys": 4000, "dim": 256, "window_size_left": 700, "softcap": 10.0},
    {
        "rows": 200, "keys": 3000, "is_causal": False,
        "window_size_left": 900, "window_size_right": 50,
    },
    {"rows": 200, "keys": 3000, "is_causal": False, "window_size_left": 1000},
    {"rows": 128, "keys": 33_000, "heads": 1, "heads_kv": 1},  # more parts than are joined at once
]  # fmt: skip


def judge_parts(o, lse, call):
    expected_o, expected_lse = twins.twin(call)
    checks.assert_close(o, expected_o, FORWARD[call.q.dtype])
    checks.assert_close(lse, expected_lse, LSE[call.q.dtype], "lse")


@pytest.mark.parametrize("given", CHUNKS, ids=range(len(CHUNKS)))
def test_keys_in_parts(given):
    call = chunk(**given)
    assert launch_of(call).args[-2] > 1
    with poison.memory():
        results = [DENSE.op(*call) for _ in range(3)]
    judge_parts(*results[0], call)
    for o, lse in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_in_parts_that_nobody_sees(dim):
    call = chunk(180, 4000, dim=dim, window_size_left=600)
    assert launch_of(call).args[-2] > 1
    for x in (call.k, call.v):
        x[:, : 4000 - 180 - 600] = torch.nan
    judge_parts(*DENSE.op(*call), call)


def test_requests_in_parts_do_not_meet():
    call = chunk(128, 3000, batch=3)
    alone = DENSE.op(*call)
    for x in (call.q, call.k, call.v):
        x[1] = torch.nan
    o, lse = DENSE.op(*call)
    assert torch.equal(o[::2], alone[0][::2]) and torch.equal(lse[::2], alone[1][::2])
    assert o[1].isnan().all()


@pytest.mark.parametrize("with_lse", [True, False])
def test_sinks_and_keys_in_parts(with_lse):
    """No operator over dense keys has sinks; the twin is that of one packed request."""
    from tileops.kernels.common import tilelang_gqa
    from tileops.kernels.common.triton_gqa import Scores

    rows, keys, heads = 200, 3000, 8
    call = chunk(rows, keys, heads=heads)
    sinks = torch.randn(heads, device="cuda")
    sinks[0], sinks[1] = torch.inf, -torch.inf
    o = torch.empty_like(call.q)
    lse = torch.empty(1, heads, rows, device="cuda") if with_lse else None
    scores = Scores(128**-0.5, True, sinks=sinks)
    tilelang_gqa.attend(o, lse, call.q, tilelang_gqa.Keys(call.k, call.v), scores)
    offsets = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (rows, keys)]
    packed = CONTRACTS["gqa_varlen_fwd"].Call(*(x[0] for x in call[:3]), *offsets, sinks=sinks)
    expected_o, expected_lse = twins.twin(packed)
    checks.assert_close(o[0], expected_o, FORWARD[BF16])
    if lse is not None:
        checks.assert_close(lse[0], expected_lse, LSE[BF16])


@pytest.mark.parametrize("out_dtype", [F16, BF16], ids=str)
def test_keys_of_e4m3_in_parts(out_dtype):
    """Every part has the scales of its request, not of the place it is written to."""
    q, k, v = (x.to(torch.float8_e4m3fn) for x in chunk(128, 2500, batch=3)[:3])
    scales = [torch.rand(3, 2, device="cuda") + 0.1 for _ in range(3)]
    call = DENSE.Call(q, k, v, *scales, out_dtype=out_dtype)
    # A part of few weights could leave float16 where the whole does not.
    assert (launch_of(call).args[-2] > 1) == (out_dtype == BF16)
    o, lse = DENSE.op(*call)
    expected_o, expected_lse = twins.twin(call)
    checks.assert_close(o, expected_o, FORWARD[out_dtype])
    checks.assert_close(lse, expected_lse, LSE[out_dtype], "lse")


def test_replays_of_keys_in_parts():
    call = chunk(**CHUNKS[0])
    DENSE.op(*call)
    graph, static, result = test_graphs.captured(DENSE.op, call)
    for seed in range(3):
        other = other_values(call, seed)
        test_graphs.overwrite(static, other)
        graph.replay()
        judge_parts(*result, other)


def test_keys_in_parts_leave_the_counter_at_zero():
    for given in CHUNKS[:4]:
        DENSE.op(*chunk(**given))
        torch.cuda.synchronize()
        assert tilelang_launch.counter(noise(1)[0]).item() == 0


def test_replays_on_other_inputs():
    given = noise(700)
    OP(*given)
    graph, o = graph_of(given)
    for seed in (1, 2):
        overwrite(given, seed)
        graph.replay()
        judge(o, given)


def test_more_captures_than_counters(monkeypatch):
    """Those that are left without one zero their own in the graph."""
    given = noise(300)
    OP(*given)
    monkeypatch.setattr(tilelang_launch, "SLOTS", 0)
    graph, o = graph_of(given)
    for seed in (1, 2, 3):
        overwrite(given, seed)
        graph.replay()
        judge(o, given)


def test_two_streams_at_once():
    several = [noise(900, seed=seed) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in several]
    OP(*several[0])
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(20):
        for stream, given, outputs in zip(streams, several, found, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(OP(*given))
    torch.cuda.synchronize()
    for given, outputs in zip(several, found, strict=True):
        judge(outputs[0], given)
        assert all(torch.equal(outputs[0], o) for o in outputs[1:])


def test_two_graphs_of_one_stream_at_once():
    """Captured on one stream, replayed on two: their launches overlap."""
    several = [noise(900, seed=seed) for seed in range(2)]
    OP(*several[0])
    capturing = torch.cuda.Stream()
    graphs = [graph_of(given, capturing) for given in several]
    expected = [OP(*given) for given in several]
    streams = [torch.cuda.Stream() for _ in several]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, o), e in zip(graphs, expected, strict=True):
        assert torch.equal(o, e)


def test_counters_are_zero_after_each_call():
    for rows in (128, 300, 2000):
        OP(*noise(rows))
        torch.cuda.synchronize()
        assert tilelang_launch.counter(noise(1)[0]).item() == 0


def test_side_stream():
    """The launch waits for what the current stream does before."""
    OP(*noise(500))
    given = noise(500)
    late = [torch.zeros_like(x) for x in given]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late, given, strict=True):
            x.copy_(y)
        o = OP(*late)
    stream.synchronize()
    judge(o, given)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_other_device():
    given = [x.to("cuda:1") for x in noise(300)]
    with torch.cuda.device(0):
        o = OP(*given)
        assert torch.cuda.current_device() == 0 and o.device.index == 1
    assert torch.equal(o.cpu(), OP(*(x.to("cuda:0") for x in given)).cpu())


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_whole(mode):
    """The program calls the operator, which chooses at every call."""
    with checks.fresh_dynamo(), torch.no_grad():
        compiled = torch.compile(lambda *x: OP(*x), dynamic=True, fullgraph=True, mode=mode)
        for rows in (300, 301, 5, 1000):
            for _ in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                given = noise(rows)
                judge(compiled(*given).clone(), given)


def test_gradients():
    """Inputs that require gradients reach the kernel; the backward is Triton's."""
    given = noise(256)
    leaves = [x.clone().requires_grad_() for x in given]
    do = torch.randn_like(given[0])
    o = OP(*leaves)
    judge(o.detach(), given)
    found = torch.autograd.grad(o, leaves, do)
    with aside("tilelang"):
        expected = torch.autograd.grad(OP(*leaves), leaves, do)
    for x, e in zip(found, expected, strict=True):
        torch.testing.assert_close(x, e, atol=2e-2, rtol=2e-2)


def test_after_a_call_that_failed():
    given = noise(300)
    OP(*given)
    with pytest.raises(ValueError, match="v must have shape"):
        OP(given[0], given[1], given[2][..., 1:])
    judge(OP(*given), given)


def test_addresses_that_it_cannot_read():
    q, k, v = noise(300)
    room = torch.empty(q.numel() + 1, dtype=BF16, device="cuda")
    moved = room[1:].view(q.shape).copy_(q)
    assert "multiples of 16 bytes" in explain(OP, moved, k, v)
    judge(OP(moved, k, v), (q, k, v))
