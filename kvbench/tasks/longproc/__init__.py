"""LongProc: long outputs that follow a procedure.

`task` loads and asks, `scores` and `countdown` score, `cpp` runs.
"""

from kvbench.tasks.longproc.task import LongProc

__all__ = ["LongProc"]
