"""IceCache: semantic pages found by a DCI tree (ICLR 2026)."""

from methods.icecache.method import IceCache

__all__ = ["IceCache"]
