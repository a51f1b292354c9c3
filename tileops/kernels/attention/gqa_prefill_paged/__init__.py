"""Kernels of the paged prefill that appends to its cache."""
