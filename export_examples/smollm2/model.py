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
"""Map float32 q [T, H, D], k and v [T, G, D] to o [T, H, D] bfloat16, appending k and v."""

Bind = Callable[[Tensor, Tensor], Attend]
"""Make an `Attend` for the key and the value pool of one layer."""


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
        """Map x [T, dim] to [T, dim]."""
        h = self.attn_norm(x)
        q, k, v = (
            project(h).unflatten(1, (-1, self.head_dim))
            for project in (self.attn_q, self.attn_k, self.attn_v)
        )
        x = x + self.attn_output(attend(q, k, v).float().flatten(1))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Llama(nn.Module):
    """The network; the steps below say what attention means."""

    def __init__(self, config: Config, tied: bool = True) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.vocab, config.dim)
        self.blk = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.output_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = None if tied else nn.Linear(config.dim, config.vocab, bias=False)

    @property
    def output_weight(self) -> Tensor:
        """The output projection [V, dim], the embedding table where the file has no other."""
        return self.token_embd.weight if self.output is None else self.output.weight

    @property
    def device(self) -> torch.device:
        """Where the weights are, and so the steps and their pools."""
        return self.token_embd.weight.device

    def activations(
        self, tokens: Tensor, bind: Bind, k_pools: list[Tensor], v_pools: list[Tensor]
    ) -> Tensor:
        """Map tokens [T] to activations [T, dim]; the pools are one per layer, written."""
        x = self.token_embd(tokens)
        for block, k_pool, v_pool in zip(self.blk, k_pools, v_pools, strict=True):
            x = block(x, bind(k_pool, v_pool))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Map activations [B, dim] to logits [B, V]."""
        return F.linear(self.output_norm(x), self.output_weight)


class PrefillAttention(nn.Module):
    """Attention of whole prompts, which appends their keys and values."""

    def __init__(self, config: Config, page_size: int) -> None:
        super().__init__()
        self.attention = GQAPrefillPagedWithKVCacheFwdOp(
            page_size,
            max_seqlen_q=config.context,
            fuse_rope=True,
            rope_base=config.rope_base,
            max_position=config.context,
        )

    def bind(self, cu_seqlens_q: Tensor, cache_seqlens: Tensor, block_table: Tensor) -> Bind:
        """Take cu_seqlens_q [B + 1], cache_seqlens [B] (before the append), block_table [B, W].

        All int32. The pools are [N, G, D] bfloat16.
        """
        # The operator takes scales for every pool and ignores them for 16-bit ones.
        unit = torch.ones(1, dtype=torch.float32, device=block_table.device)

        def bind(k_pool: Tensor, v_pool: Tensor) -> Attend:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
                return self.attention(
                    q, k, v, k_pool, v_pool, unit, unit, cu_seqlens_q, cache_seqlens, block_table
                )

            return attend

        return bind


class DecodeAttention(nn.Module):
    """Attention of one new token per request: write it to its page, then read the pages."""

    def __init__(self, config: Config, page_size: int) -> None:
        super().__init__()
        self.config = config
        self.page_size = page_size
        self.write = PagedKVCacheWriteFwdOp()
        self.attention = GQAPagedFwdOp(pos_encoding_mode="none")

    def bind(self, cache_seqlens: Tensor, block_table: Tensor) -> Bind:
        """Take cache_seqlens [B] (before the append) and block_table [B, W], both int32.

        The pools are [NP, PS, G, D] bfloat16.
        """
        position = cache_seqlens.long()
        page = block_table.gather(1, (position // self.page_size).unsqueeze(1)).squeeze(1)
        slots = page.long() * self.page_size + position % self.page_size
        batch = torch.arange(
            cache_seqlens.shape[0] + 1, dtype=torch.int32, device=block_table.device
        )
        seqlens = cache_seqlens + 1
        cos, sin = rotary_rows(position, self.config)

        def bind(k_pool: Tensor, v_pool: Tensor) -> Attend:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k = rotate(q, cos, sin).bfloat16(), rotate(k, cos, sin).bfloat16()
                self.write(k, v.bfloat16(), k_pool, v_pool, slots)
                return self.attention(q, k_pool, v_pool, block_table, seqlens, batch)

            return attend

        return bind


class PrefillStep(nn.Module):
    """Run whole prompts; arguments as for `PrefillAttention.bind`."""

    def __init__(self, model: Llama, page_size: int) -> None:
        super().__init__()
        self.model = model
        self.attention = PrefillAttention(model.config, page_size)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens_q: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        k_pools: list[Tensor],
        v_pools: list[Tensor],
    ) -> Tensor:
        """Map tokens [T] int64 to the logits [B, V] after each request's last one."""
        bind = self.attention.bind(cu_seqlens_q, cache_seqlens, block_table)
        x = self.model.activations(tokens, bind, k_pools, v_pools)
        return self.model.logits(last_rows(x, cu_seqlens_q))


class DecodeStep(nn.Module):
    """Run one new token of every request; arguments as for `DecodeAttention.bind`."""

    def __init__(self, model: Llama, page_size: int) -> None:
        super().__init__()
        self.model = model
        self.attention = DecodeAttention(model.config, page_size)

    def forward(
        self,
        tokens: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        k_pools: list[Tensor],
        v_pools: list[Tensor],
    ) -> Tensor:
        """Map tokens [B] int64 to the logits [B, V] after each."""
        bind = self.attention.bind(cache_seqlens, block_table)
        return self.model.logits(self.model.activations(tokens, bind, k_pools, v_pools))


def last_rows(x: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Pick each request's last row [B, dim] of packed rows [T, dim]."""
    return x.index_select(0, cu_seqlens_q[1:] - 1)


def rotary_rows(position: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, 1, D / 2] float32 of float64 angles, as the prefill operator has."""
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=position.device)
    angle = position.double().unsqueeze(1) * config.rope_base ** (-pair / config.head_dim)
    return angle.cos().float().unsqueeze(1), angle.sin().float().unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, D] in neox layout."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def build_model(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> Llama:
    """Return the network on `device`; on the CPU it shares the checkpoint's weights."""
    with torch.device("meta"):
        model = Llama(checkpoint.config, tied="output.weight" not in checkpoint.weights)
    model.load_state_dict(checkpoint.weights, assign=True)
    return model.to(device).eval().requires_grad_(False)
