"""How far next-token distributions are from full attention's, over the tokens of a text: numbers by
the definitions of llama.cpp's `perplexity --kl-divergence`, from what a run stores of each step.
Numpy alone.

Every error here is a standard error over tokens as if they were independent, as llama.cpp's are.
Tokens of one text are not, so that it is too small; `kl_stderr` and the intervals of reports are
over texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvbench.runs.quantities import OF_DELTA_P, OF_KL, OF_QUARTERS

FEW = 10  # tokens: an error over as few is none, as in llama.cpp, nor is a quarter of as few


@np.errstate(all="ignore")  # what is not finite is absent
def statistics(texts: Sequence[Mapping[str, Sequence[float]]], same: int) -> dict[str, float]:
    """Every number of `fidelity` in a summary that needs each token, by name; what is not defined
    of these is absent.

    Parameters
    ----------
    texts
        of each the "kl" by step, KL(full attention || method) over the whole vocabulary in nats,
        and "nll" and "nll_full", the negative log-likelihood of its next token under the method and
        under full attention.
    same
        tokens of all texts at which both have the same top token.
    """
    steps = {
        name: np.concatenate([text[name] for text in texts]) for name in ("kl", "nll", "nll_full")
    }
    kl = steps["kl"]
    nll, nll_full = steps["nll"], steps["nll_full"]
    n, delta_p = len(kl), np.exp(-nll) - np.exp(-nll_full)
    ln_ratio = nll - nll_full
    perplexity, perplexity_full = np.exp(nll.mean()), np.exp(nll_full.mean())
    ratio = np.exp(ln_ratio.mean())
    rms, share = np.sqrt((delta_p**2).mean()), same / n
    numbers = {
        "tokens": n,
        "kl_max": kl.max(),
        "perplexity": perplexity,
        "perplexity_full": perplexity_full,
        "ln_perplexity_ratio": ln_ratio.mean(),
        "perplexity_ratio": ratio,
        "delta_p_mean": delta_p.mean(),
        "delta_p_rms": rms,
        "same_top": share,
        **quarters([text["kl"] for text in texts]),
        **percentiles(kl, OF_KL),
        **percentiles(delta_p, OF_DELTA_P),
    }
    if n > FEW:
        numbers |= {
            "kl_mean_error": error(kl),
            "perplexity_error": perplexity * error(nll),
            "perplexity_full_error": perplexity_full * error(nll_full),
            "ln_perplexity_ratio_error": error(ln_ratio),
            "perplexity_ratio_error": ratio * error(ln_ratio),
            "delta_p_mean_error": error(delta_p),
            "same_top_error": math.sqrt(share * (1 - share) / (n - 1)),
        }
        if rms > 0:
            numbers["delta_p_rms_error"] = error(delta_p**2) / (2 * rms)
        if nll.std() > 0 and nll_full.std() > 0:
            numbers["nll_correlation"] = np.corrcoef(nll, nll_full)[0, 1]
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def error(values: np.ndarray) -> float:
    """The standard error of the mean of n values, over n - 1."""
    return float(values.std() / math.sqrt(len(values) - 1))


def percentiles(values: np.ndarray, percents: Mapping[str, float]) -> dict[str, float]:
    """The wanted percentiles by name, linear between neighbours; none beyond which fewer than one
    value lies.
    """
    there = {
        name: p for name, p in percents.items() if round(len(values) * min(p, 100 - p), 6) >= 100
    }
    return dict(zip(there, np.percentile(values, [*there.values()]), strict=True)) if there else {}


def quarters(kl: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean KL divergence of the first to the last quarter of each text's steps."""
    if min(map(len, kl)) <= 4 * FEW:
        return {}
    parts = zip(*(np.array_split(text, 4) for text in kl), strict=True)
    return {
        name: np.concatenate(part).mean() for name, part in zip(OF_QUARTERS, parts, strict=True)
    }
