"""kvbench: KV-cache methods compared on the same model, prompt, kernel and budget.

Every byte and millisecond is counted. Importing this package costs nothing: torch and transformers
load when a name below is first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["KVCache", "__version__"]

if TYPE_CHECKING:
    from kvbench.backends.hf.cache import KVCache


def __getattr__(name: str) -> Any:
    if name == "KVCache":
        from kvbench.backends.hf.cache import KVCache

        return KVCache
    raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
