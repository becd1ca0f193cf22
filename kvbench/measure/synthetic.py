"""Keys and queries with the structure of trained models', for models whose random weights give
none.

An index finds what is alike, and random weights make keys that are all equally unlike: pages,
clusters and trees then work without finding anything. Here the keys of each KV head are made
instead, with what real ones show:

- anisotropy: the variances of the coordinates fall as j^-0.8, around a mean as long as the
  deviations;
- topics: a key lies near the centre of one of `TOPICS`. Runs of `RUN` tokens have a topic that the
  share `FOLLOWS` of their tokens keeps to, and each comes back all over the sequence;
- drift: a centre turns slowly with the position, so that tokens of one topic are the less alike the
  farther apart;
- sinks: the first tokens lie where every query points a little;
- queries point to two earlier positions: one that the heads of a group share for `GROUP_HOLDS`
  steps, and one of their own for `HEAD_HOLDS`.

Everything follows from (seed, layer, row, head, position): the same in any batch and for any
chunks. Topics and what is pointed at belong to the text and are the same in all layers; the noise
differs between CPU and GPU.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import one_hot

from kvbench.engine.engine import Engine
from kvbench.method import Shape

TOPICS, RUN = 64, 64
FOLLOWS = 0.9
DRIFT = 32768  # positions in which a centre turns once around
SINKS, SINK_LOGIT = 4, 9.0  # the logit that a query adds there
GROUP_HOLDS, HEAD_HOLDS = 16, 2
NEAR = 0.8  # share of a key's variance that is its topic's centre
GAIN = 6.0  # the logit that a query adds at either of the centres it points to
STRETCH = 0.2  # deviation of the logarithm of a key's length (lognormal)
BLOCK = 1024  # positions whose noise is drawn at once
PART = 32 * BLOCK  # positions that are made at once, in fp32
# the span in which those of a prompt are made, which is no time of a method or model
SYNTHETIC_SPAN = "synthetic"


class SyntheticAttention:
    """The keys, values and queries of one generation; they have the dtype of its shape and lie on
    its device.

    Parameters
    ----------
    shape
        of the generation.
    seed
        what everything derives from.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed = shape, seed
        self._layers = [_Heads(shape, _seed(seed, layer)) for layer in range(shape.layers)]

    def keys(self, layer: int, start: int, stop: int, row: int) -> torch.Tensor:
        """[Hkv, n, D] of the positions start .. stop - 1 of a row."""
        heads = self._layers[layer]
        position = torch.arange(start, stop, device=self.shape.device)
        noise = self._noise(layer, row, "key", start, stop, self.shape.head_dim + 1)
        variation = math.sqrt(NEAR) * heads.centres(
            heads.every, self._topics(row, position), position
        )
        variation += math.sqrt(1 - NEAR) * heads.deviation * noise[..., 1:]
        keys = heads.mean + (STRETCH * noise[..., :1]).exp() * variation
        keys[:, : max(0, SINKS - start)] = heads.sink
        return (math.sqrt(self.shape.head_dim) * keys).to(self.shape.dtype)

    def queries(self, layer: int, start: int, stop: int, row: int) -> torch.Tensor:
        """[Hq, n, D] of the positions start .. stop - 1 of a row."""
        heads = self._layers[layer]
        position = torch.arange(start, stop, device=self.shape.device)
        asking = torch.arange(self.shape.query_heads, device=self.shape.device)[:, None]
        group = asking // self.shape.group
        query = SINK_LOGIT * heads.sink[group[:, 0]].expand(-1, stop - start, -1)
        for who, index, holds in (("group", group, GROUP_HOLDS), ("head", asking, HEAD_HOLDS)):
            since = position // holds * holds
            # [Hq, n], an earlier position
            target = (since * _chance(self.seed, row, who, index, since)).long()
            query = query + GAIN * heads.centres(group, self._topics(row, target), target)
        return (query / (math.sqrt(self.shape.head_dim) * self.shape.scaling)).to(self.shape.dtype)

    def values(self, layer: int, start: int, stop: int, row: int) -> torch.Tensor:
        """[Hkv, n, D] of the positions start .. stop - 1 of a row, without structure; of latent
        attention a part of the keys.
        """
        if self.shape.latent_dim:
            return self.keys(layer, start, stop, row)[..., : self.shape.latent_dim]
        return self._noise(layer, row, "value", start, stop, self.shape.head_dim).to(
            self.shape.dtype
        )

    def _topics(self, row: int, position: torch.Tensor) -> torch.Tensor:
        """The topic at each position, of any shape: its run's, or one of the token's own."""
        follows = _chance(self.seed, row, "follows", position) < FOLLOWS
        run = _chance(self.seed, row, "run", position // RUN)
        token_topic = _chance(self.seed, row, "own", position)
        return (TOPICS * torch.where(follows, run, token_topic)).long()

    def _noise(
        self, layer: int, row: int, kind: str, start: int, stop: int, width: int
    ) -> torch.Tensor:
        """[Hkv, n, width] standard normal numbers; blocks are drawn whole, so that chunks may cut
        where they like.
        """
        device, parts = self.shape.device, []
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            generator = torch.Generator(device).manual_seed(
                _seed(self.seed, layer, row, kind, block)
            )
            drawn = torch.randn(
                self.shape.kv_heads, BLOCK, width, generator=generator, device=device
            )
            parts.append(drawn[:, max(0, start - block * BLOCK) : stop - block * BLOCK])
        return torch.cat(parts, dim=1)


class _Heads:
    """What the KV heads of a layer have of their own, all [Hkv, 1, D] unless said; drawn on the
    CPU, alike everywhere.

    Attributes
    ----------
    deviation
        of each coordinate, of length 1.
    mean
        of all keys, of length 1.
    sink
        where the first keys lie, of length 1.
    every
        [Hkv, 1], the heads themselves.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(count: int) -> torch.Tensor:
            return torch.randn(shape.kv_heads, count, shape.head_dim, generator=generator)

        order = torch.rand(shape.kv_heads, 1, shape.head_dim, generator=generator).argsort(dim=2)
        deviation = _unit((1 + order) ** -0.4)
        self.deviation = deviation.to(shape.device)
        self.mean, self.sink = (_unit(normal(1)).to(shape.device) for _ in range(2))
        self._centres = [_unit(deviation * normal(TOPICS)).to(shape.device) for _ in range(2)]
        self.every = torch.arange(shape.kv_heads, device=shape.device)[:, None]

    def centres(
        self, heads: torch.Tensor, topics: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """[H, n, D] centres of topics [n] or [H, n] at positions of that shape, in the KV heads [H,
        1].
        """
        angle = (2 * math.pi / DRIFT) * position[..., None]
        first, other = self._centres
        return angle.cos() * first[heads, topics] + angle.sin() * other[heads, topics]


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


def _seed(*parts: Any) -> int:
    """63 bits that follow from the parts, in any process."""
    return (
        int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1
    )


def _chance(seed: int, row: int, what: Any, *numbers: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1) that follow from all of these, of the shape that the places
    broadcast to.
    """
    mixed = torch.full((), _seed(seed, row, what), device=numbers[0].device)
    for number in numbers:
        # a product carries low bits up, the shift takes high bits down; int64 wraps around
        for _ in range(2):
            mixed = (mixed + number) * 0x5851F42D4C957F2D
            mixed = mixed ^ (mixed >> 32)
    # as many bits as float32 holds, so that none rounds to 1
    return (mixed >> 20 & (1 << 24) - 1) / float(1 << 24)


class SyntheticEngine(Engine):
    """An engine whose layers store and ask synthetic keys and queries, whatever the model computed.

    Those of the decode steps are made with the engine, so that making them costs no step its time;
    those of the prompt as it is read, in the span `SYNTHETIC_SPAN`.
    """

    def __init__(self, *arguments: Any, new_tokens: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(*arguments, new_tokens=new_tokens, seed=seed, **settings)
        self._synthetic = SyntheticAttention(self.shape, seed)
        self._columns_read = [0] * self.shape.layers
        self._ahead = {
            layer: (
                self._steps(self._synthetic.queries, layer, new_tokens),
                self._steps(self._synthetic.keys, layer, new_tokens),
            )
            for layer in (*self.shape.full_layers, *self.shape.reuses)
        }

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        valid: bool = False,
    ) -> torch.Tensor:
        """As `Engine.attend`; only the value is the model's."""
        if self.prefilled:
            ahead, step = self._ahead[layer], self._columns_read[layer] - max(self.shape.lengths)
            self._columns_read[layer] += query.shape[2]
            return super().attend(layer, ahead[0][step], ahead[1][step], value, sinks)
        self._columns_read[layer] = stop = self._reader.column + self._reader.width
        start = stop - query.shape[2]
        self._wait()
        with self.spans(SYNTHETIC_SPAN):
            queries = self._rows(self._synthetic.queries, layer, start, stop)
            keys = self._rows(self._synthetic.keys, layer, start, stop)
            self._wait()
        return super().attend(layer, queries, keys, value, sinks)

    def _wait(self) -> None:
        """Wait for a GPU to end its work so far, so that a span holds its own work alone."""
        if self.shape.device.type == "cuda":
            torch.cuda.synchronize(self.shape.device)

    def fill_prompt(self, rows: Sequence[Sequence[int]]) -> None:
        """Store synthetic prompts, token ids of equal length, in place of a prefill; one layer
        after the other.
        """
        length = max(self.shape.lengths)
        window = min(self.method.needs.query_window, length)
        self.start_chunk(torch.tensor(rows, device=self.shape.device))
        for layer in range(self.shape.layers):
            self._columns_read[layer] = length
            if self.shape.windows.get(layer) == 0:  # it stores no keys
                continue
            keys, values = (
                self._rows(make, layer, 0, length)
                for make in (self._synthetic.keys, self._synthetic.values)
            )
            if layer in self.shape.windows:
                if self.shape.windows[layer]:  # else a state, which begins with the first step
                    windowed: Any = self.windowed[layer]
                    windowed.fill(keys, values)
            else:
                self.fill(
                    layer,
                    keys,
                    values,
                    self._rows(self._synthetic.queries, layer, length - window, length),
                )

    def _rows(self, make: Any, layer: int, start: int, stop: int) -> torch.Tensor:
        """[B, H, n, D] of what `make` makes of each row."""
        cuts = [*range(start, stop, PART), stop] if stop > start else [start, stop]
        parts = [
            torch.stack([make(layer, begin, end, row) for row in range(self.shape.batch)])
            for begin, end in itertools.pairwise(cuts)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _steps(self, make: Any, layer: int, count: int) -> Sequence[torch.Tensor]:
        """[B, H, 1, D] of each position after the prompts, which may differ in length."""
        rows = [
            make(layer, length, length + count, row)
            for row, length in enumerate(self.shape.lengths)
        ]
        return torch.stack(rows)[:, :, :, None].unbind(2)


class Filled:
    """What a generation begins from when an engine's stores are filled and no model reads the
    prompts.
    """

    def __init__(self, engine: SyntheticEngine, rows: Sequence[Sequence[int]]) -> None:
        self._engine, self._rows = engine, rows

    def lend(self, engine: Engine) -> torch.Tensor:
        """Fill the engine that this was made for; logits by which each row repeats its last token,
        as nothing has said what comes after it.
        """
        assert engine is self._engine
        self._engine.fill_prompt(self._rows)
        return one_hot(torch.tensor([row[-1] for row in self._rows])).float()
