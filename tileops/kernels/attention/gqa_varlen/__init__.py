"""Kernels of packed variable-length GQA."""
