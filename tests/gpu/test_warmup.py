"""After `python -m tileops.warmup`, the first call of a new process compiles nothing."""

import os
import subprocess
import sys

from tests.checks import ROOT

# A model in pages of 64: a decode step, a chunk, and the cache write before them.
WARMUP = [
    *("--op", "gqa_paged_fwd", "paged_kv_cache_write", "--heads", "16", "--heads-kv", "4"),
    *("--head-dim", "64", "--page-size", "64"),
]
CALLS = """
import torch
from tileops.attention import GQAPagedFwdOp, PagedKVCacheWriteFwdOp

def noise(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device="cuda")

pools = noise(70, 64, 4, 64), noise(70, 64, 4, 64)
table = torch.arange(70, dtype=torch.int32, device="cuda").view(2, 35)
slots = ints(1, 5, 70, dtype=torch.int64)
PagedKVCacheWriteFwdOp()(noise(3, 4, 64), noise(3, 4, 64), *pools, slots)
for tokens in (1, 150):
    q = noise(2 * tokens, 16, 64)
    GQAPagedFwdOp()(q, *pools, table, ints(2200, 190), ints(0, tokens, 2 * tokens))
torch.cuda.synchronize()
"""


def run(cache, *arguments):
    """What a process said whose caches lie there."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **caches(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def caches(cache):
    names = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR")
    return {name: str(cache / name) for name in names}


def files(cache):
    return {path.relative_to(cache) for path in cache.rglob("*") if path.is_file()}


def test_first_calls_compile_nothing(tmp_path):
    said = run(tmp_path, "-m", "tileops.warmup", *WARMUP)
    assert "3/3" in said.splitlines()[-1]
    warm = files(tmp_path)
    assert any(path.name.startswith("attention_kernel") for path in warm)
    run(tmp_path, "-c", CALLS)
    assert files(tmp_path) == warm


DENSE = """
import torch
from tileops.attention import GQADenseFwdOp

for rows in (1, 70, 400):
    q = torch.randn(2, rows, 16, 64, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(2, 500, 4, 64, dtype=torch.bfloat16, device="cuda")
    GQADenseFwdOp()(q, k, k.clone())
torch.cuda.synchronize()
"""


def test_the_kernels_of_short_and_long_prompts(tmp_path):
    """By Triton and, where it serves, by TileLang."""
    model = ("--op", "gqa_dense_fwd", "--heads", "16", "--heads-kv", "4", "--head-dim", "64")
    run(tmp_path, "-m", "tileops.warmup", *model)
    warm = files(tmp_path)
    assert "compiles" not in run(tmp_path, "-c", DENSE)
    assert files(tmp_path) == warm
