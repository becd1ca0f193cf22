"""KV-cache methods, one file or folder each. They know `kvbench.method`, `kvbench.budget`, `kvbench.kernels` and
`methods.blocks`, and one that builds on another knows that one.
"""

from pathlib import Path

from kvbench import kernels
from kvbench.kernels.cache import forget_old_kernels

forget_old_kernels(Path(__file__).parent, Path(kernels.__file__).parent)
