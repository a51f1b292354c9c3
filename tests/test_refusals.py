"""What the Triton kernels decline, in the words a user reads, and that the limits are true."""

import importlib.util

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ops_registry.contract import BUILTIN_KERNELS, CONTRACTS, E4M3
from ops_registry.errors import NoKernelError
from ops_registry.targets import builtin_kernel, select
from tests import aot, meta_calls
from tests.triton_target import kernels
from tileops.kernels.common.limits import MOST_COLUMNS
from tileops.kernels.common.machine import Machine

H200 = aot.CHIPS["sm_90"]
REST = (
    "\n  builtin/cpu serves cpu tensors, got cuda"
    "\n  builtin/reference serves cpu tensors, got cuda"
)


def said(name, call, chip=H200):
    """Why the Triton kernel declines a call on meta tensors."""
    return aot.refusal(name, call, chip)


def refused(name, found, **shapes):
    """The whole error for a call with CUDA tensors of these shapes, on a machine without a GPU."""
    with FakeTensorMode():
        tensors = {
            n: torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for n, shape in shapes.items()
        }
    with pytest.raises(NoKernelError) as error:
        select(CONTRACTS[name], CONTRACTS[name].Call(**tensors), found)
    return str(error.value)


@pytest.mark.parametrize("name", kernels())
def test_gpus_older_than_ampere(name):
    """Before anything else that a kernel may decline: nothing helps there."""
    call = meta_calls.CALLS[name][0][1]
    for arch, capability in ((75, "7.5"), (70, "7.0"), (61, "6.1")):
        chip = aot.Chip(Machine("cuda", arch, 80), 64)
        wanted = f"needs a GPU of compute capability 8.0 or later, got {capability}"
        assert said(name, call, chip) == wanted


def wide_calls(dim, monkeypatch):
    """{operator: calls} of every kernel whose tiles hold whole heads."""
    monkeypatch.setattr(meta_calls, "CALLS", {})
    rope = meta_calls.tables(meta_calls.S, dim) | meta_calls.ROPE
    fp8 = {"dtype": E4M3, "out_dtype": torch.bfloat16}
    meta_calls.dense("prefill", dim=dim)
    meta_calls.dense("decode", s_q=1, dim=dim)
    meta_calls.dense("e4m3-rope", dim=dim, **fp8, **rope)
    meta_calls.dense_backward("rope", dim=dim, **rope)
    meta_calls.varlen("softcap", dim=dim, softcap=50.0)
    meta_calls.varlen_backward("plain", dim=dim)
    meta_calls.paged("decode", 8, dim=dim)
    meta_calls.paged("rope-decode", 8, dim=dim, **rope)
    meta_calls.paged("rope", 8 * 512, dim=dim, **rope)
    meta_calls.paged("rope-e4m3-pool", 8 * 512, dim=dim, pool=E4M3, **rope)
    meta_calls.prefill("rope-e4m3-pool", dim=dim, cache_dtype=E4M3, fuse_rope=True, max_position=9)
    meta_calls.mha("fp16", dim=dim)
    return meta_calls.CALLS


def test_heads_that_are_too_wide(monkeypatch):
    for name, calls in wide_calls(MOST_COLUMNS, monkeypatch).items():
        assert [said(name, call) for _, call in calls] == [None] * len(calls)
    wanted = "serves head dims of at most 512 columns, got D=514"
    for name, calls in wide_calls(514, monkeypatch).items():
        assert [said(name, call) for _, call in calls] == [wanted] * len(calls), name


@pytest.mark.aot
@pytest.mark.parametrize("arch", aot.CHIPS)
@pytest.mark.parametrize("dim, only", [(MOST_COLUMNS, ""), (256, "gqa_paged_fwd")])
def test_wide_heads_fit_every_chip(arch, dim, only, monkeypatch):
    """Paged calls that rotate keys as they are read take the most memory, at 256 columns too."""
    problems, limit = [], aot.CHIPS[arch].shared
    for name, calls in wide_calls(dim, monkeypatch).items():
        if only not in name:
            continue
        launched = [x for _, call in calls for x in aot.launches(name, call, aot.CHIPS[arch])]
        for wanted in aot.distinct(launched):
            found = aot.compiled(wanted, arch)
            print(found)
            if found.shared > limit * 1024:
                problems.append(f"{name}, more than {limit} KiB of shared memory: {found}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", ["fp8_lightning_indexer", "nsa_varlen_fwd", "nsa_topk"])
def test_kernels_that_walk_a_head_in_parts_have_no_limit(name, monkeypatch):
    monkeypatch.setattr(meta_calls, "CALLS", {})
    meta_calls.nsa("wide", dim=2048)
    meta_calls.indexer("wide", dim=2048)
    ((_, call),) = meta_calls.CALLS[name]
    assert said(name, call) is None
    assert aot.launches(name, call, H200)


def test_latent_keys_that_are_too_wide():
    meta = meta_calls.meta
    wide = {"q": meta(2, 16, 1024), "k": meta(2, 99, 1, 1024)}
    tail = {"q_pe": meta(2, 16, 129), "k_pe": meta(2, 99, 1, 129)}
    call = CONTRACTS["mla_decode_fwd"].Call(**wide, **tail)
    assert said("mla_decode_fwd", call) == (
        "serves keys of at most 1152 columns, the 1024 of the values and the 129 more each "
        "padded to a power of two"
    )


def test_the_error_lists_every_kernel():
    found = tuple(k for k in BUILTIN_KERNELS["gqa_dense_fwd"] if k.name != "tilelang")
    shape = (1, 8, 4, 576)
    assert refused("gqa_dense_fwd", found, q=shape, k=shape, v=shape) == (
        "gqa_dense_fwd: no kernel serves this call for cuda tensors:"
        "\n  builtin/triton serves head dims of at most 512 columns, got D=576" + REST
    )


def test_without_triton_the_error_names_the_install_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    package = "tileops.kernels.attention.gqa_dense"
    found = tuple(
        builtin_kernel(name, f"{package}.{name}", "gqa_dense_fwd")
        for name in ("triton", "cpu", "reference")
    )
    shape = (1, 8, 4, 64)
    assert refused("gqa_dense_fwd", found, q=shape, k=shape, v=shape) == (
        "gqa_dense_fwd: no kernel serves this call for cuda tensors:"
        "\n  builtin/triton needs triton: pip install 'tileops[triton]'" + REST
    )
