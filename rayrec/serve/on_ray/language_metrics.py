"""Metrics of language models through Ray, with the names and labels that `/metrics` of one process has.

    replica        engine ─► EngineMeasures ─┬─► times of tokens, as they come ─► histograms of Ray
                                             └─► LanguageCollector ─┐ every second
    gateway        other services, shared names ─► collectors ──────┴─► counters and gauges of Ray

Each process publishes what nobody else counts: of an embedded model its replicas, of another service and of
shared names the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from prometheus_client.registry import Collector
from ray.util.metrics import Histogram

from rayrec.platform.metrics import RayMetrics
from rayrec.serve.language.measures import (
    FIRST_SECONDS,
    NEXT_SECONDS,
    EngineMeasures,
    LanguageCollector,
    Shares,
    SharingCollector,
)
from rayrec.serve.web.metrics import Publishing


class RayLanguageMetrics:
    """Publishes as long as its process lives."""

    def __init__(self, models: Mapping[str, EngineMeasures], shared: Mapping[str, Shares]) -> None:
        """
        Args:
            models: measures by name of the model.
        """
        self._times = {
            "first": Histogram(
                "rayrec_language_first_token_seconds",
                "From a request to its first token",
                list(FIRST_SECONDS),
                ("model",),
            ),
            "next": Histogram(
                "rayrec_language_next_token_seconds",
                "From a token to the next",
                list(NEXT_SECONDS),
                ("model",),
            ),
        }
        for name, measures in models.items():
            measures.tell(partial(self._tell, name))
        self._families: dict[tuple[str, ...], RayMetrics] = {}
        """By the keys of their labels."""
        publishing = Publishing()
        for collector in (LanguageCollector(dict(models)), SharingCollector(shared)):
            publishing.add(partial(self._publish, collector))

    def _tell(self, model: str, which: Literal["first", "next"], seconds: float) -> None:
        self._times[which].observe(seconds, {"model": model})

    def _publish(self, collector: Collector) -> None:
        for family in collector.collect():
            if family.type == "histogram":
                continue  # of which Ray is told each time as it comes
            for sample in family.samples:
                keys = tuple(sample.labels)
                if keys not in self._families:
                    self._families[keys] = RayMetrics({}, keys)
                name = sample.name.removeprefix("rayrec_")
                self._families[keys].publish({name: sample.value}, sample.labels)
