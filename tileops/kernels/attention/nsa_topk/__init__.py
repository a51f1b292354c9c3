"""Kernels of native sparse attention's block selection."""
