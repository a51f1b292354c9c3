"""Who serves a call: external targets, names, refusals, and what is said about them."""

import os
import re
import subprocess
import sys
import textwrap

import expecttest
import pytest
import torch

import tileops
from ops_registry import targets
from ops_registry.contract import BUILTIN_KERNELS
from ops_registry.errors import NoKernelError, UnknownTargetError
from tests.checks import ROOT
from tileops import (
    BUILTIN,
    ExternalTarget,
    Kernel,
    Lowering,
    explain,
    register_target,
    unregister_target,
)
from tileops.attention import GQADenseFwdOp, PagedKVCacheWriteFwdOp

SOURCE = ROOT / "tests" / "external_target"


def qkv(d=16, device="cpu"):
    return tuple(torch.zeros(1, 3, 2, d, dtype=torch.bfloat16, device=device) for _ in "qkv")


def ones(out, call):
    out[0].fill_(1)


@pytest.fixture
def add():
    """Register targets for one test: add(name, refusal=None, claims=None, **kernel fields)."""
    added = []

    def register(name, refusal=None, claims=lambda device: False, **fields):
        kernel = Kernel("ones", name, ones, lambda call: refusal, **fields)
        register_target(ExternalTarget(name, {"gqa_dense_fwd": kernel}, claims))
        added.append(name)

    yield register
    for name in added:
        unregister_target(name)


def served_by_ones(op, *tensors):
    return bool((op(*(tensors or qkv())) == 1).all())


# ------------------------------------------------------------------------ an installed target


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the external target installed from its own project."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "example_target.py"):
        (source / name).write_text((SOURCE / name).read_text())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--target", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def python(code, folder):
    """Run code in a process that finds the installed target; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_entry_point_serves_eagerly_and_compiled(installed):
    printed = python(
        """
        import torch, tileops
        from tileops.attention import GQADenseFwdOp

        q = torch.zeros(1, 3, 2, 16, dtype=torch.bfloat16)
        op = GQADenseFwdOp(target="example")
        print("eager", op(q, q, q).unique().tolist())
        seen = []
        from torch._dynamo.backends.common import aot_autograd
        from functorch.compile import make_boxed_func

        def inner(gm, inputs):
            seen.extend(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
            return make_boxed_func(gm.forward)

        with torch.no_grad():
            print("inductor", torch.compile(op, fullgraph=True)(q, q, q).unique().tolist())
            torch._dynamo.reset()
            torch.compile(op, backend=aot_autograd(fw_compiler=inner), fullgraph=True)(q, q, q)
        print("graph", [name for name in seen if "tileops" in name])
        print("default", GQADenseFwdOp()(q, q, q).unique().tolist())
        """,
        installed,
    )
    assert printed == (
        "eager [1.0]\ninductor [1.0]\ngraph ['tileops.gqa_dense_fwd.default']\ndefault [0.0]"
    )


def test_packaging_an_opaque_target_names_it(installed):
    printed = python(
        """
        import torch, tileops
        from tileops.attention import GQADenseFwdOp

        q = torch.zeros(1, 3, 2, 16, dtype=torch.bfloat16)
        with torch.no_grad():
            program = torch.export.export(GQADenseFwdOp(target="example"), (q, q, q))
            print([str(n.target) for n in program.graph.nodes if n.op == "call_function"][0])
            try:
                torch._inductor.aoti_compile_and_package(program, package_path="/absent/m.pt2")
            except Exception as error:
                print(error)
        """,
        installed,
    )
    assert printed.startswith("tileops.gqa_dense_fwd.default\n")
    assert (
        "gqa_dense_fwd: no kernel serves this call for target 'example' in an AOTInductor "
        "package:\n  example/ones is opaque to the compiler, an AOTInductor package cannot carry"
    ) in printed


def test_report_lists_installed_targets(installed):
    printed = python("from tileops.report import report; print(report())", installed)
    assert "targets\n  builtin, example\n" in printed
    assert re.search(r"gqa_dense_fwd +cpu, reference, example/ones", printed), printed


def test_entry_point_must_give_a_target(tmp_path):
    info = tmp_path / "bad_target-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-target\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tileops.targets]\nbad = bad_target:target\n")
    (tmp_path / "bad_target.py").write_text("def target():\n    return 3\n")
    printed = python(
        """
        from tileops.attention import GQADenseFwdOp
        try:
            GQADenseFwdOp(target="x")
        except TypeError as error:
            print(error)
        """,
        tmp_path,
    )
    assert printed == ("entry point 'bad' of tileops.targets must give an ExternalTarget, got int")


# --------------------------------------------------------------------------------- selection


def test_a_name_serves_or_raises(add):
    add("one")
    assert served_by_ones(GQADenseFwdOp(target="one"))
    assert not served_by_ones(GQADenseFwdOp(target=BUILTIN))
    assert not served_by_ones(GQADenseFwdOp())


def test_a_name_never_falls_back(add):
    add("picky", refusal="is on holiday")
    with pytest.raises(NoKernelError, match=r"target 'picky':\n  picky/ones is on holiday$"):
        GQADenseFwdOp(target="picky")(*qkv())


def test_a_target_without_the_operator(add):
    add("one")
    pool = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16)
    row, slot = torch.zeros(1, 2, 16, dtype=torch.bfloat16), torch.tensor([0])
    with pytest.raises(NoKernelError, match=r"has no kernel for this operator"):
        PagedKVCacheWriteFwdOp(target="one")(row + 1, row + 1, pool, pool.clone(), slot)
    assert not pool.any()


def test_a_claimed_device_is_served_by_its_target(add):
    add("claims", claims=lambda device: device.type == "cpu")
    assert served_by_ones(GQADenseFwdOp())
    assert not served_by_ones(GQADenseFwdOp(target=BUILTIN))


def test_a_claiming_target_may_decline(add):
    add("claims", refusal="is on holiday", claims=lambda device: True)
    assert not served_by_ones(GQADenseFwdOp())


def test_two_claimants_are_an_error(add):
    add("first", claims=lambda device: True)
    add("second", claims=lambda device: True)
    with pytest.raises(ValueError, match="targets 'first' and 'second' both claim cpu; name one"):
        GQADenseFwdOp()(*qkv())
    assert served_by_ones(GQADenseFwdOp(target="second"))


def test_an_inline_kernel_is_decomposed(add):
    add("inline", lowering=Lowering.INLINE)
    op = GQADenseFwdOp(target="inline")
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    with torch.no_grad():
        compiled = torch.compile(
            op,
            backend=torch._dynamo.backends.common.aot_autograd(fw_compiler=backend),
            fullgraph=True,
        )
        torch._dynamo.reset()
        out = compiled(*qkv())
    assert (out == 1).all()
    assert not [n for n in graphs[0].graph.nodes if "tileops" in str(n.target)]


def test_register_and_unregister(add):
    add("one")
    with pytest.raises(ValueError, match="target 'one' is registered already"):
        add("one")
    for name in ("", BUILTIN):
        with pytest.raises(ValueError, match="reserved"):
            register_target(ExternalTarget(name))
    unregister_target("one")
    unregister_target("one")
    with pytest.raises(UnknownTargetError):
        GQADenseFwdOp(target="one")


def test_an_unregistered_target_stops_serving(add):
    add("one")
    op = GQADenseFwdOp(target="one")
    unregister_target("one")
    with pytest.raises(UnknownTargetError, match="got 'one'"):
        op(*qkv())


def test_every_builtin_kernel_knows_its_device():
    for kernels in BUILTIN_KERNELS.values():
        assert kernels and {k.target for k in kernels} == {BUILTIN}
        assert any(k.lowering is Lowering.PACKAGE and "cpu" in k.devices for k in kernels)


@pytest.mark.parametrize("value", [3, True, b"builtin", torch.device("cpu")])
def test_target_must_be_a_name(value):
    with pytest.raises(TypeError, match="target must be None or a target name"):
        GQADenseFwdOp(target=value)


# ---------------------------------------------------------------------------------- messages


def served(name, device):
    return ", ".join(k.name for k in BUILTIN_KERNELS[name] if device in k.devices) or "none"


class Messages(expecttest.TestCase):
    """What a user reads, long lines wrapped."""

    def setUp(self):
        kernel = Kernel("fast", "vendor", ones, lambda call: "needs more than 3 queries", ("cpu",))
        register_target(ExternalTarget("vendor", {"gqa_dense_fwd": kernel}, lambda device: True))
        self.addCleanup(unregister_target, "vendor")

    def refused(self, fn, *args, **kwargs):
        with pytest.raises(ValueError, match=r"^gqa_dense_fwd: ") as raised:
            fn(*args, **kwargs)
        return "\n".join(textwrap.wrap(str(raised.value), 90))

    def test_unknown_target(self):
        said = self.refused(GQADenseFwdOp, target="fastest")
        self.assertExpectedInline(
            said,
            """\
gqa_dense_fwd: target must be None or one of 'builtin', 'vendor', got 'fastest'; an
external target joins by an entry point in the group 'tileops.targets' or by
register_target""",
        )
        op = torch.ops.tileops.gqa_dense_fwd
        assert self.refused(op, *qkv(), target="fastest") == said

    def test_every_reason_is_listed(self):
        contract, op = GQADenseFwdOp.contract, GQADenseFwdOp()
        call = contract.Call(*op.bound(*qkv(), *[None] * 5))
        missing = Kernel("hopper", BUILTIN, ones, lambda call: "needs tilelang", ("cpu",))
        cuda = Kernel("triton", BUILTIN, ones, devices=("cuda",))
        with pytest.raises(NoKernelError) as raised:
            targets.select(contract, call, (missing, cuda), packaged=True)
        self.assertExpectedInline(
            str(raised.value),
            """\
gqa_dense_fwd: no kernel serves this call for cpu tensors in an AOTInductor package:
  vendor/fast is opaque to the compiler, an AOTInductor package cannot carry it
  builtin/hopper is opaque to the compiler, an AOTInductor package cannot carry it
  builtin/triton serves cuda tensors, got cpu""",
        )

    def test_explain(self):
        self.assertExpectedInline(
            explain(GQADenseFwdOp(), *qkv()),
            """\
gqa_dense_fwd on cpu, target None
  vendor/fast: needs more than 3 queries
  builtin/tilelang: serves cuda tensors, got cpu
  builtin/triton: serves cuda tensors, got cpu
  builtin/cpu: serves
  builtin/reference: would serve, a better one does""",
        )

    def test_explain_a_named_target(self):
        self.assertExpectedInline(
            explain(GQADenseFwdOp(target="vendor"), *qkv()),
            """\
gqa_dense_fwd on cpu, target 'vendor'
  vendor/fast: needs more than 3 queries
  no kernel serves this call""",
        )

    def test_explain_refuses_an_illegal_call(self):
        q, k, v = qkv()
        said = self.refused(explain, GQADenseFwdOp(), q, k, v[..., 1:])
        self.assertExpectedInline(
            said,
            """\
gqa_dense_fwd: v must have shape [B, S_kv, H_kv, D] with B=1, S_kv=3, H_kv=2, D=16, got
[1, 3, 2, 15]""",
        )

    def test_report(self):
        done = subprocess.run(
            [sys.executable, "-m", "tileops"],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        frame, _, rows = done.stdout.partition("dsa_decode_fwd")
        frame = re.sub(r"(?m)^(  (?!builtin|operator)\w+ +)(\S+|not installed)$", r"\1*", frame)
        frame = re.sub(r"(?m)^  cpu: .*$", "  cpu: *", frame)
        self.assertExpectedInline(
            frame,
            """\
versions
  python        *
  platform      *
  tileops       *
  torch         *
  triton        *
  tilelang      *
  onnx          *
  transformers  *
devices
  cpu: *
targets
  builtin
operators (kernels by device, best first)
  operator               cpu                   cuda
  """,
        )
        rows = [re.split("  +", row.strip()) for row in f"dsa_decode_fwd{rows}".splitlines()]
        expected = [[name, served(name, "cpu"), served(name, "cuda")] for name in BUILTIN_KERNELS]
        assert rows == expected


def test_explain_runs_and_writes_nothing():
    pool = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16)
    row = torch.ones(1, 2, 16, dtype=torch.bfloat16)
    printed = explain(PagedKVCacheWriteFwdOp(), row, row, pool, pool.clone(), torch.tensor([0]))
    assert printed.splitlines()[0] == "paged_kv_cache_write on cpu, target None"
    assert not pool.any()
    assert tileops.explain is explain
