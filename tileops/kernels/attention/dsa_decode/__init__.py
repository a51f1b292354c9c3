"""Kernels of attention over indexed cache rows."""
