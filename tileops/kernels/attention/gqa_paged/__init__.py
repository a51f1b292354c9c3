"""Kernels of grouped-query attention over a paged KV cache."""
