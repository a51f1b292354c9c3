"""Kernels of the paged KV cache write."""
