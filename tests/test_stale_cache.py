"""Compiled code never outlives its source, with the on-disk caches of torch in between.

A copy of the sources is edited between two processes that share a cache folder. The kernel is
made one that compilers decompose, so that its body is in the compiled code.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.checks import ROOT
from tests.test_layout import TREES

RUN = """
import torch
from torch._dynamo.utils import counters
import tileops
from tileops.attention import PagedKVCacheWriteFwdOp
from tileops.kernels.attention.paged_kv_cache_write import reference

kernel = tileops.Kernel(
    "inline", "inline", lambda out, call: reference.paged_kv_cache_write(out, call),
    lowering=tileops.Lowering.INLINE,
)
tileops.register_target(tileops.ExternalTarget("inline", {"paged_kv_cache_write": kernel}))
op = PagedKVCacheWriteFwdOp(target="inline")
rows, pool = torch.ones(2, 2, 16).half(), torch.zeros(2, 4, 2, 16).half()
with torch.no_grad():
    torch.compile(op, fullgraph=True)(rows, rows, pool, pool.clone(), torch.tensor([5, 2]))
print(pool.unique().tolist())
print(counters["aot_autograd"]["autograd_cache_hit"])
print(torch.compiler.config.cache_key_tag)
"""
TWICE = """

_once = paged_kv_cache_write


def paged_kv_cache_write(out: None, call: Any) -> None:
    _once(out, call)
    call.k_pages.mul_(2)
"""


@pytest.fixture
def copied(tmp_path):
    """A copy of the sources, and a function that runs code with it in a new process."""
    for tree in TREES:
        shutil.copytree(ROOT / tree, tmp_path / tree, ignore=shutil.ignore_patterns("__pycache__"))

    def python(code=RUN, **env):
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), **caches, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return tmp_path, python


def test_a_changed_kernel_is_compiled_again(copied):
    folder, python = copied
    first, hits, tag = python()
    assert (first, hits) == ("[0.0, 1.0]", "0")
    same, hits, same_tag = python()
    assert (same, hits, same_tag) == ("[0.0, 1.0]", "1", tag), (
        "the unchanged source is served cached"
    )
    with (folder / "tileops/kernels/attention/paged_kv_cache_write/reference.py").open(
        "a"
    ) as file:
        file.write(TWICE)
    changed, hits, new_tag = python()
    assert (changed, hits) == ("[0.0, 2.0]", "0") and new_tag != tag


@pytest.mark.parametrize("tree", TREES)
def test_every_source_counts(copied, tree):
    folder, python = copied
    tag = "import torch, tileops; print(torch.compiler.config.cache_key_tag)"
    before = python(tag)
    assert python(tag) == before
    with (folder / tree / "attention" / "mla_decode.py").open("a") as file:
        file.write("# changed\n")
    assert python(tag) != before


def test_the_users_tag_is_kept(copied):
    _, python = copied
    (tag,) = python(
        "import torch\n"
        "torch.compiler.config.cache_key_tag = 'mine'\n"
        "import tileops, importlib\n"
        "importlib.reload(tileops)\n"
        "print(torch.compiler.config.cache_key_tag)"
    )
    assert tag.startswith("mine") and tag.count("tileops-") == 1
