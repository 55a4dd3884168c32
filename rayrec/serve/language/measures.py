"""What an engine does, in metrics: times of tokens, slots, pages, prefixes.

rayrec_language_first_token_seconds     model   from the request to its first token
rayrec_language_next_token_seconds      model   from a token to the next one of the same answer
rayrec_language_prompt_tokens_total     model   that were asked
rayrec_language_prefix_tokens_total     model   of them, not read again
rayrec_language_answer_tokens_total     model
rayrec_language_left_total              model   answers whose caller went away, or whose time was over
rayrec_language_running                 model   answers that are being written
rayrec_language_waiting                 model
rayrec_language_pages_used              model   share of the memory for keys and values
rayrec_language_routed_total            name, model     requests for a shared name, by who answers
rayrec_language_shadow_total            name, outcome   requests to its shadow: sent, answered, failed,
                                                        dropped; answers that were the same, different
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Protocol

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

FIRST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
NEXT_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

TellTokenTime = Callable[[Literal["first", "next"], float], None]
"""Told whether a token is the first of its answer, and the seconds that it took."""


class EngineMeasures:
    """Of one engine; counted by its thread, read by any."""

    def __init__(self) -> None:
        self._own = CollectorRegistry()
        self._first_s = Histogram("first", "-", buckets=FIRST_SECONDS, registry=self._own)
        self._next_s = Histogram("next", "-", buckets=NEXT_SECONDS, registry=self._own)
        self.num_prompt_tokens = self.num_prefix_tokens = self.num_answer_tokens = self.num_left = 0
        self._pages_used: Callable[[], float] = lambda: 0.0
        self._running: Callable[[], int] = lambda: 0
        self._waiting: Callable[[], int] = lambda: 0
        self._told: TellTokenTime | None = None

    def tell(self, told: TellTokenTime) -> None:
        """From now on, tell this of the time to each token as well."""
        self._told = told

    def watch(
        self, pages_used: Callable[[], float], running: Callable[[], int], waiting: Callable[[], int]
    ) -> None:
        """From now on, ask these for what is now."""
        self._pages_used, self._running, self._waiting = pages_used, running, waiting

    def count_first(self, seconds: float, num_prompt_tokens: int) -> None:
        self._first_s.observe(seconds)
        if self._told is not None:
            self._told("first", seconds)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_answer_tokens += 1

    def count_tokens(self, num_prompt: int, num_answer: int) -> None:
        """Of an answer that came at once, or what another service says of one."""
        self.num_prompt_tokens += num_prompt
        self.num_answer_tokens += num_answer

    @property
    def first_seconds(self) -> float:
        """Of all first tokens together."""
        samples = next(iter(self._first_s.collect())).samples
        return next(sample.value for sample in samples if sample.name.endswith("_sum"))

    def count_next(self, seconds: float) -> None:
        self._next_s.observe(seconds)
        if self._told is not None:
            self._told("next", seconds)
        self.num_answer_tokens += 1

    def count_prefix(self, num_tokens: int) -> None:
        self.num_prefix_tokens += num_tokens

    def count_left(self) -> None:
        self.num_left += 1

    def numbers(self) -> dict[str, float]:
        """By name without `rayrec_language_`; names that end in `_total` are counters."""
        return {
            "prompt_tokens_total": self.num_prompt_tokens,
            "prefix_tokens_total": self.num_prefix_tokens,
            "answer_tokens_total": self.num_answer_tokens,
            "left_total": self.num_left,
            "running": self._running(),
            "waiting": self._waiting(),
            "pages_used": self._pages_used(),
        }

    def histograms(self) -> Iterator[tuple[str, str, Metric]]:
        """(name, description, samples)."""
        yield "first_token_seconds", "From a request to its first token", next(iter(self._first_s.collect()))
        yield "next_token_seconds", "From a token to the next", next(iter(self._next_s.collect()))


class LanguageCollector(Collector):
    """Measures of all models, for a registry of Prometheus."""

    def __init__(self, measures: dict[str, EngineMeasures]) -> None:
        self._measures = measures

    def collect(self) -> Iterator[Metric]:
        """As Prometheus's client asks."""
        families: dict[str, Metric] = {}
        for model, measures in self._measures.items():
            for name, value in measures.numbers().items():
                full = f"rayrec_language_{name}"
                if full not in families:
                    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    families[full] = kind(full, name.replace("_", " "), labels=["model"])
                families[full].add_metric([model], value)  # type: ignore[attr-defined]
            for name, description, found in measures.histograms():
                full = f"rayrec_language_{name}"
                family = families.setdefault(full, Metric(full, description, "histogram"))
                for sample in found.samples:
                    suffix = sample.name.removeprefix(found.name)
                    family.add_sample(full + suffix, {"model": model, **sample.labels}, sample.value)
        yield from families.values()


class Shares(Protocol):
    """What a shared name counts."""

    @property
    def num_sent(self) -> Mapping[str, int]: ...
    def counts(self) -> Mapping[str, int]: ...


class SharingCollector(Collector):
    """Measures of shared names."""

    def __init__(self, names: Mapping[str, Shares]) -> None:
        self._names = names

    def collect(self) -> Iterator[Metric]:
        """As Prometheus's client asks."""
        routed = CounterMetricFamily("rayrec_language_routed", "by model", labels=["name", "model"])
        shadow = CounterMetricFamily("rayrec_language_shadow", "by outcome", labels=["name", "outcome"])
        for name, shares in self._names.items():
            for model, count in shares.num_sent.items():
                routed.add_metric([name, model], count)
            for outcome, count in shares.counts().items():
                shadow.add_metric([name, outcome], count)
        yield routed
        yield shadow
