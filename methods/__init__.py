"""KV-cache methods, one file or folder each.

They know `kvbench.method`, `kvbench.budget`, `kvbench.kernels` and `methods.blocks`, and one that
builds on another knows that one.
"""
