"""`python -m tileops.warmup`: what it plans, what its calls launch, and what it refuses to do."""

import pytest
import torch

from ops_registry.contract import E4M3
from tests import aot, meta_calls
from tests.test_imports import attempt
from tests.triton_target import kernels
from tileops import warmup, warmup_calls
from tileops.kernels.attention.gqa_paged import tilelang as paged

CHIP = aot.CHIPS["sm_90"]
GPU = torch.cuda.is_available()


def specializations(name, calls):
    """What the calls of an operator have compiled."""
    launched = [launch for call in calls for launch in aot.launches(name, call, CHIP)]
    launched = [launch for launch in launched if 0 not in launch.grid]
    return {f"{x.kernel.__name__} {x[1:]}" for x in aot.distinct(launched)}


def warmed(name, **flags):
    given = {flag: [value] for flag, value in flags.items()}
    return specializations(name, [call.call("meta") for call in warmup.plan([name], given)])


def refused(capsys, *arguments):
    """The line that a command ends with, and its exit status."""
    with pytest.raises(SystemExit) as ended:
        warmup.main(arguments)
    return ended.value.code, capsys.readouterr().err.splitlines()[-1]


def test_every_operator_has_a_recipe():
    assert set(warmup_calls.RECIPES) == set(kernels())


def test_flags_are_those_that_recipes_read():
    read = {name for recipe in warmup_calls.RECIPES.values() for name in recipe.defaults}
    assert read == set(warmup.FLAGS)


# Calls of models, and the flags whose warm-up must hold every kernel they launch.
SEPARATE = {"heads": 32, "heads_kv": 8, "head_dim": 128}
D64 = {"heads": 64, "head_dim": 64, "window_size_left": 127, "sinks": True}
GEMMA = {"heads": 16, "head_dim": 256, "window_size_left": 4095, "softcap": 50.0}
MODELS = [
    ("gqa_dense_fwd", "causal", SEPARATE),
    ("gqa_dense_fwd", "d256", GEMMA),
    ("gqa_dense_fwd", "decode", {"dtype": torch.float16}),
    ("gqa_dense_fwd", "rope", {"rope": "neox"}),
    ("gqa_dense_fwd", "e4m3", {"dtype": E4M3}),
    ("gqa_dense_fwd", "full", {"dtype": torch.float16, "is_causal": False}),
    ("gqa_dense_bwd", "causal", {}),
    ("gqa_dense_bwd", "d256", GEMMA),
    ("gqa_dense_bwd", "rope", {"rope": "neox"}),
    ("gqa_varlen_fwd", "d64-window-sinks", D64),
    ("gqa_varlen_fwd", "rope", {"heads": 64, "rope": "neox"}),
    ("gqa_varlen_fwd", "e4m3", {"dtype": E4M3}),
    ("gqa_varlen_bwd", "d64-window-sinks", D64),
    ("gqa_paged_fwd", "decode", {"page_size": 16}),
    ("gqa_paged_fwd", "mixed", {"page_size": 16}),
    ("gqa_paged_fwd", "d64-window-sinks", D64),
    ("gqa_paged_fwd", "rope-chunk", {"page_size": 64, "rope": "neox"}),
    ("gqa_paged_fwd", "e4m3-pool", {"cache_dtype": E4M3, "kv_scales": "head"}),
    ("gqa_paged_fwd", "e4m3", {"dtype": E4M3, "kv_scales": "head"}),
    ("gqa_prefill_paged_fwd", "fp16", {"dtype": torch.float16, "page_size": 64}),
    (
        "gqa_prefill_paged_fwd",
        "rope",
        {"heads_kv": 4, "page_size": 64, "rope": "neox", "rope_base": 1e6},
    ),
    (
        "gqa_prefill_paged_fwd",
        "e4m3-pool",
        {"dtype": torch.float16, "page_size": 64, "cache_dtype": E4M3},
    ),
    ("mha_decode_paged_fwd", "d128", {"dtype": torch.float16, "page_size": 128}),
    (
        "mha_decode_paged_fwd",
        "causal",
        {"dtype": torch.float16, "page_size": 128, "is_causal": True},
    ),
    ("mla_decode_fwd", "h128", {}),
    ("mla_decode_fwd", "h16", {"heads": 16}),
    ("mla_decode_fwd", "no-rotary", {"dim_tail": 0}),
    ("nsa_compressed_fwd", "h64", {}),
    ("nsa_topk", "d64", {"heads": 32, "heads_kv": 2, "head_dim": 64, "block_size": 32}),
    ("nsa_varlen_fwd", "h64", {}),
    ("dsa_decode_fwd", "prefill", {}),
    ("dsa_decode_fwd", "h16", {"heads": 16}),
    ("fp8_lightning_indexer", "e4m3", {}),
    ("fp8_lightning_indexer", "bf16", {"heads": 32, "head_dim": 64, "dtype": torch.bfloat16}),
    ("paged_kv_cache_write", "bf16", {}),
    ("paged_kv_cache_write", "e4m3", {"heads_kv": 4, "cache_dtype": E4M3}),
]


@pytest.mark.parametrize("name, variant, flags", MODELS)
def test_calls_of_models_compile_nothing_more(name, variant, flags):
    call = dict(meta_calls.CALLS[name])[variant]
    assert specializations(name, [call]) <= warmed(name, **flags)


@pytest.mark.parametrize("group", [1, 3, 8, 71])
@pytest.mark.parametrize("layout", ["separate", "fused"])
@pytest.mark.parametrize("name", warmup_calls.RECIPES)
def test_calls_of_other_lengths_compile_nothing_more(name, layout, group, monkeypatch):
    flags = {"layout": layout, "heads": group}
    if "heads_kv" in warmup_calls.RECIPES[name].defaults:
        flags |= {"heads_kv": 2, "heads": 2 * group}
    known = warmed(name, **flags)
    for keys, tokens in ((2, 2), (3, 2), (70, 40), (300, 130), (5000, 3000), (200000, 60000)):
        monkeypatch.setattr(warmup_calls, "KEYS", keys)
        monkeypatch.setattr(warmup_calls, "TOKENS", tokens)
        monkeypatch.setattr(warmup_calls, "SPLIT_ROWS", tokens * group)
        assert warmed(name, **flags) <= known, (keys, tokens)


@pytest.mark.parametrize("name", ["gqa_dense_fwd", "mha_decode_paged_fwd"])
def test_several_tokens_without_a_mask_compile_nothing_more(name, monkeypatch):
    known = warmed(name, is_causal=False)
    for tokens in (2, 5):
        monkeypatch.setattr(warmup_calls, "TOKENS", tokens)
        assert warmed(name, is_causal=False) <= known


def test_values_are_combined():
    given = {"head_dim": [64, 128], "window_size_left": [-1, 4095], "page_size": [16]}
    found = warmup.plan(["gqa_paged_fwd", "paged_kv_cache_write"], given)
    assert [call.op for call in found].count("gqa_paged_fwd") == 2 * 2 * 2
    assert [call.op for call in found].count("paged_kv_cache_write") == 2
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("compiles", [True, False])
def test_list(capsys, monkeypatch, compiles):
    if compiles:
        pytest.importorskip("tilelang")
    missing = None if compiles else "needs nvcc"
    monkeypatch.setattr(paged, "compiler_refusal", lambda: missing)
    asked = ["--list", "--op", "gqa_paged_fwd", "--heads", "32", "--head-dim", "64"]
    assert warmup.main([*asked, "--dtype", "float16", "--window-size-left", "127"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == (
        "gqa_paged_fwd heads=32 heads_kv=8 head_dim=64 dtype=float16 page_size=16 is_causal=True "
        "window_size_left=127 window_size_right=-1 rope=none sinks=False kv_scales=tensor "
        "layout=separate"
    )
    assert said[2:] == [
        "  decode: attention_kernel",
        "  prefill: " + ("tilelang_attention, " if compiles else "") + "attention_kernel",
    ]


@pytest.mark.skipif(GPU, reason="there is a GPU here")
def test_without_a_gpu(capsys):
    code, said = refused(capsys, "--op", "mla_decode_fwd")
    assert code == 2
    assert said == (
        "tileops.warmup: kernels are compiled on the GPU that will run them and torch finds none "
        "here; --list works without one"
    )


def test_without_triton():
    done = attempt(
        """
        import sys
        sys.modules["triton"] = None
        from tileops import warmup
        warmup.main(["--list", "--op", "mla_decode_fwd"])
        """
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "tileops.warmup: mla_decode_fwd: the Triton kernel needs triton: "
        "pip install 'tileops[triton]'\n"
    )


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--op", "gqa_pagd"], "tileops.warmup: --op gqa_pagd: no operator; there are dsa_decode"),
        (
            ["--op", "mla_decode_fwd", "--page-size", "16", "--sinks", "true"],
            "tileops.warmup: --page-size, --sinks: no flag of mla_decode_fwd",
        ),
        (
            ["--op", "gqa_dense_fwd", "--heads", "30"],
            "tileops.warmup: gqa_dense_fwd: k must have a number of heads that divides the 30",
        ),
        (
            ["--op", "gqa_prefill_paged_fwd", "--rope", "interleaved"],
            "tileops.warmup: gqa_prefill_paged_fwd: --rope must be none or neox, got interleaved",
        ),
        (["--dtype", "fp32"], "argument --dtype: must be one of float16, bfloat16, float8_e4m3fn"),
        (["--heads", "0"], "argument --heads: must be a positive integer, got '0'"),
        (["--dim-tail", "-1"], "argument --dim-tail: must be a non-negative integer, got '-1'"),
        (["--is-causal", "yes"], "argument --is-causal: must be true or false, got 'yes'"),
        (["--device", "cpu"], "--device must be cuda or cuda:INDEX, got 'cpu'"),
        (["--device", "gpu0"], "--device must be cuda or cuda:INDEX, got 'gpu0'"),
    ],
)
def test_arguments_that_are_wrong(arguments, sentence, capsys):
    code, said = refused(capsys, *arguments)
    assert code == 2 and sentence in said


@pytest.mark.skipif(GPU, reason="there is a GPU here")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_call_that_fails_is_named(jobs, capsys, monkeypatch):
    monkeypatch.setattr(warmup, "checked_device", lambda text: "cuda:0")
    asked = ["--op", "nsa_*", "--block-size", "32", "--jobs", jobs]
    assert warmup.main(asked) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in said[:3]] == ["1/3", "2/3", "3/3"]
    named = {line.partition(" ")[0] for line in said[3:]}
    assert named == {"nsa_compressed_fwd", "nsa_topk", "nsa_varlen_fwd"}
    assert all(" block_size=32 " in line and " (call): " in line for line in said[3:])
