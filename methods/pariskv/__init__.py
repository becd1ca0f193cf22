"""ParisKV: collision voting and 4-bit reranking on the unit sphere (ICML 2026)."""

from methods.pariskv.method import ParisKV

__all__ = ["ParisKV"]
