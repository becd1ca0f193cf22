"""The options of RACC: what is compressed and when, what is retrieved and when, and by
which index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from methods.blocks.topk import Granularity
from methods.blocks.votes import Pooling

Scenario = Literal["auto", "liso", "silo", "lilo"]


@dataclass(frozen=True)
class RACCOptions:
    """What a user may set (sections 4.1 to 4.3; where the published code differs from the paper,
    both are there).
    """

    # the prompt
    scenario: Scenario = "auto"  # what is compressed, see `scenario`
    # of the prompt; none leaves it whole
    compressor: Literal["snapkv", "pyramidkv", "none"] = "snapkv"
    capacity: int = 6000  # prompt tokens it keeps without a budget
    prompt_window: int = 128  # its observation window; this one, kernel and pooling: see `SnapKV`
    kernel: int = 5
    pooling: Pooling = "mean"
    # query_head: each query head votes for a cache of its own (as published), and the union is
    # held; a search is the group's in either way
    granularity: Granularity = "kv_head"
    search_prompt: bool = True  # evicted prompt tokens may be found again

    # generated tokens
    every: int = 400  # n, tokens from one compression to the next
    window: int = 40  # w, the last of these, whose queries vote
    alpha: float = 0.6  # share of L2 that stays; a budget sets it
    # softmax over L2, softmax over all that is resident, or the raw logits (equations 5 and 6)
    vote: Literal["softmax_l2", "softmax_all", "raw"] = "softmax_l2"
    vote_kernel: int = 5  # width of the votes' mean pooling, odd
    # its neighbours: by position, or as the published cache has them
    vote_order: Literal["token", "cache"] = "token"
    # the token before each chosen one stays, as in the published code (see `Voting.best`)
    shifted: bool = False

    # retrieval
    beta: float = 0.01  # share of all tokens that is retrieved
    # step: every step asks, and what was found is attended until the next answer; compress: each
    # cycle asks once, and what was found returns to the cache at the next compression (in liso,
    # which has none: is attended for the n tokens that follow)
    link: Literal["compress", "step"] = "compress"
    lag: int = 200  # steps between a request and the use of its answer
    mode: Literal["deterministic", "free"] = "deterministic"  # see `retrieval`
    # of normalised keys and queries, or the largest inner product
    metric: Literal["cosine", "ip"] = "cosine"
    # every key is compared; coded keys in lists; a graph
    index: Literal["flat", "ivfpq", "hnsw"] = "flat"
    subspaces: int = 8  # of ivfpq: bytes of a code

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}: expected a share in (0, 1]")
        if self.every <= self.window:
            raise ValueError(
                f"every={self.every}: expected more tokens than the observation window has,"
                f" window={self.window}"
            )
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta={self.beta}: expected a share in [0, 1]")
        if self.link == "compress" and self.lag >= self.every:
            raise ValueError(
                f"lag={self.lag}: expected fewer steps than lie between two compressions,"
                f" every={self.every}"
            )

    def votes(self, step: int) -> bool:
        """The query of decode step 1, 2, ... is one of the window's."""
        return (step - 1) % self.every >= self.every - self.window

    def compresses(self, step: int) -> bool:
        """After this decode step generated tokens are compressed."""
        return step % self.every == 0

    def asks(self, step: int) -> bool:
        """A search begins in this decode step."""
        return self.link == "step" or (step + self.lag) % self.every == 0
