"""Kernels of the lightning indexer."""
