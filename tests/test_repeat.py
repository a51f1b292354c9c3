"""Repeated calls launch what the launcher would, with the pointers of their own tensors."""

import threading

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ops_registry import repeats, targets
from ops_registry.targets import ExternalTarget, register_target, unregister_target
from tests import aot, checks, tilelang_calls
from tests.cases import all_cases
from tests.triton_target import kernels, triton_cases
from tileops.kernels.common import launch, repeat
from tileops.kernels.common.machine import H200, overriding

every_case = pytest.mark.parametrize("case", triton_cases(), ids=str)


class Compiled:
    """A kernel that writes down what it is launched with."""

    def __init__(self, kernel, log):
        self.kernel, self.log = kernel, log

    def __getitem__(self, grid):
        return lambda *args: self.log.append((self.kernel, grid, args))


@pytest.fixture
def log(monkeypatch):
    """The launches of this process, on CPU tensors and without a device."""
    found = []

    def run(kernel, grid, args, constexprs, options, device):
        rest = tuple(constexprs[name] for name in kernel.arg_names[len(args) :])
        compiled = Compiled(kernel, found)
        compiled[grid](*args, *rest)
        if launch.noted() is not None:
            launch.noted().append(launch.Made(compiled, grid, (*args, *rest)))

    monkeypatch.setattr(launch, "_run", run)
    monkeypatch.setattr(launch, "compile_side_by_side", lambda held: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return found


def addresses(call):
    return [x.data_ptr() for x in checks.tensors_of(call)]


def described(launches, known):
    """The launches with every pointer as its place: known ones first, then others as they come."""
    places = {address: place for place, address in enumerate(known)}

    def place(address):
        return places.setdefault(address, len(places))

    def shown(x):
        if torch.is_tensor(x):
            return ("pointer", place(x.data_ptr())) if x.data_ptr() else 0
        if isinstance(x, TensorDescriptor):
            return "tiles", place(x.base.data_ptr()), *x.shape, *x.strides, *x.block_shape
        if type(x) is int and x > 2**40:
            return "pointer", place(x)
        return x

    return [(k, grid, [shown(x) for x in args]) for k, grid, args in launches]


@every_case
@pytest.mark.parametrize("size", [5, 40])
def test_a_repeat_launches_what_the_launcher_would(case, size, log):
    run = kernels()[case.contract.name].run
    first, second = case.call(size), case.call(size, seed=1)
    infer = aot.infers()[case.contract.name]
    again = repeat.remember(run, infer(first), first)
    assert again is not None
    log.clear()
    outputs = again(addresses(second), second)
    repeated = described(log, addresses((*second, *repeat._tensors(outputs))))
    log.clear()
    expected = infer(second)
    run(expected, second)
    launched = described(
        log, addresses(second) + [x.data_ptr() for x in repeat._tensors(expected)]
    )
    assert repeated == launched
    assert [(x.shape, x.stride(), x.dtype) for x in repeat._tensors(outputs)] == [
        (x.shape, x.stride(), x.dtype) for x in repeat._tensors(expected)
    ]


class OverTensors:
    """Calls that a TileLang kernel serves, on the CPU, and what is launched over tensors."""

    def __init__(self, monkeypatch, log):
        pytest.importorskip("tilelang")  # which tests/run.sh does without
        from tileops.kernels.common import tilelang_gqa, tilelang_latent, tilelang_launch

        self.log, self.counters = log, []
        self.table = torch.zeros(8, 32, dtype=torch.int32)
        for module in (tilelang_gqa, tilelang_latent, tilelang_launch):
            monkeypatch.setattr(module, "counter", self.counter)
        for module in (tilelang_gqa, tilelang_latent):
            monkeypatch.setattr(module, "machine", lambda x: H200)
        monkeypatch.setattr(tilelang_launch, "_compiled", {})
        monkeypatch.setattr(tilelang_launch, "_compile", lambda *_: self.launched)

    def counter(self, x):
        self.counters.append(self.table[len(self.counters), :1])
        return self.counters[-1]

    def launched(self, *args):
        self.log.append(("tilelang", (1, 1, 1), args))

    def described(self, outputs, call):
        """The launches since, and shapes and strides of what those over tensors got."""
        known = addresses((*call, *repeat._tensors(outputs), *self.counters))
        given = [
            (tuple(x.shape), x.stride(), x.dtype) if torch.is_tensor(x) else x
            for kernel, _, args in self.log
            for x in args
            if kernel == "tilelang"
        ]
        found = described(self.log, known), given
        self.log.clear()
        self.counters.clear()
        return found


def on_cpu(call):
    """The call with memory of its own."""
    empty = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        for name, x in call._asdict().items()
        if torch.is_tensor(x)
    }
    return call._replace(**empty)


ROPE = {"pos_encoding_mode": "rope", "rope_cos": tilelang_calls.meta(900, 64)}
ROPE["rope_sin"] = ROPE["rope_cos"]
CACHE = tilelang_calls.meta(3, 900, 1, 576)
SERVED = {
    "dense": tilelang_calls.dense(),
    "dense-parts-of-wider": tilelang_calls.dense(k=tilelang_calls.meta(2, 900, 7, 128)[:, :, 3:5]),
    "dense-rotated": tilelang_calls.dense(**ROPE),
    "dense-split": tilelang_calls.dense(rows=128),
    "dense-e4m3": tilelang_calls.dense(dtype=torch.float8_e4m3fn),
    "packed-e4m3": tilelang_calls.packed(dtype=torch.float8_e4m3fn),
    "packed": tilelang_calls.packed(sinks=tilelang_calls.meta(8, dtype=torch.float32)),
    "paged": tilelang_calls.paged(),
    "paged-rotated": tilelang_calls.paged(**ROPE),
    "appended": tilelang_calls.appended(fuse_rope=True, max_position=4096),
    "appended-pages-of-20": tilelang_calls.appended(page=20),
    "latent": tilelang_calls.latent(),
    "latent-whole": tilelang_calls.latent(batch=66),
    "latent-parts-of-one-cache": tilelang_calls.latent(k=CACHE[..., :512], k_pe=CACHE[..., 512:]),
    "indexed": tilelang_calls.indexed(),
    "indexed-whole": tilelang_calls.indexed(rows=300),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_repeat_over_tensors(name, log, monkeypatch):
    """With views of outputs and temporaries, other launches beside it, a counter of its own."""
    shown = OverTensors(monkeypatch, log)
    first, second = on_cpu(SERVED[name]), on_cpu(SERVED[name])
    run, infer = tilelang_calls.run_of(first), aot.infers()[tilelang_calls.name_of(first)]
    again = repeat.remember(run, infer(first), first)
    assert again is not None
    log.clear()
    shown.counters.clear()
    outputs = again(addresses(second), second)
    assert len(shown.counters) == 1
    repeated = shown.described(outputs, second)
    outputs = infer(second)
    run(outputs, second)
    assert repeated == shown.described(outputs, second)


def remembered(**changes):
    """How a small dense call is repeated, with some of its arguments changed."""
    case = next(case for case in all_cases() if case.contract.name == "gqa_dense_fwd")
    call = case.call(40)
    call = call._replace(**{name: change(call) for name, change in changes.items()})
    run, infer = kernels()[case.contract.name].run, aot.infers()[case.contract.name]
    return repeat.remember(run, infer(call), call)


def test_tensors_of_one_address_are_not_told_apart(log):
    assert remembered() is not None
    assert remembered(v=lambda call: call.k) is None


def test_a_call_that_copies_is_not_repeated(log):
    assert remembered(k=lambda call: call.k.transpose(1, 2).contiguous().transpose(1, 2)) is None


def test_the_filled_part_of_a_cache_is_not_copied(log):
    """Nor are keys that all requests share, nor a cache that keeps its heads apart."""
    cache = torch.randn(2, 90, 2, 32, dtype=torch.float16)

    def call(k, v):
        case = next(case for case in all_cases() if case.contract.name == "gqa_dense_fwd")
        q = torch.randn(k.shape[0], 1, 4, 32, dtype=torch.float16)
        return type(case.call(2))(q, k, v)

    run, infer = kernels()["gqa_dense_fwd"].run, aot.infers()["gqa_dense_fwd"]
    shared = cache[:1, :70].expand(3, -1, -1, -1)
    apart = torch.randn(2, 2, 90, 32, dtype=torch.float16).transpose(1, 2)
    for k in (cache, cache[:, :70], cache[1:, :70], shared, apart, apart[:, :70]):
        made = call(k, torch.empty_strided(k.shape, k.stride(), dtype=k.dtype))
        assert repeat.remember(run, infer(made), made) is not None


def test_other_threads_are_not_noted():
    found = []
    with launch.noting() as made:
        thread = threading.Thread(target=lambda: found.append(launch.noted()))
        thread.start()
        thread.join()
        assert launch.noted() is made
    assert found == [None]
    assert launch.noted() is None


def test_slices_are_found_by_their_offset():
    x = torch.empty(4, 10)
    places = repeat._Places([x, torch.empty(3)])
    assert places.find(x[1, 3:].data_ptr()) == (0, 13 * 4)
    assert places.find(x.data_ptr() + 4 * 10 * 4) != (0, 160)
    pool = torch.empty(4, 2, 8)
    places = repeat._Places([pool[:, 0], pool[:, 1]])
    assert places.find(pool[:, 1].data_ptr()) == (1, 0)
    assert places.find(pool[2, 1].data_ptr()) is None


class OnGpu:
    """Stands for a first argument on a GPU."""

    is_cuda = True


def keys(*others):
    found = repeats.Repeats().key((OnGpu, *others))
    return found and found[0]


def test_what_decides_a_call_is_its_key():
    room = torch.empty(4, 10)
    x = room[:, :8]
    seen = {
        keys(x, 1),
        keys(x, 2),
        keys(x, None),
        keys(x, x, 1),
        keys(x[:3], 1),
        keys(x.contiguous(), 1),
        keys(x.to(torch.float16), 1),
        keys(room[:, 1:9], 1),  # other alignment
        keys(x.to("meta"), 1),
    }
    assert len(seen) == 9
    assert keys(room.clone()[:, :8], 1) in seen


@pytest.mark.parametrize("warn_only", [False, True])
def test_the_deterministic_mode_decides_too(warn_only):
    x = torch.empty(3)
    before = keys(x)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        assert keys(x) != before
    finally:
        torch.use_deterministic_algorithms(False)
    assert keys(x) == before


def test_what_is_set_aside_decides_too():
    x = torch.empty(3)
    with targets.aside("tilelang"):
        behind = keys(x)
    assert behind is not None and behind != keys(x)


def test_what_is_not_remembered():
    x = torch.empty(3)
    assert repeats.Repeats().key((x,)) is None  # a CPU decides nothing worth remembering
    assert keys(x.as_subclass(type("Other", (torch.Tensor,), {}))) is None
    with overriding("attention_wide", {}):
        assert keys(x) is None
    register_target(ExternalTarget("elsewhere", {}))
    try:
        assert keys(x) is None
    finally:
        unregister_target("elsewhere")
    assert keys(x) is not None


def test_a_call_is_remembered_when_it_is_seen_again():
    found = repeats.Repeats()
    assert [found.wanted("a"), found.wanted("b"), found.wanted("a")] == [False, False, True]
    found.found["b"] = False  # tried in vain: not again
    assert not found.wanted("b")
    for key in range(repeats.MOST):
        found.wanted(key)
    assert len(found.found) <= repeats.MOST
