"""Gradients of dense and packed GQA in Triton: every option, group and head dim, both ways to dq,
keys walked in parts, packed tiles in the order of their work."""

import contextlib

import pytest
import torch

from ops_registry.accuracy import BACKWARD, Tolerance
from tests import checks, oracle
from tests.cases import offsets
from tests.triton_target import TARGET
from tileops.kernels.common import triton_gqa_backward as launcher
from tileops.kernels.common.machine import overriding

F16 = torch.float16
INF, NAN = float("inf"), float("nan")

# How the kernels come by the gradients: one kernel after the other, or dq added up by the first.
WAYS = {
    "apart": {"BLOCK_M": 16, "BLOCK_N": 32, "FUSED": 0, "EARLY": 1, "warps": 4, "stages": 1},
    "fused": {"BLOCK_M": 32, "BLOCK_N": 16, "FUSED": 1, "EARLY": 0, "warps": 2, "stages": 1},
}
QUERIES = {"BLOCK_M": 32, "BLOCK_N": 16, "warps": 4, "stages": 1}


@contextlib.contextmanager
def way(name, monkeypatch, parts=False):
    """Small tiles of that way; parts: tiles of keys are walked in several parts."""
    if parts:
        monkeypatch.setattr(launcher, "SPLIT_ROWS", 16)
        monkeypatch.setattr(launcher, "ROUNDS", 4)
    with (
        overriding("attention_backward_keys", WAYS[name]),
        overriding("attention_backward_queries", QUERIES),
    ):
        yield


class Inputs:
    """One packed call: its tensors, its options, and its gradients in float64."""

    def __init__(self, q_lens, kv_lens, h, h_kv, d, *, sinks=None, rope=None, seed=0, **options):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(F16)

        self.cu = offsets(list(q_lens)), offsets(list(kv_lens))
        self.q, self.do = randn(sum(q_lens), h, d), randn(sum(q_lens), h, d)
        self.k, self.v = randn(sum(kv_lens), h_kv, d), randn(sum(kv_lens), h_kv, d)
        self.sinks, self.options = sinks, options
        self.rope = {}
        if rope is not None:
            width, layout = rope
            cos, sin = oracle.rope_table(width or d, max([*kv_lens, 1]) + 2, 1e4, F16)
            self.rope = {"rope_cos": cos, "rope_sin": sin, "rope_layout": layout}
        self.rotary = None if rope is None else rope[0]
        self._differentiate()

    def _differentiate(self):
        leaves = [oracle.f64(x).requires_grad_() for x in (self.q, self.k, self.v)]
        extra = [] if self.sinks is None else [oracle.f64(self.sinks).requires_grad_()]
        cu_q, cu_kv = map(oracle.ints, self.cu)
        o, lse = [leaves[0][:0]], [leaves[0].new_zeros(self.q.shape[1], 0)]
        for b in range(len(cu_q) - 1):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
            one = oracle.gqa_request(
                leaves[0][rows],
                leaves[1][keys],
                leaves[2][keys],
                sinks=extra[0] if extra else None,
                **self.rope,
                **self.options,
            )
            o.append(one[0])
            lse.append(one[1])
        o = torch.cat(o)
        self.o, self.lse = o.detach().to(F16), torch.cat(lse, 1).detach().float()
        wanted = leaves + extra
        grads = torch.autograd.grad(o, wanted, oracle.f64(self.do), allow_unused=True)
        self.expected = [
            torch.zeros_like(x) if g is None else g.nan_to_num(0.0)
            for x, g in zip(wanted, grads, strict=True)
        ]

    def keywords(self):
        found = {**self.options, **self.rope, "target": TARGET}
        if self.rope:
            found |= {"pos_encoding_mode": "rope", "rotary_dim": self.rotary}
        return found

    def packed(self, **changed):
        """dq, dk, dv, dsinks of the packed operator."""
        names = ("q", "k", "v", "o", "do", "lse")
        t = {name: getattr(self, name) for name in names} | changed
        return torch.ops.tileops.gqa_varlen_bwd(
            t["q"],
            t["k"],
            t["v"],
            *self.cu,
            t["o"],
            t["do"],
            t["lse"],
            sinks=self.sinks,
            **self.keywords(),
        )

    def dense(self, batch):
        """dq, dk, dv of the dense operator over `batch` requests of one length, packed again."""
        rows = [x.unflatten(0, (batch, -1)) for x in (self.q, self.k, self.v, self.o, self.do)]
        lse = self.lse.unflatten(1, (batch, -1)).transpose(0, 1)
        grads = torch.ops.tileops.gqa_dense_bwd(*rows, lse, **self.keywords())
        return [g.flatten(0, 1) for g in grads]

    def check(self, grads):
        # A sink's gradient sums what may cancel, from an o that was rounded.
        rows = [BACKWARD[F16]] * 3 + [Tolerance(None, 5e-3, 5e-3)]
        names = ("dq", "dk", "dv", "dsinks")
        for name, a, e, row in zip(names, grads, self.expected, rows, strict=False):
            checks.assert_close(a, e, row, f"{name} with {self.options}")


def draw(seed):
    source = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=source))]

    return pick


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("seed", range(5))
def test_random_packed_calls(seed, name, parts, monkeypatch):
    pick = draw(100 + seed + 10 * (name == "fused") + 20 * parts)
    batch = pick(1, 3, 4)
    h_kv, group, d = pick(1, 2), pick(1, 3, 4), pick(8, 20, 32)
    rope = pick(None, None, (None, "neox"), (6, "interleaved"), (4, "neox"))
    q_lens = [pick(0, 1, 2, 17, 40) for _ in range(batch)]
    kv_lens = [pick(0, 1, 3, 20, 50) for _ in range(batch)]
    if rope is not None:
        kv_lens = [n + m for n, m in zip(q_lens, kv_lens, strict=True)]
    found = Inputs(
        q_lens,
        kv_lens,
        h_kv * group,
        h_kv,
        d,
        sinks=pick(None, torch.randn(h_kv * group)),
        rope=rope,
        seed=seed,
        is_causal=pick(True, False),
        window_size_left=pick(-1, -1, 0, 3, 20),
        window_size_right=pick(-1, -1, 0, 2, 20),
        sm_scale=pick(None, 0.1, 0.3),
        softcap=pick(None, None, 2.0),
    )
    with way(name, monkeypatch, parts):
        found.check(found.packed())


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_random_dense_calls(seed, name, monkeypatch):
    pick = draw(300 + seed + 10 * (name == "fused"))
    batch, s_q, more = pick(1, 2), pick(1, 19, 33), pick(0, 1, 16)
    h_kv, group, d = pick(1, 2), pick(1, 3, 7), pick(16, 24)
    found = Inputs(
        [s_q] * batch,
        [s_q + more] * batch,
        h_kv * group,
        h_kv,
        d,
        rope=pick(None, (8, "neox"), (None, "interleaved")),
        seed=seed,
        is_causal=pick(True, False),
        window_size_left=pick(-1, 5),
        window_size_right=pick(-1, 0, 4),
        softcap=pick(None, 3.0),
    )
    with way(name, monkeypatch, parts=pick(False, True)):
        found.check(found.dense(batch))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("group", [7, 71])
def test_groups_of_any_size(group, name, monkeypatch):
    found = Inputs((5, 2), (6, 3), group, 1, 16)
    with way(name, monkeypatch):
        found.check(found.packed())


@pytest.mark.parametrize("name", WAYS)
def test_few_keys_and_many_queries(name, monkeypatch):
    """Rows above the diagonal, whole tiles of them, see nothing: S_q > S_kv without RoPE."""
    found = Inputs((70, 3), (5, 0), 2, 1, 16)
    with way(name, monkeypatch):
        dq, dk, dv, _ = grads = found.packed()
    found.check(grads)
    assert (dq[:65] == 0).all()
    assert (dq[70:] == 0).all()


@pytest.mark.parametrize("rope", [None, (None, "neox")])
@pytest.mark.parametrize("name", WAYS)
def test_padding_and_neighbours_do_not_leak(name, rope, monkeypatch):
    """Tokens past the last offsets hold NaN, get no gradient and give none.

    They are more than the longest request has, and tables past it hold NaN too.
    """
    found = Inputs((9, 0, 21), (12, 4, 21), 6, 2, 16, sinks=torch.randn(6), rope=rope)
    for table in ("rope_cos", "rope_sin") if rope else ():
        found.rope[table][21:] = NAN
    extra = 25

    def padded(x, axis=0):
        shape = [extra if i == axis else n for i, n in enumerate(x.shape)]
        return torch.cat([x, x.new_full(shape, NAN)], axis)

    names = ("q", "k", "v", "o", "do")
    changed = {n: padded(getattr(found, n)) for n in names} | {"lse": padded(found.lse, 1)}
    with way(name, monkeypatch):
        *grads, dsinks = found.packed(**changed)
    found.check([*(g[:-extra] for g in grads), dsinks])
    assert all((g[-extra:] == 0).all() for g in grads)


def test_sinks_at_the_extremes(monkeypatch):
    """A sink that takes everything leaves no gradient, one that takes nothing changes none."""
    plain = Inputs((6, 2), (6, 0), 3, 1, 16)
    with way("fused", monkeypatch):
        before = plain.packed()
        plain.sinks = torch.full((3,), -INF)
        *grads, dsinks = plain.packed()
        assert (dsinks == 0).all()
        assert all(torch.equal(a, b) for a, b in zip(before, grads, strict=False))
        plain.sinks = torch.full((3,), INF)
        assert all((g == 0).all() for g in plain.packed(o=torch.zeros_like(plain.o)))


def test_more_requests_than_are_sorted(monkeypatch):
    monkeypatch.setattr(launcher, "SORTED", 4)
    lens = (3, 0, 18, 1, 7, 2)
    found = Inputs(lens, lens, 2, 1, 16)
    with way("apart", monkeypatch):
        found.check(found.packed())


def test_one_order_of_sums_where_it_is_asked_for(monkeypatch):
    """Deterministic algorithms: no float32 atomics, the same bits as without them asked for."""
    found = Inputs((33,), (33,), 4, 2, 16)
    with way("fused", monkeypatch, parts=True):
        assert not launcher.deterministic()
        torch.use_deterministic_algorithms(True)
        assert launcher.deterministic()
        assert not launcher.keys_numbers(launcher.machine(found.q), 16)["FUSED"]
        found.check(found.packed())


def test_nothing_at_all(monkeypatch):
    for lens in ((), ()), ((0, 0), (0, 0)), ((0, 0), (3, 1)), ((3, 1), (0, 0)):
        found = Inputs(*lens, 2, 1, 16)
        with way("fused", monkeypatch):
            assert all((g == 0).all() for g in found.packed())
