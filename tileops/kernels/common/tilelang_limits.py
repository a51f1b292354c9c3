"""What the TileLang kernels do not serve, in sentences that all of them share.

Nothing here reads the contents of a tensor or, while a compiler traces, looks at a symbolic size:
what is not known then is decided when the program runs. TileLang itself is loaded last, by a call
that nothing else speaks against.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Container
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ops_registry import tracing
from tileops.kernels.common.recorder import machine

ARCH = 90  # the kernels are made of instructions that no other architecture has
HALF = (torch.float16, torch.bfloat16)
DIMS = (64, 128, 256)
FEWEST = 128  # query rows of a request below which another kernel is faster
FEWEST_PACKED = 16  # the same of packed requests, whose heads share a tile
SPLIT_KEYS = 4096  # keys from which on few rows are better served by splitting them
TILE_ROWS = {64: 192, 128: 128, 256: 128}  # of a dense tile, by head dim, all of one head
EMPTY = 1 / 4  # of their rows; with more, tiles that heads share are faster
ALIGNMENT = 16  # bytes, of where the copy engine starts, and of its strides
MOST_ELEMENTS = 2**30  # of a dense tensor: the strides of o are 32-bit
MOST_ROWS = 2**31  # of a packed tensor or a pool: coordinates are 32-bit
ROWS_COPIED = 128  # of a page of a copy
MOST_COPIED = 2**30  # bytes of keys and values that are copied before a call reads them
FEWEST_COPIED = 256  # query rows of a KV head that make up for reading its keys once more
LATENT_COLUMNS = 512, 64  # of a value, and those of a key behind them
LATENT_HEADS = 64  # of a program
LATENT_SLOTS = 64  # of a tile
SCALES = 2.0**-60, 2.0**60  # between them nothing of a finite call leaves float32
CAPS = 1e-3, 1e3  # of a softcap: tanh is off by 1e-7, a logit by so many times that


def refusal(call: Any) -> str | None:
    """Why kernels cannot be compiled for the device of a call."""
    device = machine(call[0])
    if device.backend == "cuda" and device.arch == ARCH:
        return None
    return "needs a GPU of compute capability 9.0"


def scale_refusal(call: Any) -> str | None:
    """Why the scale of a call is not served."""
    if call.sm_scale is not None and not SCALES[0] < call.sm_scale < SCALES[1]:
        return f"serves scales from 2**-60 to 2**60, got sm_scale={call.sm_scale}"
    return None


def option_refusal(call: Any) -> str | None:
    """Why the options of a call are not served."""
    problem = scale_refusal(call)
    if problem:
        return problem
    if call.softcap and not CAPS[0] <= call.softcap <= CAPS[1]:
        return f"serves softcaps from {CAPS[0]:g} to {CAPS[1]:g}, got softcap={call.softcap}"
    return None


def tensor_refusal(q: Tensor, *, e4m3: bool = False, **keys: Tensor) -> str | None:
    """Why queries [..., H, D] and keys and values, by their names, are not served.

    e4m3: whether they may be of one byte.
    """
    served = (*HALF, torch.float8_e4m3fn) if e4m3 else HALF
    problem = _dim_problem(q) or _problem("q", q, served)
    for name, x in keys.items():
        problem = problem or _problem(name, x, served)
    return problem


def _dim_problem(q: Tensor) -> str | None:
    dim = q.shape[-1]
    return None if dim in DIMS else f"serves head dims of 64, 128 and 256 columns, got D={dim}"


def pools_refusal(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page: int, table: Tensor, rotates: bool = False
) -> str | None:
    """Why q [T_q, H, D] over pools [..., H_kv, D] behind table [B, W] is not served.

    Pools that the kernel cannot read are copied first: of the rows that the table has room for.
    """
    problem = _dim_problem(q) or _problem("q", q, HALF)
    pools = {"k_pages": k_pages, "v_pages": v_pages}
    for name, x in pools.items():
        problem = problem or _size_problem(name, x, pools=True)
    why = copied(q, k_pages, v_pages, page, rotates)
    if problem or why is None:
        return problem
    for name, x in pools.items():
        if not _unknown(x) and x.stride(-1) != 1:
            return _place_problem(name, x)
    if k_pages.dtype not in HALF and q.dtype != torch.bfloat16:
        return f"widens pools for bfloat16 alone, got q of {str(q.dtype).removeprefix('torch.')}"
    requests, width = table.shape
    rows_out = -(-width * page // ROWS_COPIED) * ROWS_COPIED  # of a request
    size = 4 * requests * rows_out * k_pages.shape[-2] * k_pages.shape[-1]
    if isinstance(size, int) and not size:
        return f"copies {why}, of which a page table of shape {list(table.shape)} names none"
    if isinstance(size, int) and size > MOST_COPIED:
        return (
            f"copies {why}, at most 2**30 bytes, and the table has room for {size} bytes of keys "
            "and values"
        )
    rows = q.shape[0] * (q.shape[1] // k_pages.shape[-2])
    if isinstance(rows, int) and isinstance(requests, int) and rows < FEWEST_COPIED * requests:
        return (
            f"copies {why}, for {FEWEST_COPIED} and more query rows of a KV head a request, got "
            f"{rows // requests}"
        )
    return None


def copied(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page: int, rotates: bool = False
) -> str | None:
    """What is copied to 16-bit pages of its own before the kernel reads it, None if nothing is."""
    if rotates:
        return "keys that are rotated"
    if k_pages.dtype != q.dtype:
        return f"pools of {str(k_pages.dtype).removeprefix('torch.')}"
    if not reads_pages_of(page):
        return f"pages of {page} rows"
    if _place_problem("k_pages", k_pages) or _place_problem("v_pages", v_pages):
        return "pools that the copy engine cannot read"
    return None


def reads_pages_of(rows: int) -> bool:
    """Whether a block of keys is whole pages of so many rows, or inside one."""
    return rows % 8 == 0 and (128 % rows == 0 or rows % 128 == 0)


def e4m3_refusal(call: Any) -> str | None:
    """Why q, k and v of e4m3 are not served with the options of a call."""
    if call.q.dtype in HALF:
        return None
    if call.q.shape[-1] != 128:
        return f"serves float8_e4m3fn with head dims of 128 columns, got D={call.q.shape[-1]}"
    if (
        call.softcap
        or call.pos_encoding_mode == "rope"
        or getattr(call, "sinks", None) is not None
    ):
        return "serves float8_e4m3fn without softcap, rotation and sinks"
    return None


def latent_refusal(q: Tensor, tail: int, slots: Any, **caches: Tensor) -> str | None:
    """Why queries [..., H, D] over caches [B, N, H_kv, ...], by their names, are not served.

    tail: columns of a key behind the D of a value. slots: that a query looks at.
    """
    heads, dim = q.shape[-2:]
    if (dim, tail) != LATENT_COLUMNS:
        return f"serves values of 512 and keys of 64 columns more, got {dim} and {tail}"
    heads_kv = next(iter(caches.values())).shape[2]
    if heads % (heads_kv * LATENT_HEADS):
        return f"serves groups of multiples of 64 query heads, got H={heads} and H_kv={heads_kv}"
    if q.dtype not in HALF:
        return _problem("q", q, HALF)
    problem = _size_problem("q", q, pools=True)
    for name, x in caches.items():
        problem = problem or _size_problem(name, x, pools=True) or _place_problem(name, x)
    if problem or _unknown(q) or not isinstance(slots, int):
        return problem
    if not slots:
        return "serves lists of one and more slots, got empty ones"
    tiles = q.shape[:-2].numel() * heads_kv * (slots // LATENT_SLOTS + 1)
    if tiles >= MOST_ROWS:
        return f"serves fewer than 2**31 blocks of keys of all queries, got {tiles}"
    return None


def _problem(name: str, x: Tensor, served: Container[torch.dtype]) -> str | None:
    """Why the copy engine or the products cannot take x."""
    if x.dtype not in served:
        return f"serves float16 and bfloat16, got {name} of {str(x.dtype).removeprefix('torch.')}"
    return _size_problem(name, x) or _place_problem(name, x)


def _unknown(x: Tensor) -> bool:
    """Whether sizes of x are decided when the program runs."""
    return tracing.traced(x) and not all(isinstance(n, int) for n in (*x.shape, *x.stride()))


def _size_problem(name: str, x: Tensor, pools: bool = False) -> str | None:
    if _unknown(x):
        return None
    elements = x.numel()
    if not elements:
        return f"serves no empty tensors, got {name} of shape {list(x.shape)}"
    if x.dim() == 4 and not pools and elements >= MOST_ELEMENTS:
        return f"serves tensors of fewer than 2**30 elements, got {name} of shape {list(x.shape)}"
    if elements // (x.shape[-1] * x.shape[-2]) >= MOST_ROWS:
        return f"serves fewer than 2**31 rows, got {name} of shape {list(x.shape)}"
    return None


def _place_problem(name: str, x: Tensor) -> str | None:
    if _unknown(x):
        return None
    if not _is_strided(x):
        return (
            f"reads dense rows at strides of multiples of {ALIGNMENT} bytes, got {name} with "
            f"strides {x.stride()}"
        )
    if not tracing.traced(x) and x.data_ptr() % ALIGNMENT:
        return f"reads from multiples of {ALIGNMENT} bytes, got {name} between them"
    return None


def _is_strided(x: Tensor) -> bool:
    """Whether the copy engine can step through x."""
    if x.is_contiguous():  # the heads served are multiples of 16 bytes
        return True
    *strides, last = x.stride()
    return last == 1 and all(
        size == 1 or (stride > 0 and stride * x.dtype.itemsize % ALIGNMENT == 0)
        for size, stride in zip(x.shape, strides, strict=False)
    )


def length_refusal(q: Tensor, keys: Any) -> str | None:
    """Why dense q [B, S_q, H, D] over so many keys is left to another kernel."""
    if isinstance(q.shape[1], int) and q.shape[1] < FEWEST:
        return f"serves {FEWEST} and more query rows of a request, got S_q={q.shape[1]}"
    rows = TILE_ROWS.get(q.shape[-1]) if _is_few(q, keys) else None
    if rows is None:
        return None
    empty = -q.shape[1] % rows
    if empty <= EMPTY * (q.shape[1] + empty):
        return None
    return (
        f"leaves {empty} of {q.shape[1] + empty} rows of its tiles empty, and "
        f"{q.shape[:-1].numel()} rows of all heads over {keys} keys want full ones"
    )


def packed_refusal(q: Tensor, offsets: Tensor, keys: Any) -> str | None:
    """The same of packed q [T_q, H, D] behind offsets [B + 1], by the mean; keys: at most."""
    tokens, requests = q.shape[0], offsets.shape[0] - 1
    if isinstance(tokens, int) and isinstance(requests, int) and requests:
        mean = tokens // requests
        if mean < FEWEST_PACKED:
            return f"serves {FEWEST_PACKED} and more query rows a request, got T_q / B={mean}"
    if not _is_few(q, keys):
        return None
    rows = q.shape[:-1].numel()
    return f"does not split packed keys, and {rows} rows of all heads over {keys} keys want that"


def _is_few(q: Tensor, keys: Any) -> bool:
    """Whether so many keys should be split, to give every multiprocessor some of them."""
    if not isinstance(keys, int) or keys <= SPLIT_KEYS:
        return False
    if not all(isinstance(n, int) for n in q.shape):
        return False
    return 3 * q.shape[:-1].numel() <= 128 * machine(q).processors


# -------------------------------------------------------------------------- what compiles them

_broken: str | None = None


def give_up(reason: str) -> None:
    """No kernel can be compiled here: all decline from now on."""
    global _broken
    _broken = reason


def compiler_refusal() -> str | None:
    """Why nothing can be compiled on this machine; the first time TileLang is imported, 2 s."""
    return _broken or _missing()


@functools.cache
def _missing() -> str | None:
    try:
        load()
        nvcc = importlib.import_module("tilelang.contrib.nvcc")
        compiler = importlib.import_module("tilelang.contrib.cc").get_cplus_compiler()
    except Exception as error:  # whatever an installation that is not whole raises
        return f"cannot import tilelang, which says: {error}"
    if not os.path.exists(nvcc.CUDA_HOME) or not os.path.exists(nvcc.get_nvcc_compiler()):
        return (
            "needs nvcc of a CUDA toolkit: set CUDA_HOME, or "
            "pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
        )
    if compiler is None:
        return "needs a C++ compiler beside nvcc: install g++"
    return None


@functools.cache
def load() -> ModuleType:
    """TileLang, without the folder of TVM that it leaves to the processes started later."""
    before = os.environ.get("PYTHONPATH")
    try:
        return importlib.import_module("tilelang")
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before
