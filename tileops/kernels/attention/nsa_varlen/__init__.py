"""Kernels of native sparse attention over selected blocks."""
