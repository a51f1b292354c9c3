"""The built wheel: exactly the three import packages, every file of them, and it works."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.checks import ROOT
from tests.test_layout import TREES, sources


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that no build folder is left in the sources."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in (*TREES, "tests", "export_examples", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    done = subprocess.run(
        [*command, "--outdir", str(built), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = built.glob("*.whl")
    return path


def test_holds_exactly_the_three_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(TREES)
    files = {name for name in names if name.partition("/")[0] in TREES}
    code = {name for name in files if name.endswith(".py")}
    assert code == {str(p.relative_to(ROOT)) for tree in TREES for p in sources(tree)}


def test_is_pure_and_names_its_version(wheel):
    assert wheel.name.startswith("tileops-0.1.0-py3-none-any")
    (metadata,) = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA")]
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist: ")]
    assert [r for r in required if "extra ==" not in r] == ["Requires-Dist: torch>=2.11"]


@pytest.mark.parametrize("zipped", [False, True], ids=["installed", "zip"])
def test_runs_from_elsewhere(wheel, zipped, tmp_path):
    """Installed, and imported straight from the zip file."""
    if not zipped:
        zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import torch, tileops\n"
        "from tileops.attention import GQADenseFwdOp\n"
        "q = torch.ones(1, 3, 2, 16, dtype=torch.float16)\n"
        "print(tileops.__file__, GQADenseFwdOp()(q, q, q).unique().tolist())\n"
        "print(torch.compiler.config.cache_key_tag)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel if zipped else tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    where, answer, tag = done.stdout.split()
    assert answer == "[1.0]" and str(ROOT) not in where
    nothing = f"tileops-{hashlib.sha256().hexdigest()[:16]}"
    assert tag.startswith("tileops-") and tag != nothing
