"""The budget C: what it may be, what it is in tokens, and the smallest that a method can keep to.

No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvbench.config import ConfigError, MethodConfig, show

Accounting = Literal["paper", "unified"]


@dataclass(frozen=True)
class Budget:
    """The budget C of a run and the way of counting.

    Attributes
    ----------
    size
        tokens (int >= 1), a fraction of the prompt (float in (0, 1]), or None: the preset's own
        sizes.
    accounting
        "paper", the published rule; "unified", everything attended counts inside C.
    generated
        "free", generated tokens stay outside C where the published rule leaves them; "counted",
        never.
    minimum
        smallest C, in tokens, with which the method keeps its rule.
    method
        whose budget it is, for messages.
    """

    size: int | float | None
    accounting: Accounting = "paper"
    generated: Literal["free", "counted"] = "free"
    minimum: int = 1
    method: str = "the method"

    @classmethod
    def of(
        cls,
        requested: Any,
        method: MethodConfig,
        accounting: Accounting = "paper",
        generated: Literal["free", "counted"] = "free",
    ) -> Budget:
        """The budget of a run of `method`: what was asked for, or the method's preset.

        Parameters
        ----------
        requested
            tokens (int), a fraction of the prompt (float), or None: the preset.
        method
            its minimum counts, no less than that for "unified" where generated tokens count; and
            its preset.
        accounting, generated
            see the attributes.

        Raises
        ------
        ConfigError
            not a number, out of range, below the minimum, or an accounting without a rule.
        """
        right = (
            "tokens (256), a fraction of the prompt in (0, 1] (0.1), or null for the method's"
            " preset"
        )
        if isinstance(requested, bool) or not isinstance(requested, (int, float, type(None))):
            raise ConfigError(f"budget={show(requested)}: not a number; expected {right}")
        if (
            isinstance(requested, float)
            and not 0 < requested <= 1
            or isinstance(requested, int)
            and requested < 1
        ):
            raise ConfigError(f"budget={requested}: out of range; expected {right}")
        name = method.name or "the method"
        minimum = method.minimum
        if minimum is not None and accounting not in minimum:
            raise ConfigError(
                f"protocol.accounting={accounting}: {name} has no rule for it; expected"
                f" {' | '.join(minimum)}"
            )
        if requested is None:
            _check_preset(name, method.preset)
        size = method.preset if requested is None else requested
        budget = cls(size, accounting, generated, method=name).of_method(minimum or {})
        if isinstance(budget.size, int) and budget.size < budget.minimum:
            preset = f"null: the preset, {budget.size} tokens, is"
            raise ConfigError(
                f"budget={preset if requested is None else f'{requested}:'} {budget._below_minimum}"
            )
        return budget

    def of_method(self, minimum: Mapping[str, int | None]) -> Budget:
        """No less than a method's own `minimum`, which its YAML has by accounting."""
        rules = (self.accounting, "unified") if self.generated == "counted" else (self.accounting,)
        return replace(self, minimum=max(self.minimum, *(minimum.get(rule) or 1 for rule in rules)))

    @property
    def unified(self) -> bool:
        """Everything attended counts inside C."""
        return self.accounting == "unified"

    @property
    def counts_generated(self) -> bool:
        """Generated tokens must stay inside C."""
        return self.unified or self.generated == "counted"

    def tokens(self, length: int) -> int:
        """C in tokens for a prompt of `length` tokens; a fraction rounds up, and is no less than
        the minimum.

        Raises
        ------
        ValueError
            the size is None, so only the method knows its sizes.
        """
        if self.size is None:
            raise ValueError(
                "budget=null leaves the sizes to the method, and this method has none of its own"
            )
        return max(self.minimum, self._share(length)) if isinstance(self.size, float) else self.size

    def _share(self, length: int) -> int:
        """What a fraction is of a prompt, in tokens."""
        assert self.size is not None
        # 0.1 * 30 is 3.0000000000000004 in binary: rounding first keeps "a tenth of 30" at 3.
        return math.ceil(round(self.size * length, 9))

    def check_prompt(self, length: int) -> None:
        """Refuse what leaves a prompt of `length` tokens fewer than the method can keep to.

        Raises
        ------
        ConfigError
            tokens below the minimum; or a fraction that makes so few, and not the whole prompt.
        """
        if isinstance(self.size, int) and self.size < self.minimum:
            raise ConfigError(f"budget={self.size}: {self._below_minimum}")
        if isinstance(self.size, float) and self._share(length) < min(self.minimum, length):
            share = f"{self._share(length)} of a prompt's {length} tokens"
            raise ConfigError(f"budget={self.size}: {share}, {self._below_minimum}")

    @property
    def _below_minimum(self) -> str:
        counted = ", protocol.generated=counted" if self.generated == "counted" else ""
        rule = f"protocol.accounting={self.accounting}{counted}"
        return f"below the minimum of {self.method}, {self.minimum} tokens ({rule})"


def _check_preset(name: str, preset: Any) -> None:
    """Whether a method's preset is a budget, or None.

    Raises
    ------
    ConfigError
        it is not.
    """
    fits = type(preset) is int and preset >= 1 or type(preset) is float and 0 < preset <= 1
    if preset is not None and not fits:
        right = "tokens (256), a fraction of the prompt in (0, 1], or null"
        raise ConfigError(f"method.preset={show(preset)}: of {name}; expected {right}")
