"""Triton's keys of itself and of kernels: kept between processes, and the same in all of them.

Before the first kernel of a process Triton reads and hashes its own library of some hundred
megabytes, 0.4 s, even if every kernel is in its cache. Here the names, sizes and times of its
files stand for what is in them, as they do for Python's bytecode, and the key that was computed
for them lies in Triton's cache folder.

The key of a kernel holds those of the device functions it calls, and which constants they use if
those were found before: it would depend on what else the process hashed earlier, and a kernel that
a warm-up compiled would be compiled again.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import triton
import triton.runtime.cache
from triton.runtime.jit import JITFunction


@functools.cache
def keep_key() -> None:
    """Let Triton look its key up; without the place where it asks for one, nothing changes."""
    compute = getattr(triton.runtime.cache, "triton_key", None)
    if compute is not None:
        triton.runtime.cache.triton_key = functools.cache(lambda: kept(compute))


def hash_from_below(function: JITFunction) -> None:
    """Let Triton hash what a kernel or device function calls before the function itself."""
    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if isinstance(called, JITFunction) and called is not function:
            hash_from_below(called)
    _ = function.cache_key


def kept(compute: Callable[[], str]) -> str:
    """The key of the installed files, from the cache folder or put there."""
    folder = Path(triton.knobs.cache.dir)
    path = folder / f"tileops-triton-key-{fingerprint(Path(triton.__file__).parent)}"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        key = path.read_text()
        if key.startswith(triton.__version__):
            return key
    key = compute()
    with contextlib.suppress(OSError):  # a folder that cannot be written: hashed again next time
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            new = Path(own) / path.name
            new.write_text(key)
            new.replace(path)  # another process sees the whole key or none
    return key


def fingerprint(package: Path) -> str:
    """Of the names, sizes and times of a package's files."""
    found, seen = hashlib.sha256(), set()
    for folder, folders, names in os.walk(package, followlinks=True):  # as installed for editing
        if os.path.realpath(folder) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        folders.sort()
        if "__pycache__" in folders:
            folders.remove("__pycache__")
        for name in sorted(names):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # a link to nothing
                stat = os.stat(path)
                found.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return found.hexdigest()[:40]
