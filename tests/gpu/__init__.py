"""Tests on CUDA tensors: `pytest -m gpu tests/gpu -n 8 --dist loadgroup`."""
