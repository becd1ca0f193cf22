"""Twilight (Lin et al. 2025): a selector's tokens, pruned to those that hold a share p of the
attention.
"""

from methods.twilight.method import Twilight

__all__ = ["Twilight"]
