"""Kernels of multi-head decode over a paged KV cache."""
