"""LycheeCluster: structure-aware chunks under a hierarchical index with bounds."""

from methods.lychee.method import LycheeCluster

__all__ = ["LycheeCluster"]
