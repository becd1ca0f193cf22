"""What `/metrics` of a server says of the method, beside vLLM's own numbers.

vLLM's server takes it as a middleware.

A scrape asks the worker, which answers between two steps. It does not wait long for that: while a
long prompt is read the numbers are older ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

MIDDLEWARE = f"{__name__}.Metrics"
PATIENCE = 1.0  # seconds
USAGE = "vllm:kv_cache_usage_perc"  # vLLM's own: the share of its blocks that requests have

# See `kvbench.backends.vllm.requests.Requests.counts`
COUNTERS = {
    "attended_entries": "Keys that KV heads attended in decode steps, in sparse layers.",
    "full_attention_entries": (
        "Keys that full attention would have attended in the same steps and layers."
    ),
}
GAUGES = {
    "blocks_used": "Blocks of keys and values that requests have, of vLLM's.",
    "blocks": "Blocks of keys and values that vLLM has.",
    "side_used_bytes": "Bytes that requests have of the memory for what is kept of freed prompts.",
    "side_bytes": "Bytes of the memory for what is kept of freed prompts.",
    "attended_share": (
        "Attended entries over those of full attention, of all decode steps since the start."
    ),
}


class Numbers(Collector):
    """Numbers of the worker, as Prometheus' client collects them.

    Attributes
    ----------
    found
        by the names of `COUNTERS` and `GAUGES`; what is not known is absent.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def collect(self) -> Iterable[Metric]:
        """See Prometheus' client."""
        values = dict(self.values)
        if full := values.get("full_attention_entries"):
            values["attended_share"] = values["attended_entries"] / full
        for kind, texts in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, text in texts.items():
                if name in values:
                    yield kind(f"kvbench_{name}", text, value=values[name])


class Metrics:
    """Middleware of the server.

    Parameters
    ----------
    app
        what answers.

    Attributes
    ----------
    numbers
        of the last answer.
    """

    def __init__(self, app: Any) -> None:
        self._app, self.numbers = app, Numbers()
        self._refreshing: asyncio.Task[None] | None = None
        REGISTRY.register(self.numbers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request; see ASGI."""
        if scope["type"] == "http" and scope["path"] == "/metrics":
            await self._refresh(scope["app"].state.engine_client)
        await self._app(scope, receive, send)

    async def _refresh(self, engine: Any) -> None:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._ask(engine))
        await asyncio.wait({self._refreshing}, timeout=PATIENCE)

    async def _ask(self, engine: Any) -> None:
        workers = await engine.collective_rpc("kvbench_counts")
        totals = {name: sum(worker[name] for worker in workers) for name in workers[0]}
        self.numbers.values = totals | _blocks(engine.vllm_config.cache_config.num_gpu_blocks)


def _blocks(count: int) -> dict[str, float]:
    """Blocks in use and in all, of so many that vLLM has; one of them is never a request's."""
    usage = [
        sample.value
        for metric in REGISTRY.restricted_registry([USAGE]).collect()
        for sample in metric.samples
    ]
    return {"blocks": count - 1, "blocks_used": round(usage[0] * (count - 1))} if usage else {}
