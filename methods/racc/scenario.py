"""What is compressed, and what a budget sets then (RACC, section 4.3 and appendix A).

"liso" (long input, short output) compresses the prompt once, "silo" the generated tokens after
every n of them, "lilo" both. In liso the budget is the prompt compressor's; in silo and lilo it is
the share of the tokens that stays on the device, from which alpha follows by the paper's formula
(4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvbench.budget import Budget
from methods.racc.ratio import alpha_for
from methods.racc.settings import RACCOptions, Scenario


def settled(
    requested: Scenario, budget: Budget, lengths: Sequence[int], new_tokens: int | None
) -> Scenario:
    """What "auto" comes to: liso where the answer is shorter than every prompt, or where the budget
    counts tokens.

    Elsewhere silo.

    Parameters
    ----------
    lengths
        tokens of each prompt.
    new_tokens
        tokens of the answer, None: unknown.
    """
    if requested != "auto":
        return requested
    counts_tokens = isinstance(budget.size, int) or budget.counts_generated
    short = new_tokens is None or new_tokens < min(lengths)
    return "liso" if counts_tokens or short else "silo"


def refuse_budget(scenario: Scenario, budget: Budget, new_tokens: int | None) -> None:
    """Refuse a budget that silo and lilo have no rule for.

    Raises
    ------
    ValueError
        generated tokens count, the budget is in tokens, or the length of the answer is not known.
    """
    if budget.counts_generated:
        key = "accounting=unified" if budget.unified else "generated=counted"
        raise ValueError(
            f"protocol.{key}: scenario={scenario} has no rule for it; scenario=liso has"
        )
    if isinstance(budget.size, int):
        raise ValueError(
            f"budget={budget.size}: in scenario={scenario} a budget is the share of the tokens that"
            " stays (0.15), or null: alpha and n alone; scenario=liso takes tokens"
        )
    if budget.size is not None and new_tokens is None:
        raise ValueError(
            f"budget={budget.size}: alpha follows from the length of the answer, which is not known"
            " here; use budget=null"
        )


def with_share(options: RACCOptions, share: float, new_tokens: int) -> RACCOptions:
    """The options whose alpha keeps so large a share of all tokens, those retrieved (beta) among
    them.

    Raises
    ------
    ValueError
        the retrieved tokens alone are more.
    """
    compressions = max(1, new_tokens // options.every)
    try:
        return replace(options, alpha=alpha_for(share, compressions, options.beta))
    except ValueError as error:
        raise ValueError(f"budget={share}: {error}") from error


def of_compressor(budget: Budget, beta: float) -> Budget:
    """The prompt compressor's part of a budget: where generated tokens count, an eighth is for
    retrieved ones.
    """
    size = budget.size
    if budget.counts_generated and beta and size is not None:
        size = 7 * size // 8 if isinstance(size, int) else 7 * size / 8
    return Budget(size, budget.accounting, budget.generated)
