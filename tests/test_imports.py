"""What importing costs and needs, each in a fresh interpreter."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests import checks
from tests.cases import all_cases

# Pretends that a module is not installed.
WITHOUT = """
import importlib.abc, importlib.util, sys

class Blocked(importlib.abc.MetaPathFinder):
    names = {names!r}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
OPTIONAL = ("triton", "tilelang", "numpy", "onnx", "onnxscript", "transformers")

CALL = """
import torch
from tileops.attention import GQADenseFwdOp
q = torch.ones(1, 3, 2, 16, dtype=torch.float16)
print(GQADenseFwdOp()(q, q, q).unique().tolist())
"""


def python(code, *options, **env):
    """What a fresh interpreter printed; its errors fail the test."""
    done = attempt(code, *options, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def attempt(code, *options, **env):
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        cwd=checks.ROOT,
        env={**os.environ, "PYTHONPATH": str(checks.ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_needs_torch_alone():
    code = WITHOUT.format(names=OPTIONAL) + CALL
    assert python(code, CUDA_VISIBLE_DEVICES="") == "[1.0]"


@pytest.mark.parametrize("first", ["tileops", "ops_registry.contract", "meta_kernels.checks"])
def test_loads_no_kernel_language(first):
    """`torch` itself may load numpy; nothing else is loaded, not even by a call on CPU."""
    code = f"import {first}, sys\n"
    code += CALL if first == "tileops" else ""
    code += f"print([m for m in {OPTIONAL!r} if m in sys.modules and m != 'numpy'])"
    assert python(code).splitlines()[-1] == "[]"


EAGER = {
    "cpu": """
from tests.cases import all_cases
for case in {case.contract.name: case for case in all_cases()}.values():
    case.contract.op(*case.call(3))
""",
    "launchers": """
from tests import aot, meta_calls
for name, calls in meta_calls.CALLS.items():
    for _, call in calls:
        aot.launches(name, call, aot.CHIPS["sm_90"])
""",
}


@pytest.mark.parametrize("calls", EAGER)
def test_eager_calls_load_no_symbolic_algebra(calls):
    """It takes longer to import than all else that a first call needs."""
    if calls == "launchers":
        pytest.importorskip("triton")
    code = "import sys, torch\nbefore = set(sys.modules)\n" + EAGER[calls]
    assert python(code + "print('sympy' in sys.modules.keys() - before)") == "False"


def test_onnx_without_onnxscript_says_what_to_install():
    done = attempt(WITHOUT.format(names=("onnxscript",)) + "import tileops.onnx")
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: tileops.onnx needs onnxscript: pip install 'tileops[onnx]'"


def test_import_compiles_and_touches_nothing():
    printed = python(
        """
        import torch
        before = torch.random.get_rng_state()
        threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
        import tileops
        assert torch.equal(before, torch.random.get_rng_state())
        assert (threads, dtype) == (torch.get_num_threads(), torch.get_default_dtype())
        assert not torch.cuda.is_initialized()
        from ops_registry.contract import BUILTIN_KERNELS
        import sys
        print(sorted(m for m in sys.modules if m.startswith("tileops.kernels.attention.")))
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert printed == "[]"


def test_under_dash_o():
    """The rules are exceptions, not asserts."""
    code = CALL + (
        "try:\n    GQADenseFwdOp()(q, q, q[..., 1:])\n"
        "except ValueError as error:\n    print(error)\n"
    )
    printed = python(code, "-OO").splitlines()
    assert printed[0] == "[1.0]" and printed[1].startswith("gqa_dense_fwd: v must have shape")


def test_warnings_are_errors():
    code = "import warnings\nimport torch\nwarnings.simplefilter('error')\n" + CALL
    assert python(code) == "[1.0]"


def test_importing_again_is_harmless():
    code = "import tileops\nimport tileops\nfrom tileops import attention" + CALL
    assert python(code) == "[1.0]"


def test_reloading_the_public_modules_is_harmless():
    code = "import importlib, tileops\nimportlib.reload(tileops)\n" + CALL
    assert python(code) == "[1.0]"


@pytest.mark.parametrize(
    "again",
    [
        "import importlib, ops_registry.attention.gqa_dense as m\nimportlib.reload(m)",
        "import sys\nfor name in [m for m in sys.modules if m.startswith('ops_registry')]:\n"
        "    del sys.modules[name]\nimport ops_registry.attention.gqa_dense",
    ],
    ids=["reload", "second copy"],
)
def test_registering_twice_is_one_clear_error(again):
    done = attempt("import tileops\n" + again)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: tileops::") and "imported twice" in last, done.stderr


def test_a_saved_program_names_its_operator_until_the_import(tmp_path):
    case = next(c for c in all_cases() if c.contract.name == "paged_kv_cache_write")
    program, call = checks.export(case)
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save(checks.tensors_of(call), tmp_path / "inputs.pt")
    load = f"torch.export.load({str(tmp_path / 'program.pt2')!r})"
    done = attempt(f"import torch\n{load}")
    assert done.returncode == 1 and "paged_kv_cache_write" in done.stderr, done.stderr
    code = f"import torch, tileops\nprogram = {load}\n"
    code += f"program.module()(*torch.load({str(tmp_path / 'inputs.pt')!r}))\nprint('ran')"
    assert python(code) == "ran"
