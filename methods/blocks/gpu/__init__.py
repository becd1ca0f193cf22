"""Triton kernels of the blocks' operators, imported where a GPU needs them."""
