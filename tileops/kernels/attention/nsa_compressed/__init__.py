"""Kernels of native sparse attention over compressed chunks."""
