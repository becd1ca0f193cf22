"""Full KV: everything is kept and attended. The yardstick of every other method."""

from __future__ import annotations

from kvbench.method import Method, Needs


class Full(Method):
    """Attend everything, in place; the budget sets nothing."""

    needs = Needs(crops=True)

    @property
    def at_rest(self) -> bool:
        """Nothing is ever chosen."""
        return True

    def rule(self, layer: int, length: int, generated: int) -> int | None:
        """No limit."""
        return None
