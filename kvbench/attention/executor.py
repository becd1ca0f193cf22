"""Executors of a Selection: from (query, store, selection) to the attention output.

`reference` is the oracle, fp32 and slow; `torch` gathers and calls scaled_dot_product_attention;
`cpu` reads tokens where they lie in kernels of its own, and `flashinfer` does on a GPU. All agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvbench.attention import cpu, flashinfer, reference
from kvbench.attention import torch as torch_executor
from kvbench.config import ConfigError
from kvbench.memory.kinds import KV, NATIVE
from kvbench.memory.store import LayerStore
from kvbench.method import Selection, Shape

if TYPE_CHECKING:  # at run time the name `torch` is this package's executor
    from torch import Tensor

EXECUTORS = ("reference", "torch", "cpu")  # that run without a GPU; "flashinfer" needs one


class Executor(Protocol):
    """Attention of one generation, with the soft cap of its shape.

    Attributes
    ----------
    name
        "reference", "torch", "cpu" or "flashinfer".
    note
        why "auto" did not take a quicker one, or None.
    in_place
        tokens of the host tier are attended where they lie.
    """

    name: str
    note: str | None
    in_place: bool

    def __call__(
        self,
        query: Tensor,
        store: LayerStore,
        selection: Selection | None,
        scaling: float,
        probabilities: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """One decode step's attention in one layer.

        Parameters
        ----------
        query
            [B, Hq, 1, D].
        store
            the layer's keys and values.
        selection
            what to attend; None = everything resident, in place.
        scaling
            factor on the logits.
        probabilities
            also return the attention probabilities.

        Returns
        -------
        tuple[Tensor, Tensor | None]
            Output [B, Hq, 1, D of values] in the query's dtype, and probabilities [B, Hq, M (+ E)]
            or None.
        """

    def prefill(
        self,
        query: Tensor,
        store: LayerStore,
        column: int,
        offsets: Sequence[int],
        scaling: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Dense causal attention of a prefill chunk; see `kvbench.attention.torch.prefill`."""

    def used(self) -> str:
        """The executors that computed the decode steps so far, for the report."""


class Plain:
    """An executor without state: see `Executor`."""

    def __init__(
        self,
        name: str,
        attend: Callable[..., tuple[Tensor, Tensor | None]],
        shape: Shape,
        note: str | None = None,
        in_place: bool = False,
    ) -> None:
        self.name, self.note = name, note
        self.in_place = in_place
        self._attend, self._softcap = attend, shape.softcap

    def __call__(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """One decode step's attention in one layer; see `Executor`."""
        return self._attend(*arguments, **options, softcap=self._softcap)

    def prefill(self, *arguments: Any) -> Tensor:
        """See `kvbench.attention.torch.prefill`."""
        return torch_executor.prefill(*arguments, softcap=self._softcap)

    def used(self) -> str:
        """Its name."""
        return self.name


def executor(name: str, shape: Shape, kv: KV = NATIVE) -> Executor:
    """The executor called `name` for a generation of this shape, or for "auto" the best one that
    can run it.

    Parameters
    ----------
    kv
        how keys and values are held; `flashinfer` reads none in fewer bits.

    Raises
    ------
    ConfigError
        there is no such executor, or the one asked for cannot run here.
    """
    if name == "reference":
        return Plain(name, reference.attend, shape)
    if name == "torch":
        return Plain(name, torch_executor.attend, shape)
    if name == "cpu" or (name == "auto" and shape.device.type == "cpu"):
        reason = cpu.unfit(shape, kv)
        if reason is None:
            return Plain("cpu", cpu.attend, shape, in_place=True)
        if name == "cpu":
            raise ConfigError(f"attention=cpu: {reason}; attention=auto takes what runs")
        return Plain("torch", torch_executor.attend, shape, note=f"cpu: {reason}")
    if name not in ("auto", "flashinfer"):
        raise ConfigError(
            f"attention={name}: no such executor; one of auto, {', '.join(EXECUTORS)}, flashinfer"
        )
    reason = f"reads no keys and values held as kv={kv}" if kv.coded else flashinfer.unfit(shape)
    if reason is None:
        return flashinfer.FlashInfer(shape)
    if name == "flashinfer":
        raise ConfigError(f"attention=flashinfer: {reason}; attention=auto takes what runs")
    return Plain("torch", torch_executor.attend, shape, note=f"flashinfer: {reason}")
