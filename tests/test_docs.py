"""The pages keep their word: their programs run, their tables are those of the contracts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tileops.attention
from ops_registry.contract import CONTRACTS
from tests.checks import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import contracts

FENCE = re.compile(r"^(`{3,})(\S*) ?(\S*)\n((?:.|\n)*?)^\1$", re.MULTILINE)
CAPTION = re.compile(r":caption: (\S+)(.*)\n\n")


# The tests that know every operator by name, and hold none back that a page does not mention.
LISTS = (
    "tests/test_layout.py",
    "tests/test_signatures.py",
    "tests/test_op_class.py",
    "tests/test_draws.py::test_every_operator_of_a_gpu_is_drawn_and_has_a_twin",
    "tests/test_memory.py::test_every_operator_has_a_headline_call",
    "tests/test_triton_compile.py::test_every_operator_has_calls",
)


def page(name):
    return (ROOT / name).read_text()


def programs(text, kind="python"):
    """The blocks of a page in that language that are meant to run, in order."""
    return [body for _, language, _, body in FENCE.findall(text) if language == kind]


def files(text, whole=True):
    """{path: content} of the captioned blocks of a page: whole files, or what is added to one."""
    found = {}
    for _, language, _, body in FENCE.findall(text):
        caption = CAPTION.match(body)
        if language == "{code-block}" and caption and whole == (not caption[2]):
            found[caption[1]] = body[caption.end() :]
    return found


def run_programs(blocks, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    return run([sys.executable, str(script)], tmp_path, PYTHONPATH=str(ROOT))


def run(command, cwd, **env):
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["README.md", "docs/compile_export.md", "docs/targets.md"])
def test_programs_run(name, tmp_path):
    """Everything before the first package."""
    blocks = programs(page(name))
    packaged = [i for i, block in enumerate(blocks) if "aoti" in block]
    run_programs(blocks[: packaged[0] if packaged else None], tmp_path)


@pytest.mark.package
@pytest.mark.parametrize("name", ["README.md", "docs/compile_export.md"])
def test_packages_run(name, tmp_path):
    blocks = programs(page(name))
    assert any("aoti" in block for block in blocks)
    run_programs(blocks, tmp_path)


@pytest.mark.package
@pytest.mark.cpp
def test_program_without_python(tmp_path):
    """The C++ program of the page, built and run as the page says."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    text = page("docs/compile_export.md")
    run_programs(programs(text), tmp_path)
    (tmp_path / "main.cpp").write_text(*programs(text, "cpp"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = run(["bash", "-euc", *programs(text, "bash")], tmp_path, PATH=path)
    assert printed == "[2, 5, 8, 64]\n"


def test_bug_report_command():
    printed = run([sys.executable, "-m", "tileops"], ROOT)
    assert all(name in printed for name in CONTRACTS)


def test_readme_table():
    table = "\n".join(contracts.operator_table())
    assert table in page("README.md"), f"README.md must hold this operator table:\n{table}"


def test_every_operator_has_a_page():
    stems = {contract.name: None for contract in CONTRACTS.values()}
    for path in (ROOT / "ops_registry" / "attention").glob("[!_]*.py"):
        text = page(f"docs/attention/{path.stem}.md")
        assert f"```{{contract-tables}} {path.stem}\n" in text
        for contract in contracts.contracts_of(path.stem):
            del stems[contract.name]
            if contract.op_class:
                assert f"autoclass:: tileops.attention.{contract.op_class}\n" in text
    assert not stems, f"contracts outside ops_registry/attention: {list(stems)}"


def test_every_class_is_in_the_table():
    rows = contracts.operator_table()
    assert len(rows) == len(tileops.attention.__all__) + 2


def test_the_guide_works(tmp_path):
    """The operator of `adding_an_op.md`, written into a copy, passes the harness."""
    name = "paged_kv_cache_read"
    for tree in ("ops_registry", "meta_kernels", "tileops", "tests", "docs", "benchmarks"):
        shutil.copytree(ROOT / tree, tmp_path / tree, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    written = files(page("docs/adding_an_op.md"))
    assert len(written) == 8
    for path, content in written.items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    added = files(page("docs/adding_an_op.md"), whole=False)
    for path, before, also in (
        ("tileops/attention/__init__.py", "\n__all__ = [", '    "PagedKVCacheWriteFwdOp",'),
        ("tests/test_signatures.py", '    "PagedKVCacheWriteFwdOp": (', None),
        ("tests/headline.py", "@builder\ndef paged_kv_cache_write", None),
    ):
        target = tmp_path / path
        text = target.read_text().replace(before, f"{added.pop(path)}\n{before}", 1)
        if also:
            text = text.replace(also, also.replace("Write", "Read") + "\n" + also, 1)
        target.write_text(text)
    assert not added
    tests = ["tests/test_cases.py", f"tests/attention/test_{name}.py"]
    printed = run([sys.executable, "-m", "pytest", "-q", "-k", name, *tests], tmp_path)
    assert "passed" in printed and "failed" not in printed
    printed = run([sys.executable, "-m", "pytest", "-q", *LISTS], tmp_path)
    assert "passed" in printed and "failed" not in printed
