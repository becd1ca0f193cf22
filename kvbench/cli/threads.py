"""How long torch's threads wait for one another with their eyes open.

No torch: OpenMP reads it as torch is loaded.

GNU's OpenMP lets a thread spin for some milliseconds before it sleeps. On an idle machine that
starts the next parallel region at once; beside other work it burns the very cores that are waited
for, and a token of a small model takes fifty times as long. A tenth of that time keeps most of the
first and loses most of the second (`docs/guide/sweeps.md`).
"""

from __future__ import annotations

import os

SPINS = 30_000  # GNU's own: 300,000
SET_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def wait_briefly() -> None:
    """Let threads of this process and of those it starts spin briefly, unless the environment says
    what they shall.
    """
    if not any(name in os.environ for name in SET_BY_USER):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
