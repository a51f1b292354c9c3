"""How TileLang kernels are chosen, without a GPU and without TileLang.

What they compute is seen on a GPU, in `tests/gpu`.
"""

import dataclasses
import importlib
from types import SimpleNamespace

import pytest
import torch

from ops_registry import contract, targets, tracing
from ops_registry.contract import BUILTIN_KERNELS, CONTRACTS, E4M3
from ops_registry.errors import KernelUnavailableError, NoKernelError
from tests import checks
from tests.test_imports import attempt, python
from tests.test_triton_tracing import FakeDriver
from tests.tilelang_calls import (
    BF16,
    CALLS,
    F32,
    GQA_CALLS,
    I32,
    LATENT_CALLS,
    appended,
    dense,
    indexed,
    latent,
    launch_of,
    meta,
    packed,
    paged,
    pools,
    refusal,
)
from tileops import warmup
from tileops.kernels.common import tilelang_limits
from tileops.kernels.common.machine import Machine
from tileops.kernels.common.recorder import recording

triton = pytest.importorskip("triton")
pytest.importorskip("tilelang")  # which tests/run.sh does without

DENSE = CONTRACTS["gqa_dense_fwd"]
every_operator = pytest.mark.parametrize("name", CALLS)
grouped_query = pytest.mark.parametrize("name", GQA_CALLS)
over_latent_rows = pytest.mark.parametrize("name", LATENT_CALLS)


# ------------------------------------------------------------------------------------ refusals


ROPE = {"pos_encoding_mode": "rope", "rope_cos": meta(99, 64), "rope_sin": meta(99, 64)}
ONES = {"k_scale": meta(1, dtype=F32), "v_scale": meta(1, dtype=F32)}
# Parts of one cache with room for more rows, and of wider queries; columns off a boundary.
CACHE = meta(3, 4096, 1, 576)[:, :900]
QUERIES = meta(3, 128, 576)
ODD_PE = torch.empty(3 * 128 * 64 + 1, dtype=BF16)[1:].view(3, 128, 64)

SERVED = {
    "gqa_dense_fwd": [
        dense(dim=64),
        dense(is_causal=False, sm_scale=0.3, rows=128),
        dense(window_size_left=0, window_size_right=3, softcap=1000.0),
        dense(dim=64, dtype=torch.float16, heads=71, heads_kv=1, window_size_left=2**30),
        dense(pos_encoding_mode="rope", rope_cos=meta(900, 64), rope_sin=meta(900, 64)),
        dense(dtype=E4M3, window_size_left=127),
        dense(rows=192, keys=4097),
        dense(rows=129, keys=4096),
        dense(rows=144, dim=64, keys=100_000),
        dense(rows=191, heads=15, keys=4097),
        dense(dim=256, softcap=50.0, window_size_left=4095),
        dense(k=meta(2, 900, 4, 128)[:, :, ::2], v=meta(2, 2, 900, 128).transpose(1, 2)),
        dense(batch=1, q=meta(1, 300, 8, 128).as_strided((1, 300, 8, 128), (1, 1024, 128, 1))),
    ],
    "gqa_varlen_fwd": [
        packed(dim=64),
        packed(rows=705, keys=4097),
        packed(rows=704, keys=4096),
        packed(rows=16 * 3, sinks=meta(8, dtype=F32), window_size_left=127, softcap=0.0),
        packed(pos_encoding_mode="rope", rope_cos=meta(900, 64), rope_sin=meta(900, 64)),
        packed(dtype=E4M3, is_causal=False),
    ],
    "gqa_paged_fwd": [
        paged(dim=64),
        *[paged(page=page) for page in (8, 16, 32, 64, 128, 256, 384)],
        paged(sinks=meta(8, dtype=F32), window_size_left=127, softcap=50.0),
        paged(pages=1 << 20),  # 32 GiB
        paged(dim=256, page=8),
        *[paged(page=page) for page in (1, 4, 24, 48, 96, 192)],
        paged(rows=192, **ROPE),
        paged(**pools(paged(), E4M3), **ONES),
        paged(dim=256, page=20, **pools(paged(page=20, dim=256), E4M3), **ROPE, **ONES),
        paged(v_pages=meta(50, 64, 257)[..., 1:].unflatten(-1, (2, 128))),
        paged(**dict(zip(("k_pages", "v_pages"), meta(50, 2, 64, 2, 128).unbind(1), strict=True))),
    ],
    "gqa_prefill_paged_fwd": [
        appended(dim=64),
        appended(page=8, dtype=torch.float16, is_causal=False, softcap=1.0),
        appended(fuse_rope=True, rotary_dim=32, max_position=4096),
        appended(page=20),
        appended(cache_dtype=E4M3, **pools(appended(), E4M3)),
    ],
    "mla_decode_fwd": [
        latent(heads=64, dtype=torch.float16),
        latent(heads=384, heads_kv=2, keys=1),
        latent(batch=1, keys=1 << 30),
        latent(k=CACHE[..., :512], k_pe=CACHE[..., 512:]),
        latent(q=QUERIES[..., :512], q_pe=QUERIES[..., 512:]),
        latent(q=meta(128, 512, 3).permute(2, 0, 1), q_pe=ODD_PE),
    ],
    "dsa_decode_fwd": [
        indexed(heads=64, dtype=torch.float16, is_causal=False),
        indexed(heads=384, heads_kv=2, sm_scale=0.3, stride_kv=4, q_start_index_s=10**9),
        indexed(slots=1, keys=1),
        indexed(rows=70_000, slots=2048),
        indexed(kv=meta(2, 900, 2, 640)[:, :, 1:, 64:]),
        indexed(q=meta(2, 128, 3, 576).transpose(1, 2)),
    ],
}


@every_operator
def test_what_is_served(name, compiler):
    for call in (CALLS[name](), *SERVED[name]):
        assert refusal(call) is None


def test_scales_of_no_requests_are_of_one(compiler):
    """Rows behind the last request read them."""
    call = packed(dtype=E4M3, batch=0)
    assert refusal(call) is None
    assert launch_of(call).args[8].shape == (2, 1, 2)


@pytest.mark.parametrize("machine", [("cuda", 80), ("cuda", 89), ("cuda", 100), ("hip", "gfx942")])
def test_other_gpus(machine):
    found = refusal(dense(), Machine(*machine, 100))
    assert found == "needs a GPU of compute capability 9.0"


ODD = torch.empty(2 * 300 * 8 * 128 + 8, dtype=BF16)[1:-7].view(2, 300, 8, 128)
FEW = "serves 16 and more query rows a request, got T_q / B="
MANY = "for 256 and more query rows of a KV head a request, got"
SPLIT, KEYS = "does not split packed keys, and", "keys want that"
HALF = "serves float16 and bfloat16, got"
STRIDES = "reads dense rows at strides of multiples of 16 bytes, got "
BYTES = "serves float8_e4m3fn without softcap, rotation and sinks"
LATENT = "serves values of 512 and keys of 64 columns more,"
GROUPS = "serves groups of multiples of 64 query heads,"
ODD_K = torch.empty(3 * 900 * 512 + 8, dtype=BF16)[1:-7].view(3, 900, 1, 512)
REFUSED = [
    (dense(rows=127), "serves 128 and more query rows of a request, got S_q=127"),
    (packed(rows=3 * 16 - 1), f"{FEW}15"),
    (paged(rows=5, batch=5), f"{FEW}1"),
    (appended(rows=15, batch=1), f"{FEW}15"),
    (
        dense(rows=191, heads=14, keys=4097),
        "leaves 65 of 256 rows of its tiles empty, and 5348 rows of all heads over 4097 keys want "
        "full ones",
    ),
    (
        dense(rows=256, dim=64, keys=5000),
        "leaves 128 of 384 rows of its tiles empty, and 4096 rows of all heads over 5000 keys "
        "want full ones",
    ),
    (packed(rows=704, keys=4097), f"{SPLIT} 5632 rows of all heads over 4097 {KEYS}"),
    (
        paged(rows=704, page_table=meta(3, 65, dtype=I32)),
        f"{SPLIT} 5632 rows of all heads over 4160 {KEYS}",
    ),
    (
        appended(rows=704, page=8, block_table=meta(3, 513, dtype=I32)),
        f"{SPLIT} 5632 rows of all heads over 4104 {KEYS}",
    ),
    (dense(dim=96), "serves head dims of 64, 128 and 256 columns, got D=96"),
    (packed(dim=512), "serves head dims of 64, 128 and 256 columns, got D=512"),
    (paged(page=24, rows=191), f"copies pages of 24 rows, {MANY} 254"),
    (appended(page=20, rows=100), f"copies pages of 20 rows, {MANY} 133"),
    (paged(rows=100, **ROPE), f"copies keys that are rotated, {MANY} 133"),
    (
        paged(page=1, batch=30_000, rows=64 * 30_000, page_table=meta(30_000, 1, dtype=I32)),
        "copies pages of 1 rows, at most 2**30 bytes, and the table has room for 3932160000 bytes "
        "of keys and values",
    ),
    (
        paged(rows=191, **pools(paged(), E4M3), **ONES),
        f"copies pools of float8_e4m3fn, {MANY} 254",
    ),
    (
        paged(page=24, batch=0),
        "copies pages of 24 rows, of which a page table of shape [0, 85] names none",
    ),
    (
        paged(page_table=meta(3, 30_000, dtype=I32), rows=80_000, **ROPE),
        "copies keys that are rotated, at most 2**30 bytes, and the table has room for "
        "5898240000 bytes of keys and values",
    ),
    (
        paged(rows=191, v_pages=meta(50, 64, 3, 2, 129)[:, :, 1, :, 1:]),
        f"copies pools that the copy engine cannot read, {MANY} 254",
    ),
    (
        paged(dtype=torch.float16, **pools(paged(), E4M3), **ONES),
        "widens pools for bfloat16 alone, got q of float16",
    ),
    (
        paged(v_pages=meta(50, 64, 128, 2).transpose(2, 3)),
        f"{STRIDES}v_pages with strides (16384, 256, 1, 2)",
    ),
    (
        dense(dtype=E4M3, dim=64),
        "serves float8_e4m3fn with head dims of 128 columns, got D=64",
    ),
    (dense(dtype=E4M3, softcap=30.0), BYTES),
    (dense(dtype=E4M3, **ROPE), BYTES),
    (packed(dtype=E4M3, sinks=meta(8, dtype=F32)), BYTES),
    (paged(dtype=E4M3), f"{HALF} q of float8_e4m3fn"),
    (dense(keys=0), "serves no empty tensors, got k of shape [2, 0, 2, 128]"),
    (dense(batch=0), "serves no empty tensors, got q of shape [0, 300, 8, 128]"),
    (packed(batch=0, keys=0), "serves no empty tensors, got k of shape [0, 2, 128]"),
    (paged(pages=0), "serves no empty tensors, got k_pages of shape [0, 64, 2, 128]"),
    (
        dense(k=meta(2, 900, 2, 129)[..., :128]),
        f"{STRIDES}k with strides (232200, 258, 129, 1)",
    ),
    (
        dense(k=meta(2, 900, 2, 256)[..., ::2]),
        f"{STRIDES}k with strides (460800, 512, 256, 2)",
    ),
    (
        dense(v=meta(2, 900, 1, 128).expand(-1, -1, 2, -1)),
        f"{STRIDES}v with strides (115200, 128, 0, 1)",
    ),
    (dense(q=ODD), "reads from multiples of 16 bytes, got q between them"),
    (
        dense(v=meta(2, 1 << 22, 2, 128)),
        "serves tensors of fewer than 2**30 elements, got v of shape [2, 4194304, 2, 128]",
    ),
    (
        paged(k_pages=meta(1 << 25, 64, 2, 128)),
        "serves fewer than 2**31 rows, got k_pages of shape [33554432, 64, 2, 128]",
    ),
    (latent(dim=256), f"{LATENT} got 256 and 64"),
    (latent(pe=32), f"{LATENT} got 512 and 32"),
    (latent(pe=0), f"{LATENT} got 512 and 0"),
    (indexed(dim=448, tail=128), f"{LATENT} got 448 and 128"),
    (latent(heads=96), f"{GROUPS} got H=96 and H_kv=1"),
    (latent(heads=64, heads_kv=2), f"{GROUPS} got H=64 and H_kv=2"),
    (indexed(heads=16), f"{GROUPS} got H=16 and H_kv=1"),
    (latent(dtype=E4M3), f"{HALF} q of float8_e4m3fn"),
    (indexed(dtype=F32), f"{HALF} q of float32"),
    (latent(batch=0), "serves no empty tensors, got q of shape [0, 128, 512]"),
    (latent(keys=0), "serves no empty tensors, got k of shape [3, 0, 1, 512]"),
    (indexed(rows=0), "serves no empty tensors, got q of shape [2, 0, 128, 512]"),
    (indexed(keys=0), "serves no empty tensors, got kv of shape [2, 0, 1, 576]"),
    (
        latent(k=meta(3, 900, 1, 516)[..., :512]),
        f"{STRIDES}k with strides (464400, 516, 516, 1)",
    ),
    (
        latent(k_pe=meta(3, 900, 1, 68)[..., :64]),
        f"{STRIDES}k_pe with strides (61200, 68, 68, 1)",
    ),
    (
        latent(k_pe=meta(1, 900, 1, 64).expand(3, -1, -1, -1)),
        f"{STRIDES}k_pe with strides (0, 64, 64, 1)",
    ),
    (
        indexed(kv=meta(2, 900, 1, 1152)[..., ::2]),
        f"{STRIDES}kv with strides (1036800, 1152, 1152, 2)",
    ),
    (latent(k=ODD_K), "reads from multiples of 16 bytes, got k between them"),
    (indexed(slots=0), "serves lists of one and more slots, got empty ones"),
    (
        indexed(heads=64, batch=1, rows=1 << 22, slots=1 << 15),
        "serves fewer than 2**31 blocks of keys of all queries, got 2151677952",
    ),
]


@pytest.mark.parametrize("call, sentence", REFUSED, ids=range(len(REFUSED)))
def test_refusals(call, sentence, compiler):
    assert refusal(call) == sentence


@pytest.mark.parametrize("name", [*GQA_CALLS, "dsa_decode_fwd"])
@pytest.mark.parametrize("scale", [0.0, -0.1, 2.0**-60, 2.0**60, float("nan")])
def test_scales_that_are_not_served(name, scale, compiler):
    found = refusal(CALLS[name](sm_scale=scale))
    assert found == f"serves scales from 2**-60 to 2**60, got sm_scale={scale}"


@grouped_query
@pytest.mark.parametrize("cap", [1001.0, 9e-4])
def test_softcaps_that_are_not_served(name, cap, compiler):
    assert (
        refusal(CALLS[name](softcap=cap))
        == f"serves softcaps from 0.001 to 1000, got softcap={cap}"
    )


def test_the_error_of_a_call_that_nobody_serves_names_it():
    with recording(Machine("cuda", 75, 40)), pytest.raises(NoKernelError) as error:
        targets.select(DENSE, _on_gpu(dense()), BUILTIN_KERNELS["gqa_dense_fwd"])
    assert "builtin/tilelang needs a GPU of compute capability 9.0\n" in str(error.value)


def _on_gpu(call):
    with torch._subclasses.fake_tensor.FakeTensorMode():
        return call._replace(
            **{
                name: torch.empty(getattr(call, name).shape, dtype=BF16, device="cuda")
                for name in "qkv"
            }
        )


# -------------------------------------------------------------------------- what is not loaded

DECLINED = """
import sys, torch, tileops
from ops_registry.contract import BUILTIN_KERNELS, CONTRACTS
from tileops.kernels.common.machine import Machine
from tileops.kernels.common.recorder import recording

def said(arch, rows):
    q = torch.empty(1, rows, 2, 64, dtype=torch.bfloat16, device="meta")
    call = CONTRACTS["gqa_dense_fwd"].Call(q, q, q)
    with recording(Machine("cuda", arch, 100)):
        print(BUILTIN_KERNELS["gqa_dense_fwd"][0].refusal(call))
"""


def test_a_call_that_it_declines_does_not_load_tilelang():
    code = DECLINED + "said(80, 300); said(90, 5); print('tilelang' in sys.modules)"
    assert python(code).splitlines() == [
        "needs a GPU of compute capability 9.0",
        "serves 128 and more query rows of a request, got S_q=5",
        "False",
    ]


def test_without_tilelang():
    absent = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "tilelang" else find(name)
"""
    assert python(absent + DECLINED + "said(90, 300); said(80, 300)").splitlines() == [
        "needs tilelang: pip install 'tileops[tilelang]'",
        "needs a GPU of compute capability 9.0",
    ]


def test_without_nvcc(tmp_path):
    assert python(DECLINED + "said(90, 300)", CUDA_HOME=str(tmp_path)) == (
        "needs nvcc of a CUDA toolkit: set CUDA_HOME, or "
        "pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
    )


def test_an_installation_that_is_not_whole(tmp_path):
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang" / "__init__.py").write_text("import libz3_that_is_not_there")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + DECLINED + "said(90, 300)"
    assert python(code) == (
        "cannot import tilelang, which says: No module named 'libz3_that_is_not_there'"
    )


def test_loading_leaves_the_environment_and_the_log_alone():
    done = attempt(
        """
        import logging, os
        from tileops.kernels.common import tilelang_limits
        before = os.environ["PYTHONPATH"]
        tilelang_limits.load()
        assert os.environ["PYTHONPATH"] == before
        assert not logging.root.handlers and logging.root.level == logging.WARNING
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ------------------------------------------------------------------------------------- choosing


@pytest.fixture
def on_cpu(monkeypatch, compiler):
    """The kernels of GPUs serve CPU tensors, and those of the CPU none: which was run last?"""
    declines, ran = targets.Kernel.declines, []

    def declined(kernel, call, packaged):
        if "cuda" not in kernel.devices:
            return "is not what is tested"
        return declines(dataclasses.replace(kernel, devices=()), call, packaged)

    def run_instead(kernel):
        def run(out, call):
            ran.append(kernel)
            for x in out:
                x.fill_(len(ran))

        for name in CALLS:
            monkeypatch.setattr(module(name, kernel), name, run)

    monkeypatch.setattr(targets.Kernel, "declines", declined)
    monkeypatch.setattr(triton.runtime.driver, "_active", FakeDriver())
    run_instead("tilelang")
    return SimpleNamespace(ran=ran, only_names=lambda: run_instead("triton"))


def module(name, kernel):
    folder = name.removesuffix("_fwd")
    return importlib.import_module(f"tileops.kernels.attention.{folder}.{kernel}")


def zeros(name, **given):
    """A call of CPU tensors; packed requests are empty."""
    call = CALLS[name](**given)
    return type(call)(
        *(torch.zeros(x.shape, dtype=x.dtype) if torch.is_tensor(x) else x for x in call)
    )


def is_whole(name, dynamic=None, **given):
    """Whether a compiler finds the operator in the graph, with no guards but those of `infer`."""
    op, dynamic = CONTRACTS[name].op, dynamic or {}
    call = given.pop("call", None) or zeros(name, **given)

    def read(graph):
        return {x for node in graph.nodes for x in (node.target, *node.args[:1])}

    found = checks.recorded(op, call, dynamic, read)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "exporting", lambda: True)
        alone = checks.recorded(op, call, dynamic, read)
    assert found.guards <= alone.guards and found.specialized == alone.specialized
    assert op in alone.seen
    return op in found.seen


# Axes that vary: rows alone, and what else a program may leave open.
ROWS = {
    "gqa_dense_fwd": {"q": (1,), "k": (1,), "v": (1,)},
    "gqa_varlen_fwd": {"q": (0,), "k": (0,), "v": (0,)},
    "gqa_paged_fwd": {"q": (0,)},
    "gqa_prefill_paged_fwd": {"q": (0,), "k_new": (0,), "v_new": (0,)},
    "mla_decode_fwd": {"k": (1,), "k_pe": (1,)},
    "dsa_decode_fwd": {"q": (1,), "indices": (1,)},
}
EVERY = {
    "gqa_dense_fwd": dict.fromkeys("qkv", (0, 1)),
    "gqa_varlen_fwd": {"cu_seqlens_q": (0,), "cu_seqlens_kv": (0,)},
    "gqa_paged_fwd": {
        "k_pages": (0,),
        "v_pages": (0,),
        "page_table": (0, 1),
        "cache_seqlens": (0,),
        "cu_seqlens_q": (0,),
    },
    "gqa_prefill_paged_fwd": {
        "k_pages": (0,),
        "v_pages": (0,),
        "block_table": (0, 1),
        "cache_seqlens": (0,),
        "cu_seqlens_q": (0,),
    },
    "mla_decode_fwd": {"q": (0,), "q_pe": (0,), "k": (0, 1), "k_pe": (0, 1)},
    "dsa_decode_fwd": {"q": (0, 1), "kv": (0, 1), "indices": (0, 1, 3)},
}


@every_operator
def test_compiled_whole(name, on_cpu):
    assert is_whole(name)
    assert is_whole(name, ROWS[name])
    assert is_whole(name, ROWS[name] | EVERY[name])


@grouped_query
def test_compiled_whole_as_the_next_call_may_be_long(name, on_cpu):
    assert is_whole(name, ROWS[name], rows=5)


@grouped_query
def test_compiled_into_the_graph(name, on_cpu):
    assert not is_whole(name, rows=3, batch=3)  # decode
    assert not is_whole(name, dim=32)


@over_latent_rows
def test_compiled_into_the_graph_for_few_heads_and_columns(name, on_cpu):
    for dynamic in ({}, ROWS[name] | EVERY[name]):
        assert not is_whole(name, dynamic, heads=16)
        assert not is_whole(name, dynamic, dim=256)


def test_compiled_into_the_graph_for_what_else_is_known(on_cpu):
    assert not is_whole("gqa_dense_fwd", {"k": (1,), "v": (1,)}, rows=1)
    assert not is_whole("gqa_dense_fwd", rows=127)
    given = zeros("gqa_dense_fwd")
    apart = given.k.transpose(1, 2).contiguous().transpose(1, 2)
    assert is_whole("gqa_dense_fwd", call=given._replace(k=apart))
    shared = given.k[:, :, :1].expand(-1, -1, given.k.shape[2], -1)
    assert not is_whole("gqa_dense_fwd", call=given._replace(k=shared))
    assert is_whole("gqa_paged_fwd", page=24)
    assert not is_whole("gqa_paged_fwd", page=24, rows=50)
    assert not is_whole("gqa_prefill_paged_fwd", page=24, rows=50)


@every_operator
def test_packages_have_no_tilelang(name, on_cpu):
    with checks.lowered():
        assert not is_whole(name)
        assert not is_whole(name, ROWS[name])


@grouped_query
def test_a_compiled_program_chooses_at_each_call(name, on_cpu):
    on_cpu.only_names()
    op = CONTRACTS[name].op
    with checks.fresh_dynamo(), torch.no_grad():
        compiled = torch.compile(op, backend="aot_eager", dynamic=True, fullgraph=True)
        for rows in (900, 420, 15):
            compiled(*zeros(name, rows=rows))
        assert on_cpu.ran == ["tilelang", "tilelang", "triton"]
    given = zeros(name)
    moved = torch.zeros(given.q.numel() + 1, dtype=BF16)[1:].view(given.q.shape)
    op(*given._replace(q=moved))
    assert on_cpu.ran[3:] == ["triton"]


@over_latent_rows
def test_a_compiled_program_of_latent_rows_chooses_at_each_call(name, on_cpu):
    on_cpu.only_names()
    op, cache = CONTRACTS[name].op, "k" if name == "mla_decode_fwd" else "kv"
    with checks.fresh_dynamo(), torch.no_grad():
        compiled = torch.compile(op, backend="aot_eager", dynamic=True, fullgraph=True)
        for keys in (300, 1100):
            compiled(*zeros(name, keys=keys))
        given = zeros(name, keys=500)
        x = getattr(given, cache)
        moved = torch.zeros(x.numel() + 1, dtype=BF16)[1:].view(x.shape)
        compiled(*given._replace(**{cache: moved}))
    assert on_cpu.ran == ["tilelang", "tilelang", "triton"]


def tensors(rows):
    return zeros("gqa_dense_fwd", rows=rows)[:3]


def test_what_is_set_aside_serves_nothing(on_cpu):
    on_cpu.only_names()
    with targets.aside("tilelang"):
        DENSE.op(*tensors(300))
    DENSE.op(*tensors(300))
    assert on_cpu.ran == ["triton", "tilelang"]


def test_a_kernel_that_cannot_be_compiled_gives_way(on_cpu, monkeypatch):
    on_cpu.only_names()

    def fails(out, call):
        tilelang_limits.give_up("could not be compiled: nvcc says no")
        raise KernelUnavailableError("no")

    monkeypatch.setattr(module("gqa_dense_fwd", "tilelang"), "gqa_dense_fwd", fails)
    o, _ = DENSE.op(*tensors(300))
    DENSE.op(*tensors(300))
    assert on_cpu.ran == ["triton", "triton"] and (o == 1).all()
    assert refusal(dense()) == "could not be compiled: nvcc says no"


def test_so_does_one_that_was_to_be_remembered(on_cpu, monkeypatch):
    """Another thread may see a call first, and fail to compile while this one waits for it."""
    on_cpu.only_names()
    given = tensors(300)
    repeats = contract.REPEATS["gqa_dense_fwd"]
    monkeypatch.setattr(repeats, "found", {"this": None})
    monkeypatch.setattr(repeats, "key", lambda call: ("this", [x.data_ptr() for x in given]))

    def fails(out, call):
        tilelang_limits.give_up("could not be compiled: nvcc says no")
        raise KernelUnavailableError("no")

    monkeypatch.setattr(module("gqa_dense_fwd", "tilelang"), "gqa_dense_fwd", fails)
    o, _ = DENSE.op(*given)
    assert on_cpu.ran == ["triton"] and (o == 1).all()
    assert repeats.found == {"this": False}


# -------------------------------------------------------------------------------------- warm-up


def test_warmup_compiles_what_serves_other_lengths_too(on_cpu, monkeypatch):
    on_cpu.only_names()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ran = {}
    for planned in warmup.plan(["gqa_dense_fwd"], {}):
        on_cpu.ran.clear()
        assert warmup.compile_call(planned, "cpu") is None
        ran[planned.phase] = on_cpu.ran.copy()
    assert ran == {
        "decode": ["triton", "triton"],
        "several tokens": ["triton", "triton"],
        "prefill": ["triton", "tilelang"],
        "short chunk": ["triton", "tilelang"],
    }


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64])
def test_warmup_compiles_kernels_of_whole_and_of_split_keys(heads, dim, compiler):
    given = {"heads": [heads], "heads_kv": [1], "head_dim": [dim]}
    for planned in warmup.plan(["gqa_dense_fwd"], given)[-2:]:
        call = CONTRACTS["gqa_dense_fwd"].Call(*planned.call("meta"))
        assert launch_of(call).constants["split"] == (planned.phase == "short chunk")


@over_latent_rows
@pytest.mark.parametrize("heads", [64, 128, 1024])
def test_warmup_compiles_kernels_of_whole_rows_and_of_parts(name, heads, compiler):
    found = []
    for planned in warmup.plan([name], {"heads": [heads]}):
        call = CONTRACTS[name].Call(*planned.call("meta"))
        found.append(launch_of(call).constants["whole"])
    assert sorted(found) == [False, True]
