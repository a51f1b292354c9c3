"""A target outside the package: it serves dense attention, and answers with ones."""

from tileops import ExternalTarget, Kernel


def gqa_dense_fwd(out, call):
    o, lse = out
    o.fill_(1)
    lse.zero_()


def refusal(call):
    return "serves head dims up to 64" if call.q.shape[-1] > 64 else None


def target():
    kernel = Kernel("ones", "example", gqa_dense_fwd, refusal, devices=("cpu",))
    return ExternalTarget("example", {"gqa_dense_fwd": kernel})
