"""RULER: all thirteen tasks at any length, its needles also alone, or samples made elsewhere."""

from kvbench.tasks.ruler.task import Niah, Ruler

__all__ = ["Niah", "Ruler"]
