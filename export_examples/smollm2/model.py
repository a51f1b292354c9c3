"""The Llama network as two steps over one page pool: prefill and decode.

Letters: T packed tokens, B requests, H query heads, G key/value heads, D head dim, V vocabulary,
NP pages, PS page size, W block-table width, N = NP * PS pool rows.

Activations are float32; q, k and v are cast to bfloat16 for the operators and the pools hold
bfloat16. Keys are stored **rotated**: prefill leaves that to the operator's fused RoPE, decode
rotates here and calls the paged operator without position encoding.

Each layer's pool is an input of its own and has the shape its operator takes, so that no step
writes through a view: a compiled step updates the pools in place and never copies one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from export_examples.smollm2.weights import Checkpoint, Config
from tileops.attention import (
    GQAPagedFwdOp,
    GQAPrefillPagedWithKVCacheFwdOp,
    PagedKVCacheWriteFwdOp,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """One transformer layer. Submodules carry the names of the GGUF tensors."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, width_kv = config.heads * config.head_dim, config.heads_kv * config.head_dim
        self.attn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attn_q = nn.Linear(config.dim, width, bias=False)
        self.attn_k = nn.Linear(config.dim, width_kv, bias=False)
        self.attn_v = nn.Linear(config.dim, width_kv, bias=False)
        self.attn_output = nn.Linear(width, config.dim, bias=False)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.ffn_gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.ffn_up = nn.Linear(config.dim, config.hidden, bias=False)
        self.ffn_down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """Map x [T, dim] to [T, dim]; attend takes float32 q [T, H, D], k and v [T, G, D]."""
        h = self.attn_norm(x)
        q, k, v = (
            project(h).unflatten(1, (-1, self.head_dim))
            for project in (self.attn_q, self.attn_k, self.attn_v)
        )
        x = x + self.attn_output(attend(q, k, v).float().flatten(1))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Llama(nn.Module):
    """The network without attention state; the steps below say what attention means."""

    def __init__(self, config: Config, tied: bool = True) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.vocab, config.dim)
        self.blk = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.output_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = None if tied else nn.Linear(config.dim, config.vocab, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        """Map final activations [B, dim] to logits [B, V]."""
        weight = self.token_embd.weight if self.output is None else self.output.weight
        return F.linear(self.output_norm(x), weight)


class PrefillStep(nn.Module):
    """Run whole prompts and append their keys and values to the pools."""

    def __init__(self, model: Llama, page_size: int) -> None:
        super().__init__()
        self.model = model
        config = model.config
        self.attention = GQAPrefillPagedWithKVCacheFwdOp(
            page_size,
            max_seqlen_q=config.context,
            fuse_rope=True,
            rope_base=config.rope_base,
            max_position=config.context,
        )

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens_q: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        k_pools: list[Tensor],
        v_pools: list[Tensor],
    ) -> Tensor:
        """Return the logits [B, V] float32 that follow each request's last token.

        tokens [T] int64, cu_seqlens_q [B + 1] int32, cache_seqlens [B] int32 (before the append),
        block_table [B, W] int32, k_pools and v_pools: one [N, G, D] bfloat16 per layer, written.
        """
        # The operator takes scales for every pool and ignores them for 16-bit ones.
        unit = torch.ones(1, dtype=torch.float32, device=tokens.device)

        def attend_with(k_pool: Tensor, v_pool: Tensor) -> Attend:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
                return self.attention(
                    q, k, v, k_pool, v_pool, unit, unit, cu_seqlens_q, cache_seqlens, block_table
                )

            return attend

        x = self.model.token_embd(tokens)
        for block, k_pool, v_pool in zip(self.model.blk, k_pools, v_pools, strict=True):
            x = block(x, attend_with(k_pool, v_pool))
        return self.model.logits(x.index_select(0, cu_seqlens_q[1:] - 1))


class DecodeStep(nn.Module):
    """Run one new token of every request."""

    def __init__(self, model: Llama, page_size: int) -> None:
        super().__init__()
        self.model = model
        self.page_size = page_size
        self.write = PagedKVCacheWriteFwdOp()
        self.attention = GQAPagedFwdOp(pos_encoding_mode="none")

    def forward(
        self,
        tokens: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        k_pools: list[Tensor],
        v_pools: list[Tensor],
    ) -> Tensor:
        """Return the logits [B, V] float32 that follow each request's token.

        tokens [B] int64, cache_seqlens [B] int32 (before the append), block_table [B, W] int32,
        k_pools and v_pools: one [NP, PS, G, D] bfloat16 per layer, written.
        """
        batch = tokens.shape[0]
        position = cache_seqlens.long()
        page = block_table.gather(1, (position // self.page_size).unsqueeze(1)).squeeze(1)
        slots = page.long() * self.page_size + position % self.page_size
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=tokens.device)
        seqlens = cache_seqlens + 1
        cos, sin = rotary_rows(position, self.model.config)

        def attend_with(k_pool: Tensor, v_pool: Tensor) -> Attend:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k = rotate(q, cos, sin).bfloat16(), rotate(k, cos, sin).bfloat16()
                self.write(k, v.bfloat16(), k_pool, v_pool, slots)
                return self.attention(q, k_pool, v_pool, block_table, seqlens, cu_seqlens_q)

            return attend

        x = self.model.token_embd(tokens)
        for block, k_pool, v_pool in zip(self.model.blk, k_pools, v_pools, strict=True):
            x = block(x, attend_with(k_pool, v_pool))
        return self.model.logits(x)


def rotary_rows(position: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, 1, D / 2] float32 of float64 angles, as the prefill operator has."""
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=position.device)
    angle = position.double().unsqueeze(1) * config.rope_base ** (-pair / config.head_dim)
    return angle.cos().float().unsqueeze(1), angle.sin().float().unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, D] in neox layout."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def build_model(checkpoint: Checkpoint) -> Llama:
    """Return the network with the checkpoint's weights, which it shares rather than copies."""
    with torch.device("meta"):
        model = Llama(checkpoint.config, tied="output.weight" not in checkpoint.weights)
    model.load_state_dict(checkpoint.weights, assign=True)
    return model.eval().requires_grad_(False)
