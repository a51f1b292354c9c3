"""Dense keys and values as views: the filled part of a cache, keys that requests share."""

import torch

NAN = float("nan")


def views(device="cpu", dtype=torch.float16, heads_kv=2, dim=32):
    """(name, k, v) [B, S_kv, heads_kv, dim] without copies; what lies between is NaN."""

    def cache(batch, rows, filled):
        x = torch.full((batch, rows, heads_kv, dim), NAN, dtype=dtype, device=device)
        x[:, :filled] = torch.randn(batch, filled, heads_kv, dim, device=device).to(dtype)
        return x

    k, v = cache(3, 300, 70), cache(3, 300, 70)
    yield "filled part", k[:, :70], v[:, :70]
    yield "requests apart", k[::2, :70], v[::2, :70]
    yield "shared", k[:1, :70].expand(3, -1, -1, -1), v[:1, :70].expand(3, -1, -1, -1)
    yield "other strides", k[:, :70], v[:, :70].contiguous()
    both = torch.cat((k[:, :, None], v[:, :, None]), 2)
    yield "side by side", both[:, :70, 0], both[:, :70, 1]
    k_apart, v_apart = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    yield "heads first", k_apart[:, :70], v_apart[:, :70]
    yield "heads first, shared", *(x[1:2, :70].expand(3, -1, -1, -1) for x in (k_apart, v_apart))
    yield "one request", k[1:2, :70], v[1:2, :70]
