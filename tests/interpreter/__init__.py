"""Tests of the Triton kernels on CPU tensors: `TRITON_INTERPRET=1 pytest tests/interpreter`.

The variable decides what `triton.jit` makes of a kernel, so it holds for a whole process: a run
without it does not collect this folder, a run with it collects nothing else.
"""
