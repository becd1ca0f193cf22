"""The budget C: what it may be, what it is in tokens, and the smallest that a method can keep to. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvbench.config import ConfigError, show

Accounting = Literal["paper", "unified"]


@dataclass(frozen=True)
class Budget:
    """The budget C of a run and the way of counting.

    Attributes:
        size: tokens (int >= 1), a fraction of the prompt (float in (0, 1]), or None: the preset's own sizes.
        accounting: "paper", the published rule; "unified", everything attended counts inside C.
        generated: "free", generated tokens stay outside C where the published rule leaves them; "counted", never.
        minimum: smallest C, in tokens, with which the method keeps its rule.
    """

    size: int | float | None
    accounting: Accounting = "paper"
    generated: Literal["free", "counted"] = "free"
    minimum: int = 1

    @property
    def unified(self) -> bool:
        return self.accounting == "unified"

    @property
    def counts_generated(self) -> bool:
        """Generated tokens must stay inside C."""
        return self.unified or self.generated == "counted"

    def tokens(self, length: int) -> int:
        """C in tokens for a prompt of `length` tokens; a fraction rounds up.

        Raises:
            ValueError: the size is None, so only the method knows its sizes.
        """
        if self.size is None:
            raise ValueError("budget=null leaves the sizes to the method, and this method has none of its own")
        if isinstance(self.size, float):
            # 0.1 * 30 is 3.0000000000000004 in binary: rounding first keeps "a tenth of 30" at 3.
            return max(1, math.ceil(round(self.size * length, 9)))
        return self.size


def check_budget(
    budget: Any, method: str, minimum: Mapping[str, int | None] | None, accounting: str, preset: int | None = None
) -> None:
    """Refuse a budget that is none, or that a method cannot keep to.

    Args:
        budget: tokens (int), a fraction of the prompt (float), or None: the preset.
        method: its name, for the message.
        minimum: smallest budget in tokens for each accounting, null for any; None: nothing is known of it.
        accounting: the accounting in force.
        preset: the method's own size in tokens, None where it has several.

    Raises:
        ConfigError: not a number, out of range, below the minimum, or an accounting that the method has no rule for.
    """
    right = "tokens (256), a fraction of the prompt in (0, 1] (0.1), or null for the method's preset"
    if isinstance(budget, bool) or not isinstance(budget, (int, float, type(None))):
        raise ConfigError(f"budget={show(budget)}: not a number; expected {right}")
    if isinstance(budget, float) and not 0 < budget <= 1 or isinstance(budget, int) and budget < 1:
        raise ConfigError(f"budget={budget}: out of range; expected {right}")
    if minimum is None:
        return
    if accounting not in minimum:
        raise ConfigError(
            f"protocol.accounting={accounting}: {method} has no rule for it; expected {' | '.join(minimum)}"
        )
    least, tokens = minimum[accounting], preset if budget is None else budget
    if least is not None and isinstance(tokens, int) and tokens < least:
        where = f"budget=null: the preset, {tokens} tokens, is" if budget is None else f"budget={budget}:"
        raise ConfigError(f"{where} below the minimum of {method}, {least} tokens (protocol.accounting={accounting})")
