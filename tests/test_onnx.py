"""ONNX models: dense attention runs in two runtimes with the eager answer, the rest refuses."""

import re
import warnings

import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from ops_registry.accuracy import BF16, F16, FORWARD, FORWARD_ROPE
from ops_registry.contract import CONTRACTS
from tests import checks, oracle
from tests.cases import all_cases
from tileops.attention import GQADenseFwdOp, PagedKVCacheWriteFwdOp
from tileops.onnx import OPSETS, translation_table

OPTIONS = {
    "causal": {},
    "full": {"is_causal": False},
    "left-window": {"window_size_left": 3},
    "windows": {"is_causal": False, "window_size_left": 2, "window_size_right": 0},
    "softcap": {"softcap": 2.0, "sm_scale": 0.7},
    "all": {
        "is_causal": False,
        "window_size_left": 4,
        "window_size_right": 1,
        "softcap": 3.0,
        "sm_scale": 0.2,
    },
}
ROPE = {
    "neox": {},
    "interleaved": {"rope_layout": "interleaved"},
    "partial": {"rotary_dim": 8},
    "partial-interleaved": {"rotary_dim": 8, "rope_layout": "interleaved", "is_causal": False},
}
H, H_KV, D = 6, 2, 16
LENGTHS = [(2, 5, 9), (1, 1, 7), (3, 64, 64), (2, 3, 130)]  # B, S_q, S_kv
MORE_QUERIES = [(1, 6, 2)]  # rows before the first key, legal without causal


class Attention(torch.nn.Module):
    """float32 in and out; the 16-bit dtype exists only around the operator."""

    def __init__(self, dtype, **options):
        super().__init__()
        self.op = GQADenseFwdOp(**options)
        self.dtype = dtype

    def forward(self, q, k, v, rope_cos=None, rope_sin=None):
        given = (q, k, v, None, None, None, rope_cos, rope_sin)
        half = (x if x is None else x.to(self.dtype) for x in given)
        return self.op(*half).to(torch.float32)


def inputs(b, s_q, s_kv, dtype=F16):
    shapes = (b, s_q, H, D), (b, s_kv, H_KV, D), (b, s_kv, H_KV, D)
    return tuple(torch.randn(shape).to(dtype).to(torch.float32) for shape in shapes)


def dims(tables=0):
    b, s_q, s_kv, p = (torch.export.Dim(n, min=1, max=4096) for n in ("B", "S_q", "S_kv", "P"))
    shapes = ({0: b, 1: s_q}, {0: b, 1: s_kv}, {0: b, 1: s_kv})
    return (*shapes, *[{0: p}] * tables)


def export(module, args, opset=23, table=None, **kw):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module.eval(),
            args,
            dynamo=True,
            verbose=False,
            opset_version=opset,
            custom_translation_table=translation_table(opset) if table is None else table,
            **kw,
        )
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program.model_proto


def runtimes(model):
    """[(name, inputs -> outputs)] of the reference evaluator and ONNX Runtime."""
    names = [value.name for value in model.graph.input]
    reference = ReferenceEvaluator(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())

    def runner(run):
        def outputs(*args):
            return [
                torch.from_numpy(x)
                for x in run(None, {n: a.numpy() for n, a in zip(names, args, strict=True)})
            ]

        return outputs

    return [("reference", runner(reference.run)), ("runtime", runner(session.run))]


def check(module, model, lengths, tolerance, *extra):
    for runtime, run in runtimes(model):
        for sizes in lengths:
            args = (*inputs(*sizes, dtype=module.dtype), *extra)
            (got,) = run(*args)
            what = f"{runtime} at {sizes}"
            checks.assert_close(got, module(*args), tolerance, what)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("variant", OPTIONS)
def test_dense_attention(variant, dtype):
    module = Attention(dtype, **OPTIONS[variant])
    model = export(module, inputs(2, 5, 9), dynamic_shapes=dims())
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Attention") == 1 and "Log" not in kinds
    lengths = LENGTHS if module.op.is_causal else LENGTHS + MORE_QUERIES
    check(module, model, lengths, FORWARD[dtype])


@pytest.mark.parametrize("variant", ROPE)
def test_fused_rope(variant):
    module = Attention(F16, pos_encoding_mode="rope", **ROPE[variant])
    tables = oracle.rope_table(module.op.rotary_dim or D, 140, 10000.0, torch.float32)
    args = (*inputs(2, 5, 9), *tables)
    model = export(module, args, dynamic_shapes=dims(tables=2))
    check(module, model, LENGTHS, FORWARD_ROPE[F16], *tables)


@pytest.mark.parametrize("opset", OPSETS)
def test_opsets(opset):
    module = Attention(F16)
    model = export(module, inputs(2, 5, 9), opset, dynamic_shapes=dims())
    assert model.opset_import[0].version == opset
    check(module, model, LENGTHS[:2], FORWARD[F16])


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_16_bit_inputs_and_outputs(dtype):
    """The op alone: its output has q's dtype. numpy has no bfloat16, so float16 runs."""
    model = export(GQADenseFwdOp(), tuple(x.to(dtype) for x in inputs(2, 5, 9)))
    assert (
        model.graph.output[0].type.tensor_type.elem_type
        == {
            F16: onnx.TensorProto.FLOAT16,
            BF16: onnx.TensorProto.BFLOAT16,
        }[dtype]
    )
    if dtype == F16:
        args = tuple(x.to(dtype) for x in inputs(2, 5, 9))
        for runtime, run in runtimes(model):
            checks.assert_close(run(*args)[0], GQADenseFwdOp()(*args), FORWARD[F16], runtime)


def test_log_sum_exp_of_the_dispatcher_operator():
    class Both(torch.nn.Module):
        def forward(self, q, k, v):
            half = (x.to(F16) for x in (q, k, v))
            o, lse = torch.ops.tileops.gqa_dense_fwd(
                *half, is_causal=False, window_size_left=2, window_size_right=0, softcap=2.0
            )
            return o.to(torch.float32), lse

    args = inputs(1, 6, 3)  # the first rows see no key
    model = export(Both(), args)
    o, lse = Both()(*args)
    assert lse.isneginf().any()
    for runtime, run in runtimes(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's log of zero
            got = run(*args)
        checks.assert_close(got[0], o, FORWARD[F16], runtime)
        torch.testing.assert_close(got[1], lse, atol=1e-4, rtol=1e-4)


# ----------------------------------------------------------------------------------- refusals


def refusal(module, args, **kw):
    """The sentence of the exporter's error that is ours."""
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as raised:
        export(module, args, **kw)
    (sentence,) = re.findall(r"<class 'NotImplementedError'>: (.*)", str(raised.value))
    return sentence


def first_cases():
    found = {}
    for case in all_cases():
        found.setdefault(case.contract.name, case)
    found.pop("gqa_dense_fwd")
    return list(found.values())


@pytest.mark.parametrize("case", first_cases(), ids=str)
def test_operators_without_a_translation_say_so(case):
    call = case.call(5)
    said = refusal(checks.Module(case.contract, call), checks.tensors_of(call))
    assert said == (
        f"{case.contract.name}: has no ONNX translation; export the module with torch.export and "
        "package it with AOTInductor, or keep this operator outside the exported module"
    )


def test_float8_says_so():
    case = next(c for c in all_cases() if str(c) == "gqa_dense_fwd-fp8")
    call = case.call(5)
    said = refusal(checks.Module(case.contract, call), checks.tensors_of(call))
    assert said.startswith(
        "gqa_dense_fwd: has no ONNX translation for FLOAT8E4M3FN inputs; export the module with"
    )


def test_every_operator_is_in_the_table():
    for opset in OPSETS:
        table = translation_table(opset)
        for contract in CONTRACTS.values():
            assert (contract.functional if contract.mutated else contract.op) in table


@pytest.mark.parametrize("opset", [22, 26, None])
def test_other_opsets_are_refused(opset):
    with pytest.raises(ValueError, match="opset must be one of 23, 24, 25"):
        translation_table(opset)


def test_a_mutating_operator_becomes_its_functional_twin():
    """With a translation of one's own a cache write exports; the module returns the pool."""
    from onnxscript import opset23 as op

    def write(k, v, k_pages, v_pages, slots, k_scale=None, v_scale=None, target=""):
        flat = op.Constant(value_ints=[-1, 2, 16])
        where = op.Unsqueeze(slots, op.Constant(value_ints=[1]))

        def written(pages, rows):
            return op.Reshape(op.ScatterND(op.Reshape(pages, flat), where, rows), op.Shape(pages))

        return written(k_pages, k), written(v_pages, v)

    class Write(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.op = PagedKVCacheWriteFwdOp()

        def forward(self, k, v, k_pages, v_pages, slots):
            self.op(k, v, k_pages, v_pages, slots)
            return k_pages, v_pages

    rows, pool = torch.randn(2, 3, 2, 16).half(), torch.randn(2, 4, 4, 2, 16).half()
    slots = torch.tensor([9, 2, 4])
    table = translation_table() | {
        torch.ops.tileops.paged_kv_cache_write_functional.default: write
    }
    model = export(Write(), (*rows, *pool, slots), table=table)
    for runtime, run in runtimes(model):
        got = run(*rows, *pool, slots)
        expected = Write()(*rows, *pool.clone(), slots)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(checks.bits(a), checks.bits(b)), runtime
