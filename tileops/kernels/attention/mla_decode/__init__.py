"""Kernels of latent decode."""
