"""Kernels of dense GQA."""
