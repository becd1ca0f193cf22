"""A method beside full attention on given tokens: KL divergence, agreement and perplexity, step by
step.

Both begin from the same prefill and read the same tokens, so every step compares two distributions
of one next token. The first new token is the dense prefill's and is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Comparison:
    """Compares a generation, step by step, with full attention's log-probabilities; `watch` of
    a `GenerationRequest`.

    Parameters
    ----------
    reference
        [vocabulary] fp32 each, of full attention after each given token, there before it is
        compared with.
    targets
        [T], the token that came next in the text.
    """

    def __init__(self, reference: Sequence[torch.Tensor], targets: Sequence[int]) -> None:
        self._reference, self._targets = reference, targets
        self.steps: dict[str, list[float]] = {"kl": [], "nll": [], "nll_full": []}
        self.tokens: list[int] = []  # that the method would have chosen

    def __call__(self, logits: torch.Tensor) -> None:
        """Compare the next step's logits [1, vocabulary].

        Raises
        ------
        FloatingPointError
            full attention's were none, so it went no further.
        """
        step = len(self.tokens)
        if step >= len(self._reference):
            raise FloatingPointError("full attention's logits are NaN or infinite")
        full, ours = self._reference[step], logits[0].float().log_softmax(dim=-1)
        self.steps["kl"].append(max(0.0, float(torch.sum(full.exp() * (full - ours)))))
        self.steps["nll"].append(-float(ours[self._targets[step]]))
        self.steps["nll_full"].append(-float(full[self._targets[step]]))
        self.tokens.append(int(ours.argmax()))

    def record(self) -> dict[str, Any]:
        """The sample's own part: answers and output as token numbers, and `fidelity` with its
        values at each step.

        Of `fidelity`: kl_mean in nats, KL(full attention || method); nll and nll_full, the mean
        negative log-likelihood of the text's tokens; "steps", the same by step, from which a
        summary has all else.
        """
        top = [int(logits.argmax()) for logits in self._reference]
        return {
            "answers": [" ".join(map(str, top))],
            "output": " ".join(map(str, self.tokens)),
            "fidelity": {
                "kl_mean": sum(self.steps["kl"]) / len(self.tokens),
                "nll": sum(self.steps["nll"]) / len(self.tokens),
                "nll_full": sum(self.steps["nll_full"]) / len(self.tokens),
                "steps": {
                    name: [round(value, 6) for value in values]
                    for name, values in self.steps.items()
                },
            },
        }
