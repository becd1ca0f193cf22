"""LycheeCluster (2026): structure-aware chunks in a hierarchical index with upper bounds; its pilot
study's Quest.
"""

from methods.lychee.method import LycheeCluster
from methods.lychee.quest import StructureQuest

__all__ = ["LycheeCluster", "StructureQuest"]
