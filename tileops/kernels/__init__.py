"""Kernels: how the operators run."""
