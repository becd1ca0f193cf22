"""RACC: compression of the cache, and asynchronous retrieval of what was evicted."""

from methods.racc.method import RACC

__all__ = ["RACC"]
