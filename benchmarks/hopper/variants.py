"""The variants that are measured; `tests/test_hopper_kernel.py` compiles each without a GPU."""

D128 = dict(head_dim=128, group=4)
D64 = dict(head_dim=64, group=8)
C3 = dict(D64, consumers=3)

VARIANTS = {
    "d128": D128,
    "d128_always": dict(D128, slack=0.0),
    "d128_noturns": dict(D128, turns=False),
    "d128_hoisted": dict(D128, anchor=False),
    "d128_dyn": dict(D128, dynamic=True),
    "d128_trim": dict(D128, trim=2),
    "d128_dyntrim": dict(D128, dynamic=True, trim=2),
    "d128_stale": dict(D128, dynamic=True, trim=2, stale=True),
    "d64_c2": D64,
    "d64_c3": C3,
    "d64_c3noturns": dict(C3, turns=False),
    "d64_c3dyn": dict(C3, dynamic=True),
    "d64_c3p8": dict(C3, poly=8),
    "d64_c3p4": dict(C3, poly=4),
    "d64_c3stale": dict(C3, stale=True),
    "d64_c3n96": dict(C3, block_n=96, trim=2, dynamic=True, consumer_regs=152, producer_regs=56),
    "d64_c4n64": dict(D64, consumers=4, block_n=64, stages=4),
    "d128_full": dict(D128, causal=False, trim=2),
    "d128_fp16": dict(D128, dtype="float16", dynamic=True, trim=2),
}
