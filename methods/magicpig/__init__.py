"""MagicPIG (Chen et al. 2024): tokens sampled by hash tables, and weighted by how likely each was
to be.
"""

from methods.magicpig.method import MagicPIG

__all__ = ["MagicPIG"]
