"""Builds, checks and times every variant of proto/variants.py on one GPU.

python bench.py                 all variants
python bench.py NAME ...        some of them
python bench.py --worker NAME   one, in this process (what the parent starts)

Workers compile side by side; a file lock lets one at a time use the GPU. After it holds the lock
a worker has GPU_SECONDS, then SIGALRM kills it, so a deadlock costs one line of the table.
"""

import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "proto"))
GPU_SECONDS = 60
TOTAL_SECONDS = int(os.environ.get("BENCH_SECONDS", "560"))
PARALLEL = int(os.environ.get("BENCH_PARALLEL", "8"))
LOCK = os.path.join(tempfile.gettempdir(), "hopper-bench.lock")

# name: batch, S, query heads, KV heads, D
TIMED = {"A": (4, 2048, 32, 8, 128), "B": (1, 8192, 32, 8, 128), "C": (2, 8192, 64, 8, 64)}
PEER = {"A": 579, "B": 699, "C": 507}
# batch, S_q, S_kv, KV heads
CHECKED = [
    (1, 1, 1, 1),
    (2, 128, 128, 2),
    (2, 255, 129, 1),
    (1, 333, 517, 2),
    (1, 517, 333, 2),
    (1, 1000, 64, 1),
    (3, 64, 1000, 1),
    (1, 700, 1, 1),
    (1, 1024, 1024, 2),
    (2, 1153, 1537, 1),
]


def reference(q, k, v, causal, scale, rows=1024):
    """float64 attention of q [B, S_q, H, D] and its log-sum-exp, in chunks of rows."""
    import torch

    b, sq, h, d = q.shape
    sk, g = k.shape[1], h // k.shape[2]
    kd = k.double().repeat_interleave(g, 2).permute(0, 2, 3, 1)
    vd = v.double().repeat_interleave(g, 2).transpose(1, 2)
    outs, lses = [], []
    for r in range(0, sq, rows):
        s = q[:, r : r + rows].double().transpose(1, 2) @ kd * scale
        if causal:
            i = torch.arange(r, min(sq, r + rows), device=q.device)[:, None]
            j = torch.arange(sk, device=q.device)[None]
            s = s.masked_fill(j > i + sk - sq, float("-inf"))
        lse = torch.logsumexp(s, -1)
        w = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])
        outs.append((w @ vd).transpose(1, 2))
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 2)


class Runner:
    def __init__(self, kw):
        import attention
        import tilelang
        import torch

        self.kw = kw
        started = time.time()
        target = {"kind": "cuda", "arch": "sm_90a"}
        self.kernel = tilelang.compile(
            attention.make(**kw), target=target, pass_configs=attention.PASSES
        )
        self.seconds = time.time() - started
        self.dtype = getattr(torch, kw.get("dtype", "bfloat16"))
        self.causal = kw.get("causal", True)
        self.block_m = 64 * kw.get("consumers", 2)

    def start(self):
        import torch

        self.counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def __call__(self, q, k, v, o, lse, ctas=None):
        b, sq, h, d = q.shape
        row_blocks = -(-sq // self.block_m)
        scale = d**-0.5 * 1.4426950408889634
        tiles = row_blocks * b * h
        self.kernel(
            q, k, v, o, lse.view(-1, sq), self.counter, scale, row_blocks, tiles, min(ctas or self.sms, tiles)
        )

    def inputs(self, b, sq, sk, h, hk, d, seed=0):
        import torch

        gen = torch.Generator(device="cuda").manual_seed(seed)

        def new(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.float32, generator=gen).to(
                self.dtype
            )

        q, k, v = new(b, sq, h, d), new(b, sk, hk, d), new(b, sk, hk, d)
        o = torch.full_like(q, float("nan"))
        lse = torch.full((b, h, sq), float("nan"), device="cuda")
        return q, k, v, o, lse

    def check(self):
        """Worst relative error of o and absolute error of lse over CHECKED, and what failed."""
        import torch

        d, g = self.kw["head_dim"], self.kw["group"]
        worst_o = worst_l = 0.0
        failed = []
        bound = 6e-3 if self.dtype == torch.bfloat16 else 1e-3
        for b, sq, sk, hk in CHECKED:
            for ctas in (None, 3):
                q, k, v, o, lse = self.inputs(b, sq, sk, hk * g, hk, d, seed=sq)
                self(q, k, v, o, lse, ctas)
                torch.cuda.synchronize()
                want, want_l = reference(q, k, v, self.causal, d**-0.5)
                empty = want_l.isinf()
                rel = ((o.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
                err = (lse.double() - want_l)[~empty].abs().max().item() if (~empty).any() else 0.0
                ok = rel < bound and err < 1e-3 and bool((lse[empty] == float("-inf")).all())
                ok = ok and bool((o.transpose(1, 2)[empty] == 0).all()) and self.counter.item() == 0
                worst_o, worst_l = max(worst_o, rel), max(worst_l, err)
                if rel != rel:
                    worst_o = float("nan")
                if not ok:
                    failed.append(f"{b}x{sq}x{sk}h{hk}c{ctas or 'all'}:{rel:.1e}/{err:.1e}")
        return worst_o, worst_l, failed

    def reruns(self, n=20):
        """Of n more runs of one call, how many differ in any bit from the first."""
        import torch

        g = self.kw["group"]
        q, k, v, o, lse = self.inputs(2, 1537, 1537, 2 * g, 2, self.kw["head_dim"])
        self(q, k, v, o, lse)
        first, first_l = o.clone(), lse.clone()
        bad = 0
        for _ in range(n):
            o.fill_(float("nan"))
            self(q, k, v, o, lse)
            bad += not (torch.equal(o, first) and torch.equal(lse, first_l))
        return bad

    def time(self, name):
        import torch

        b, s, h, hk, d = TIMED[name]
        q, k, v, o, lse = self.inputs(b, s, s, h, hk, d)

        def call():
            self(q, k, v, o, lse)

        ms = median_ms(call)
        worst = 0.0
        for head in (0, h - 1):
            kv = head // (h // hk)
            one = (q[-1:, :, head : head + 1], k[-1:, :, kv : kv + 1], v[-1:, :, kv : kv + 1])
            want, _ = reference(*one, self.causal, d**-0.5)
            got = o[-1:, :, head : head + 1].double()
            worst = max(worst, ((got - want).norm() / want.norm()).item())
        torch.cuda.synchronize()
        pairs = s * (s + 1) // 2 if self.causal else s * s
        return 4 * b * h * d * pairs / ms / 1e9, ms, worst


def median_ms(call, warm=10, runs=60):
    import torch

    for _ in range(warm):
        call()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    events[0].record()
    for i in range(runs):
        call()
        events[i + 1].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in zip(events, events[1:]))
    return times[runs // 2]


def sdpa():
    """cuDNN through torch on the timed shapes, for comparison on the day."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    out = {}
    for name, (b, s, h, hk, d) in TIMED.items():
        q, k, v = (
            torch.randn(b, n, s, d, device="cuda", dtype=torch.bfloat16) for n in (h, hk, hk)
        )

        def call():
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            ms = median_ms(call)
        out[name] = 4 * b * h * d * (s * (s + 1) // 2) / ms / 1e9
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out["matmul"] = 2 * 8192**3 / median_ms(lambda: x @ x) / 1e9
    return out


def worker(name):
    """Prints one JSON line about a variant."""
    lock = open(LOCK, "w")

    def hold():
        fcntl.flock(lock, fcntl.LOCK_EX)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(GPU_SECONDS)

    say = lambda **kw: print(json.dumps({"name": name, **kw}), flush=True)  # noqa: E731
    if name == "cudnn":
        hold()
        say(**{k: round(v, 1) for k, v in sdpa().items()})
        return
    kw = importlib.import_module(os.environ.get("VARS", "variants")).VARIANTS[name]
    runner = Runner(kw)
    hold()
    runner.start()
    worst_o, worst_l, failed = runner.check()
    say(compile=round(runner.seconds, 1), rel=worst_o, lse=worst_l, failed=failed)
    say(reruns=runner.reruns())
    for shape, (_, _, h, hk, d) in TIMED.items():
        if d == kw["head_dim"] and h // hk == kw["group"]:
            rate, ms, rel = runner.time(shape)
            say(**{shape: round(rate, 1), shape + "_us": round(ms * 1e3, 1), shape + "_rel": rel})


def start(name):
    out = tempfile.TemporaryFile("w+")
    env = dict(os.environ, TILELANG_DISABLE_CACHE="1", OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--worker", name],
        stdout=out,
        stderr=subprocess.STDOUT,
        env=env,
    )
    return name, process, out


def line(name, process, out):
    out.seek(0)
    text = out.read()
    facts, rest = {}, []
    for row in text.splitlines():
        try:
            facts.update(json.loads(row))
        except ValueError:
            rest.append(row)
    rates = " ".join(
        f"{s} {facts[s]:6.1f} ({facts[s] / PEER[s]:.3f} of peer, rel {facts.get(s + '_rel', 0):.1e})"
        for s in TIMED
        if s in facts
    )
    if "matmul" in facts:
        rates += f" matmul {facts['matmul']}"
    state = "ok" if process.returncode == 0 else f"EXIT {process.returncode}"
    checks = ""
    if "rel" in facts:
        checks = f"rel {facts['rel']:.1e} lse {facts['lse']:.1e} reruns {facts.get('reruns', '-')}"
        if facts["failed"]:
            checks += f" FAILED {len(facts['failed'])}/{2 * len(CHECKED)}: " + " ".join(
                facts["failed"][:4]
            )
    print(f"{name:14s} {state:8s} {rates} | {checks}", flush=True)
    if process.returncode != 0:
        for row in [r for r in rest if r.strip()][-6:]:
            print("      ", row[:220], flush=True)


def main(names):
    variants = importlib.import_module(os.environ.get("VARS", "variants")).VARIANTS
    waiting = list(names or ["cudnn", *variants])
    running = []
    deadline = time.time() + TOTAL_SECONDS
    while waiting or running:
        while waiting and len(running) < PARALLEL:
            running.append(start(waiting.pop(0)))
        for job in list(running):
            if time.time() > deadline and job[1].poll() is None:
                job[1].kill()
                job[1].wait()
            if job[1].poll() is not None:
                running.remove(job)
                try:
                    line(*job)
                except Exception:
                    traceback.print_exc()
        if time.time() > deadline:
            waiting = []
        time.sleep(0.2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    else:
        main(sys.argv[1:])
