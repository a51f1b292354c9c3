"""The public signatures: parameter order, kinds and defaults, and the schemas behind them."""

import inspect
import re

import pytest
import torch

from ops_registry.contract import CONTRACTS
from tileops import attention

# (constructor, constructor keyword-only besides target, call). "name" has no default, ("name",
# value) has one; every constructor ends in the keyword-only target=None.
SIGNATURES = {
    "MHADecodePagedWithKVCacheFwdOp": (
        ["page_size", ("is_causal", False)],
        [],
        ["q", "k", "v", "real_seqlen_kv", "block_table"],
    ),
    "GQABwdOp": (
        [("is_causal", True)],
        [],
        ["q", "k", "v", "o", "do", "lse"],
    ),
    "GQADenseFwdOp": (
        [
            ("is_causal", True),
            ("window_size_left", -1),
            ("window_size_right", -1),
            ("sm_scale", None),
            ("softcap", None),
            ("pos_encoding_mode", "none"),
            ("rotary_dim", None),
            ("rope_layout", "neox"),
            ("out_dtype", None),
        ],
        [],
        [
            "q",
            "k",
            "v",
            ("q_scale", None),
            ("k_scale", None),
            ("v_scale", None),
            ("rope_cos", None),
            ("rope_sin", None),
        ],
    ),
    "GQAPagedFwdOp": (
        [
            ("is_causal", True),
            ("window_size_left", -1),
            ("window_size_right", -1),
            ("sm_scale", None),
            ("softcap", None),
            ("out_dtype", None),
            ("pos_encoding_mode", "none"),
            ("rotary_dim", None),
            ("rope_layout", "neox"),
        ],
        [],
        [
            "q",
            "k_pages",
            "v_pages",
            "page_table",
            "cache_seqlens",
            "cu_seqlens_q",
            ("q_scale", None),
            ("k_scale", None),
            ("v_scale", None),
            ("rope_cos", None),
            ("rope_sin", None),
            ("sinks", None),
        ],
    ),
    "GQAPrefillPagedWithKVCacheFwdOp": (
        [
            "page_size",
            "max_seqlen_q",
            ("is_causal", True),
            ("cache_dtype", None),
            ("sm_scale", None),
            ("softcap", None),
            ("fuse_rope", False),
            ("rope_base", 10000.0),
            ("max_position", None),
            ("rotary_dim", None),
        ],
        [("validate_inputs", False)],
        [
            "q",
            "k_new",
            "v_new",
            "k_pages",
            "v_pages",
            "k_scale",
            "v_scale",
            "cu_seqlens_q",
            "cache_seqlens",
            "block_table",
        ],
    ),
    "GQAVarlenFwdOp": (
        [
            ("is_causal", True),
            ("window_size_left", -1),
            ("window_size_right", -1),
            ("sm_scale", None),
            ("softcap", None),
            ("out_dtype", None),
            ("pos_encoding_mode", "none"),
            ("rotary_dim", None),
            ("rope_layout", "neox"),
            ("validate_inputs", False),
        ],
        [],
        [
            "q",
            "k",
            "v",
            "cu_seqlens_q",
            "cu_seqlens_kv",
            ("q_scale", None),
            ("k_scale", None),
            ("v_scale", None),
            ("rope_cos", None),
            ("rope_sin", None),
            ("sinks", None),
        ],
    ),
    "MLADecodeWithKVCacheFwdOp": (
        [],
        [],
        ["q", "q_pe", "k", "k_pe"],
    ),
    "NSACompressedVarlenFwdOp": (
        ["scale", "bs"],
        [],
        ["q", "k_cmp", "v_cmp", "offsets", "chunk_offsets", "token_indices"],
    ),
    "NSATopKVarlenFwdOp": (
        ["scale", "selected_block_num", "bs"],
        [],
        ["q", "k_cmp", "offsets", "chunk_offsets", "token_indices"],
    ),
    "NSAVarlenFwdOp": (
        ["is_causal", "scale", "block_size"],
        [],
        ["q", "k", "v", "block_indices", "block_counts", "offsets", "token_indices"],
    ),
    "DSADecodeWithKVCacheFwdOp": (
        [
            "dim_tail",
            "stride_kv",
            "q_start_index_s",
            ("sm_scale", None),
            ("is_causal", True),
        ],
        [],
        ["q", "kv", "indices"],
    ),
    "FP8LightningIndexerFwdOp": (
        [("clean_logits", True)],
        [],
        [
            "index_q",
            "index_k",
            "weights",
            "cu_seqlen_ks",
            "cu_seqlen_ke",
            ("index_k_scale", None),
        ],
    ),
    "PagedKVCacheWriteFwdOp": (
        [],
        [],
        [
            "k",
            "v",
            "k_pages",
            "v_pages",
            "slot_mapping",
            ("k_scale", None),
            ("v_scale", None),
        ],
    ),
}

POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


def rows(entries, kind):
    """(name, kind, default) of each entry."""
    pairs = [(e, inspect.Parameter.empty) if isinstance(e, str) else e for e in entries]
    return [(name, kind, default) for name, default in pairs]


def rows_of(function):
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [(p.name, p.kind, p.default) for p in parameters]


every_class = pytest.mark.parametrize("name", SIGNATURES)


def test_the_classes():
    assert set(attention.__all__) == set(SIGNATURES)
    assert {c.op_class for c in CONTRACTS.values()} - {""} == set(SIGNATURES)
    assert list(attention.__all__) == sorted(attention.__all__)


@every_class
def test_constructor(name):
    positional, keyword_only, _ = SIGNATURES[name]
    expected = rows(positional, POSITIONAL) + rows([*keyword_only, ("target", None)], KEYWORD_ONLY)
    assert rows_of(getattr(attention, name).__init__) == expected


@every_class
def test_call(name):
    assert rows_of(getattr(attention, name).forward) == rows(SIGNATURES[name][2], POSITIONAL)


@every_class
def test_everything_is_documented(name):
    cls = getattr(attention, name)
    positional, keyword_only, call = SIGNATURES[name]
    options = [e if isinstance(e, str) else e[0] for e in (*positional, *keyword_only)]
    tensors = [e if isinstance(e, str) else e[0] for e in call]
    for argument in (*options, "target"):
        assert f"        {argument}: " in cls.__doc__, f"{name}: {argument} is not described"
    for argument in tensors:
        assert f"            {argument}: " in cls.forward.__doc__, f"{name}: {argument}"


@every_class
def test_schema_has_the_same_tensors_and_defaults(name):
    """What the class calls by default is what the dispatcher operator does by default."""
    cls = getattr(attention, name)
    schema = {a.name: a for a in cls.contract.schema.arguments}
    positional, keyword_only, call = SIGNATURES[name]
    tensors = [e if isinstance(e, str) else e[0] for e in call]
    known = [n for n in cls.contract.tensors if n in tensors]
    assert known == tensors, f"{name}: tensors of {cls.contract.name} come in another order"
    for entry in (*positional, *keyword_only):
        argument = entry if isinstance(entry, str) else entry[0]
        if argument not in schema:
            continue  # normalised away by the class
        if isinstance(entry, str):
            assert not schema[argument].has_default_value(), f"{name}: {argument}"
        else:
            assert schema[argument].default_value == entry[1], f"{name}: {argument}"
            assert type(schema[argument].default_value) is type(entry[1]), f"{name}: {argument}"
    assert schema["target"].default_value == "" and list(schema)[-1] == "target"


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=lambda c: c.name)
def test_contract_is_complete(contract):
    arguments = [a.name for a in contract.schema.arguments]
    options = [n for n in arguments if n not in contract.tensors and n != "target"]
    described = [n for n in contract.options if n != "target"]
    assert sorted(described) == sorted(options), f"{contract.name}: describe every option"
    assert len(contract.schema.returns) == len(contract.returns)
    if contract.op_class:  # a gradient may have no class of its own
        assert contract.op_class in attention.__all__
    assert torch.Tag.pt2_compliant_tag in contract.op.tags
    specs = (*contract.tensors.values(), *contract.returns.values())
    letters = {x for spec in specs for x in re.findall(r"[A-Za-z]\w*", spec.shape or "")}
    unnamed = letters - set(contract.letters) - set(contract.options)
    assert not unnamed, f"{contract.name}: letters without a meaning: {unnamed}"
    for name, spec in contract.tensors.items():
        argument = next(a for a in contract.schema.arguments if a.name == name)
        assert (argument.alias_info is not None and argument.alias_info.is_write) == spec.mutated
        assert ("Optional" in str(argument.type)) == spec.optional
