"""The blockwise engine against float64 loops: values, edges, stale memory, gradients, tracing."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from ops_registry import tracing
from tests import oracle
from tileops.kernels.common import fp8, rope
from tileops.kernels.common.blockwise import (
    ClosedChunks,
    Window,
    attend,
    dense_offsets,
    packed_lengths,
    packed_rows,
    paged_rows,
)
from tileops.kernels.common.blockwise_backward import Rope, attend_backward

NAN = float("nan")
INF = float("inf")
RAGGED = ([5, 0, 70, 1, 300], [7, 3, 70, 90, 333])


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def turn(layout):
    """A hook that rotates by the tables among the inputs."""

    def hook(x, b, positions, rows):
        cos, sin = rope.rope_rows(x["cos"], positions), rope.rope_rows(x["sin"], positions)
        return rope.rotate(rows, cos, sin, layout)

    return hook


def packed(q, k, v, cu_q, cu_kv, window=None, *, scale=None, tables=None, **options):
    """The engine on packed keys: o and lse."""
    inputs = {"k": k, "v": v, "kv_offsets": cu_kv}
    hook = None
    if tables is not None:
        inputs |= {"cos": tables.cos, "sin": tables.sin}
        hook = turn(tables.layout)
    return attend(
        q,
        cu_q,
        packed_lengths(cu_kv),
        inputs,
        packed_rows(hook),
        Window() if window is None else window,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        heads_kv=k.shape[1],
        value_dim=v.shape[2],
        query=hook,
        **options,
    )


def expected(q, k, v, cu_q, cu_kv, window=None, *, scale=None, softcap=None, sinks=None,
             tables=None):  # fmt: skip
    """The float64 loops on packed keys: o and lse."""
    window = Window() if window is None else window
    o = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -INF, dtype=torch.float64)
    starts_q, starts_kv = cu_q.tolist(), cu_kv.tolist()
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(starts_q), itertools.pairwise(starts_kv), strict=True
    ):
        o[q0:q1], lse[:, q0:q1] = oracle.gqa_request(
            q[q0:q1],
            k[k0:k1],
            v[k0:k1],
            window.is_causal,
            window.left,
            window.right,
            scale,
            softcap,
            None if tables is None else tables.cos,
            None if tables is None else tables.sin,
            "neox" if tables is None else tables.layout,
            sinks,
        )
    return o, lse


def close(found, wanted, tol=2e-5):
    torch.testing.assert_close(found.double(), wanted, atol=tol, rtol=tol, equal_nan=False)


def ragged(heads=4, heads_kv=2, dim=16, value_dim=16, lengths=RAGGED, dtype=torch.float32):
    q_lens, kv_lens = lengths
    return (
        random(sum(q_lens), heads, dim, dtype=dtype),
        random(sum(kv_lens), heads_kv, dim, dtype=dtype),
        random(sum(kv_lens), heads_kv, value_dim, dtype=dtype),
        offsets(q_lens),
        offsets(kv_lens),
    )


# ---------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "window",
    [
        Window(True),
        Window(False),
        Window(True, 17),
        Window(False, 10, 5),
        Window(False, -1, 0),
        Window(False, 0, 0),
    ],
)
def test_windows(window):
    args = ragged()
    for found, wanted in zip(packed(*args, window), expected(*args, window), strict=True):
        close(found, wanted)


def test_widest_windows_do_not_wrap():
    args = ragged()
    found = packed(*args, Window(False, 2**63 - 1, 2**63 - 1))[0]
    assert torch.equal(found, packed(*args, Window(False))[0])


@pytest.mark.parametrize("block_q, block_k", [(1, 5), (3, 64), (300, 1000), (None, 16)])
def test_blocks_do_not_matter(block_q, block_k):
    args = ragged()
    blocks = dict(block_q=block_q, block_k=block_k)
    close(packed(*args, Window(True, 40), **blocks)[0], expected(*args, Window(True, 40))[0])


@pytest.mark.parametrize("heads, heads_kv, dim, value_dim", [(3, 3, 8, 5), (7, 1, 5, 9)])
def test_head_shapes(heads, heads_kv, dim, value_dim):
    args = ragged(heads, heads_kv, dim, value_dim)
    close(packed(*args, scale=0.3)[0], expected(*args, scale=0.3)[0])


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_softcap_and_sinks(softcap):
    args = ragged()
    sinks = torch.tensor([0.5, -INF, INF, 300.0])
    o, lse = packed(*args, softcap=softcap, sinks=sinks)
    wanted = expected(*args, softcap=softcap, sinks=sinks)
    close(o, wanted[0])
    close(lse, wanted[1])
    assert (o[:, 2] == 0).all()


@pytest.mark.parametrize("layout", rope.LAYOUTS)
@pytest.mark.parametrize("width", [16, 6])
def test_rope(layout, width):
    args = ragged()
    tables = Rope(*oracle.rope_table(width, 400, 1000.0), layout)
    close(packed(*args, tables=tables)[0], expected(*args, tables=tables)[0], 5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    args = ragged(dtype=dtype)
    o, lse = packed(*args)
    assert o.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(o, expected(*args)[0], 2e-2 if dtype == torch.bfloat16 else 2e-3)
    assert packed(*args, out_dtype=torch.float32)[0].dtype == torch.float32


def test_autocast_leaves_products_alone():
    args = ragged()
    with torch.autocast("cpu", torch.bfloat16):
        close(packed(*args)[0], expected(*args)[0])


def test_scales_per_request_and_kv_head():
    """The hooks of FP8 calls: a factor on the query block and one on the finished rows."""
    q, k, v, cu_q, cu_kv = ragged()
    codes = [fp8.store_e4m3(x) for x in (q, k, v)]
    scales = torch.rand(3, len(cu_q) - 1, 2) + 0.5

    def query(x, b, positions, rows):
        return rows * (x["qk"].index_select(0, b)[0]).repeat_interleave(2)[:, None]

    def finish(x, b, local, rows):
        return rows * x["v_scale"].index_select(0, b)[0].repeat_interleave(2)[:, None]

    o, _ = attend(
        codes[0],
        cu_q,
        packed_lengths(cu_kv),
        {"k": codes[1], "v": codes[2], "kv_offsets": cu_kv, "qk": scales[0] * scales[1],
         "v_scale": scales[2]},
        packed_rows(),
        Window(),
        scale=0.25,
        heads_kv=2,
        value_dim=16,
        query=query,
        finish=finish,
        out_dtype=torch.float32,
    )  # fmt: skip
    close(o, oracle.gqa_varlen_fwd(*codes, cu_q, cu_kv, *scales), 5e-5)


def test_closed_chunks():
    lengths = [130, 0, 33, 7]
    cu, size = offsets(lengths), 8
    chunk_offsets = offsets([-(-n // size) for n in lengths])
    q, k, v = random(170, 4, 16), random(23, 2, 16), random(23, 2, 12)
    k[16], v[16] = NAN, NAN  # the trailing chunk of a request is never closed
    o, lse = attend(
        q,
        cu,
        packed_lengths(chunk_offsets),
        {"k": k, "v": v, "kv_offsets": chunk_offsets},
        packed_rows(),
        ClosedChunks(size),
        scale=0.2,
        heads_kv=2,
        value_dim=12,
    )
    k[16], v[16] = 0, 0
    wanted = oracle.nsa_compressed_fwd(q, k, v, cu, chunk_offsets, 0.2, size)
    close(o, wanted[0])
    close(lse, wanted[1])


# -------------------------------------------------------------------- edges and stale memory


@pytest.mark.parametrize(
    "lengths", [([], []), ([0], [0]), ([3], [0]), ([0], [3]), ([4, 2], [2, 0]), ([0, 0], [5, 1])]
)
def test_empty(lengths):
    args = ragged(lengths=lengths)
    o, lse = packed(*args, sinks=torch.tensor([0.0, INF, -INF, 1.0]))
    wanted = expected(*args, sinks=torch.tensor([0.0, INF, -INF, 1.0]))
    close(o, wanted[0])
    close(lse, wanted[1])
    assert not o[lse.t() == -INF].any()


def test_rows_past_the_last_request():
    q, k, v, cu_q, cu_kv = ragged()
    q = torch.cat([q, torch.full((300, 4, 16), NAN)])
    o, lse = packed(q, k, v, cu_q, cu_kv)
    close(o[:-300], expected(q[:-300], k, v, cu_q, cu_kv)[0])
    assert not o[-300:].any() and (lse[:, -300:] == -INF).all()


def paged(lengths, page_size, dtype=torch.float32):
    """Pools full of NaN but for the live rows, and a table with a wild tail."""
    used = [-(-n // page_size) for n in lengths]
    pages = torch.randperm(sum(used) + 3)
    k, v = (torch.full(((sum(used) + 3) * page_size, 2, 16), NAN, dtype=dtype) for _ in "kv")
    table = torch.full((len(lengths), max(used, default=0) + 1), -(2**31), dtype=torch.int32)
    for b, (n, first) in enumerate(zip(lengths, offsets(used).tolist(), strict=False)):
        table[b, : used[b]] = pages[first : first + used[b]]
        rows = oracle.physical_rows(table[b], n, page_size)
        k[rows], v[rows] = random(n, 2, 16, dtype=dtype), random(n, 2, 16, dtype=dtype)
    return k, v, table, torch.tensor(lengths, dtype=torch.int32)


def run_paged(q, cu_q, k, v, table, lengths, page_size, window=None, **options):
    return attend(
        q,
        cu_q,
        lengths,
        {"k": k, "v": v, "table": table},
        paged_rows(page_size),
        Window() if window is None else window,
        scale=0.25,
        heads_kv=k.shape[1],
        value_dim=v.shape[2],
        **options,
    )[0]


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("window", [Window(), Window(False, 9, 3)])
def test_paged_reads_live_rows_only(page_size, window):
    k, v, table, lengths = paged([70, 0, 33, 300], page_size)
    q_lens = [2, 3, 0, 40]
    q, cu_q = random(sum(q_lens), 4, 16), offsets(q_lens)
    o = run_paged(q, cu_q, k, v, table, lengths, page_size, window)
    shape = (-1, page_size, *k.shape[1:])
    wanted = oracle.gqa_paged_fwd(
        q,
        k.view(shape),
        v.view(shape),
        table,
        lengths,
        cu_q,
        is_causal=window.is_causal,
        window_size_left=window.left,
        window_size_right=window.right,
    )
    close(o, wanted)


@pytest.mark.parametrize("page", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_used_page_outside_the_pool_raises(page):
    k, v, table, lengths = paged([70, 33], 16)
    table[1, 1] = page
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        run_paged(random(2, 4, 16), offsets([1, 1]), k, v, table, lengths, 16)


@pytest.mark.parametrize("pool, width", [(0, 4), (64, 0)])
def test_empty_pool_or_table_raises_only_if_used(pool, width):
    k, table = torch.zeros(pool, 2, 16), torch.zeros(1, width, dtype=torch.int32)
    q, cu_q = random(1, 4, 16), offsets([1])
    assert not run_paged(q, cu_q, k, k, table, torch.tensor([0]), 16).any()
    with pytest.raises((IndexError, RuntimeError)):
        run_paged(q, cu_q, k, k, table, torch.tensor([5]), 16)


# ------------------------------------------------------------------------------- gradients


class Attention(torch.autograd.Function):
    """Forward and backward joined, as the operators join theirs."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, cu_q, cu_kv, window, options):
        o, lse = packed(q, k, v, cu_q, cu_kv, window, sinks=sinks, **options, block_k=5)
        ctx.save_for_backward(q, k, v, o, lse, sinks, cu_q, cu_kv)
        ctx.window, ctx.options = window, options
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse, sinks, cu_q, cu_kv = ctx.saved_tensors
        options = {"rope" if n == "tables" else n: x for n, x in ctx.options.items()}
        dq, dk, dv, dsinks = attend_backward(
            q, k, v, o, do, lse, cu_q, cu_kv, ctx.window, sinks=sinks, **options, block_k=3
        )
        return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None


TABLES = tuple(t.double() for t in oracle.rope_table(4, 16, 100.0))


@pytest.mark.parametrize(
    "lengths, window, options, with_sinks",
    [
        (([3, 0, 5], [5, 2, 5]), Window(True), {}, False),
        (([4, 2], [2, 3]), Window(False, 2, 1), {"softcap": 1.5}, True),
        (([3, 2], [6, 3]), Window(True, 1), {"tables": Rope(*TABLES, "interleaved")}, True),
        (([3, 2], [4, 0]), Window(False, -1, 0), {"softcap": 2.0, "tables": Rope(*TABLES)}, False),
    ],
)
def test_gradients(lengths, window, options, with_sinks):
    q, k, v, cu_q, cu_kv = ragged(4, 2, 5, 3, lengths, torch.float64)
    q = torch.cat([q, torch.ones(2, 4, 5, dtype=torch.float64)])  # rows of no request
    sinks = random(4, dtype=torch.float64).requires_grad_() if with_sinks else None
    options = {"scale": 0.7, "block_q": 2, **options}
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), sinks)

    def run(q, k, v, sinks):
        return Attention.apply(q, k, v, sinks, cu_q, cu_kv, window, options)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    o = run(*inputs)
    assert not torch.autograd.grad(o.sum(), q)[0][-2:].any()


def test_gradients_in_many_blocks():
    args = ragged(dtype=torch.bfloat16)
    o, lse = packed(*args)
    do = random(*o.shape, dtype=torch.bfloat16)
    found = attend_backward(*args[:3], o, do, lse, *args[3:], Window(), scale=0.25)
    for b, (rq, rk) in enumerate(
        zip(*(itertools.pairwise(c.tolist()) for c in args[3:]), strict=True)
    ):
        q, k, v = (
            x[a:z].double().requires_grad_() for x, (a, z) in zip(args, (rq, rk, rk), strict=False)
        )
        wanted = oracle.gqa_request(q, k, v)[0] if rq[1] > rq[0] else None
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        if wanted is not None:
            grads = torch.autograd.grad(wanted, (q, k, v), do[rq[0] : rq[1]].double())
        for x, (a, z), g in zip(found, (rq, rk, rk), grads, strict=False):
            torch.testing.assert_close(
                x[a:z].double(), g, atol=3e-2, rtol=3e-2, msg=lambda m, b=b: f"request {b}: {m}"
            )


@pytest.mark.parametrize("sink", [INF, -INF])
def test_infinite_sinks_have_no_gradient(sink):
    args = ragged(lengths=([3, 2], [3, 0]))
    sinks = torch.full((4,), sink)
    o, lse = packed(*args, sinks=sinks)
    grads = attend_backward(
        *args[:3], o, torch.ones_like(o), lse, *args[3:], Window(), scale=0.25, sinks=sinks
    )
    assert not grads[3].any()
    assert all(g.isfinite().all() for g in grads)


# ---------------------------------------------------------------------------- rope and fp8


def test_rope_table_and_rotation_of_a_call():
    positions = torch.tensor([0, 1, 131071])
    cos, sin = rope.rope_angles(positions, 6, 1e6)
    full = oracle.rope_table(6, 131072, 1e6)
    assert torch.equal(cos, full[0][positions]) and torch.equal(sin, full[1][positions])
    x = random(3, 2, 9)
    for layout in rope.LAYOUTS:
        turned = rope.rotate(x, cos, sin, layout)
        close(turned, oracle.rotate(x, positions, *full, layout))
        close(rope.rotate_back(turned, cos, sin, layout), x.double())


SCALES = (1.0, 0.3, 1 / 448, 123.456, 1e-6)


def store(x, scale):
    return fp8.store_e4m3(x, scale)


def check_store(run, dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for value in SCALES:
        scale = torch.tensor([value])
        found, wanted = run(x, scale), oracle.store_e4m3(x, scale)
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), value
        loaded = fp8.load_e4m3(wanted, scale)
        assert torch.equal(loaded.nan_to_num(), (wanted.float() * scale).nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_store_is_exact_for_every_pattern(dtype):
    check_store(store, dtype)


@pytest.mark.package
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_store_is_exact_for_every_pattern(dtype):
    check_store(torch.compile(store, fullgraph=True), dtype)


# --------------------------------------------------------------------------------- tracing


@pytest.fixture(scope="module")
def traced():
    """An operator that the compilers decompose into the engine, like the package's own."""
    lib = torch.library.Library("blockwise_test", "FRAGMENT")
    lib.define(
        "attend(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_kv, Tensor sinks, Tensor do)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        tags=(torch.Tag.pt2_compliant_tag,),
    )

    def outputs(q, k, v, cu_q, cu_kv, sinks, do):
        return [x.new_empty(x.shape) for x in (q, q, k, v, sinks)]

    def body(q, k, v, cu_q, cu_kv, sinks, do):
        options = dict(softcap=30.0, sinks=sinks)
        o, lse = packed(q, k, v, cu_q, cu_kv, Window(True, 100), **options)
        grads = attend_backward(
            q, k, v, o, do, lse, cu_q, cu_kv, Window(True, 100), scale=0.25, **options
        )
        results = outputs(q, k, v, cu_q, cu_kv, sinks, do)
        for result, found in zip(results, (o, *grads), strict=True):
            result.copy_(found)
        return tuple(results)

    def rule(mode, op, types, args, kwargs):
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        if custom_triton_ops_decomposition_disabled():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        assert all(issubclass(t, FakeTensor) or t is FunctionalTensor for t in types)
        with mode:
            return body(*args)

    lib.impl("attend", body, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "blockwise_test::attend", lambda *args: tuple(outputs(*args)), lib=lib
    )
    torch.library.register_torch_dispatch(
        "blockwise_test::attend", FunctionalTensorMode, rule, lib=lib
    )
    yield torch.ops.blockwise_test.attend.default
    lib._destroy()


def traced_call(lengths):
    args = ragged(lengths=lengths)
    return (*args, random(4), random(sum(lengths[0]), 4, 16))


def check_traced(run, op, lengths):
    args = traced_call(lengths)
    for found, wanted in zip(run(*args), op(*args), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_compiles_once_without_guards(traced):
    rooms = []

    def backend(graph, inputs):
        context = torch._guards.TracingContext.get()
        rooms.append(context.fake_mode.shape_env)
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(traced, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    first = traced_call(([5, 0, 100, 33], [7, 3, 100, 300]))
    for x in (*first[:5], first[6]):
        torch._dynamo.maybe_mark_dynamic(x, 0)
    with torch.no_grad():
        compiled(*first)
        for lengths in (RAGGED, ([2] * 40, [9] * 40), ([300, 20], [400, 0])):
            check_traced(compiled, traced, lengths)
    assert len(rooms) == 1
    # What remains is the contract: do is as long as q, v as k, and B agrees.
    assert not [g for g in rooms[0].guards if not str(g.expr).startswith("Eq(")]
    torch._dynamo.reset()


def test_traces_for_a_torch_whose_loops_cannot_write_in_place(traced, monkeypatch):
    monkeypatch.setattr(tracing, "loops_write_in_place", lambda: False)
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        check_traced(compiled, traced, RAGGED)
    torch._dynamo.reset()


def test_traces_empty_extents_and_inputs_that_share_memory(traced):
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        check_traced(compiled, traced, ([3], [0]))
        q, k, v, cu, _, sinks, do = traced_call(([3, 4], [3, 4]))
        kv = torch.stack([k, v])

        def shared(run):
            return run(q, *kv.unbind(0), cu, cu, sinks, do)

        wanted = shared(traced)
        found = torch.compile(shared, backend="aot_eager", fullgraph=True)(traced)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


@pytest.mark.package
def test_packaged(traced, tmp_path, monkeypatch):
    class Model(torch.nn.Module):
        def forward(self, *args):
            return traced(*args)

    dim = {n: torch.export.Dim(n) for n in ("T_q", "T_kv", "B1")}
    spec = [{0: dim[n]} for n in ("T_q", "T_kv", "T_kv", "B1", "B1")]
    spec = (*spec, None, {0: dim["T_q"]})
    with torch.no_grad():
        args = traced_call(([5, 0, 100, 33], [7, 3, 100, 300]))
        program = torch.export.export(Model(), args, dynamic_shapes=(spec,))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "engine.pt2")
        )
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    model = torch._inductor.aoti_load_package(path)
    for lengths in (RAGGED, ([2], [5]), ([3, 1], [0, 5]), ([2] * 40, [9] * 40), ([600], [600])):
        check_traced(model, traced, lengths)
    q, k, v, cu_q, cu_kv, *rest = traced_call(RAGGED)
    with pytest.raises(RuntimeError):  # out of bounds, and no wrap to the last rows
        model(q, k, v, cu_q, cu_kv - 7, *rest)


def test_dense_offsets():
    assert dense_offsets(3, 5, torch.device("cpu")).tolist() == [0, 5, 10, 15]
    assert packed_lengths(offsets([2, 0, 3])).tolist() == [2, 0, 3, 0]
