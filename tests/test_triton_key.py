"""Triton's key of itself, kept between processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from tileops.kernels.common import triton_key  # noqa: E402  needs triton

KEY = triton.__version__ + "-" + "0" * 64


def never():
    raise AssertionError("the library was hashed again")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_key_is_computed_once_for_all_processes(folder):
    assert triton_key.kept(lambda: KEY) == KEY
    assert triton_key.kept(never) == KEY
    assert [path.read_text() for path in folder.iterdir()] == [KEY]


@pytest.mark.parametrize("left", [b"", b"3", b"\xff\xfe"])
def test_what_is_no_key_is_replaced(folder, left):
    triton_key.kept(lambda: KEY)
    (path,) = folder.iterdir()
    path.write_bytes(left)
    assert triton_key.kept(lambda: KEY) == KEY
    assert path.read_text() == KEY


def test_a_key_that_cannot_be_put_there_leaves_nothing(folder, monkeypatch):
    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(Path, "replace", refused)
    assert triton_key.kept(lambda: KEY) == KEY
    assert not list(folder.iterdir())


def test_other_users_may_read_it(folder):
    triton_key.kept(lambda: KEY)
    (path,) = folder.iterdir()
    (folder / "plain").write_text("")
    assert path.stat().st_mode == (folder / "plain").stat().st_mode


def test_a_folder_that_cannot_be_written_costs_only_the_time(folder):
    folder.write_text("a file")
    assert triton_key.kept(lambda: KEY) == KEY


def test_a_changed_file_changes_the_key_of_files(tmp_path):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    library = package / "inner" / "library.so"
    library.write_bytes(b"old")
    (package / "dangling").symlink_to("nothing")
    outside = tmp_path / "third_party"
    outside.mkdir()
    (package / "linked").symlink_to(outside)
    (outside / "back").symlink_to(package)
    seen = {triton_key.fingerprint(package)}
    library.write_bytes(b"new")
    os.utime(library, ns=(1, 1))
    seen.add(triton_key.fingerprint(package))
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"")
    seen.add(triton_key.fingerprint(package))
    (package / "more.py").write_text("")
    seen.add(triton_key.fingerprint(package))
    (outside / "compiler.py").write_text("")
    seen.add(triton_key.fingerprint(package))
    assert len(seen) == 4


def test_triton_asks_for_the_kept_key(folder, monkeypatch):
    cache = triton.runtime.cache
    compute = cache.triton_key
    monkeypatch.setattr(cache, "triton_key", compute)  # put back afterwards
    triton_key.keep_key.cache_clear()
    triton_key.keep_key()
    assert cache.triton_key is not compute
    assert cache.triton_key() == compute()
    assert list(folder.iterdir())
    triton_key.keep_key.cache_clear()


KEYS = """
import sys
from tests import aot, meta_calls
from tileops.kernels.common.launch import Held
from tileops.kernels.common.triton_key import hash_from_below

for name in sys.argv[1:]:
    call = meta_calls.CALLS[name][0][1]
    for launch in aot.launches(name, call, aot.CHIPS["sm_90"]):
        _ = Held(*launch[:4], (4, 1, None), 0).key in {}
        hash_from_below(launch.kernel)
        print(launch.name, launch.kernel.cache_key)
"""


def test_the_key_of_a_kernel_does_not_depend_on_what_was_hashed_before():
    def keys(*names):
        said = subprocess.run(
            [sys.executable, "-c", KEYS, *names], capture_output=True, text=True, check=True
        )
        return set(said.stdout.splitlines())

    names = "gqa_dense_fwd", "gqa_dense_bwd", "nsa_varlen_fwd"
    assert keys(*names) == keys(*reversed(names))
