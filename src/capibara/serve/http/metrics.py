"""What Prometheus reads, under the names that vLLM uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from capibara.serve.requests import EngineProtocol

__all__ = ["Metrics"]

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)


class _OfEngine(Collector):
    def __init__(self, engine: EngineProtocol) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        s, name = self._engine.statistics(), [self._engine.name]
        programs = GaugeMetricFamily(
            "capibara:programs_left", "Programs that are still to be compiled.", labels=["model_name"]
        )
        programs.add_metric(name, s.programs_left)
        yield programs
        compiled = CounterMetricFamily(
            "capibara:compilations", "Programs that a step had to wait for.", labels=["model_name"]
        )
        compiled.add_metric(name, s.compilations)
        yield compiled
        gauges: list[tuple[str, str, Any]] = [
            ("num_requests_running", "Requests that are being answered.", s.running),
            ("num_requests_waiting", "Requests that wait.", s.waiting),
            (
                "kv_cache_usage_perc",
                "Part of the cache's pages in use; 1 is all.",
                s.pages_used / max(1, s.pages_total),
            ),
        ]
        for key, words, value in gauges:
            gauge = GaugeMetricFamily(f"vllm:{key}", words, labels=["model_name"])
            gauge.add_metric(name, value)
            yield gauge
        counters = [
            ("prompt_tokens", "Tokens of prompts.", s.prompt_tokens),
            ("generation_tokens", "Tokens that were written.", s.generated_tokens),
            (
                "prefix_cache_queries",
                "Tokens of prompts that were looked for in the prefix cache.",
                s.prompt_tokens,
            ),
            ("prefix_cache_hits", "Tokens of prompts that were found there.", s.cached_prompt_tokens),
            ("num_preemptions", "Texts that had to give their pages back.", s.preemptions),
            ("spec_decode_num_draft_tokens", "Tokens that were guessed.", s.guessed_tokens),
            ("spec_decode_num_accepted_tokens", "Guesses that were right.", s.right_guesses),
        ]
        for key, words, value in counters:
            counter = CounterMetricFamily(f"vllm:{key}", words, labels=["model_name"])
            counter.add_metric(name, value)
            yield counter
        done = CounterMetricFamily(
            "vllm:request_success", "Texts that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(s.finished.items()):
            done.add_metric([*name, reason], count)
        yield done


class Metrics:
    """Counts and times of one server; nothing is shared with other servers of the process."""

    def __init__(self, engine: EngineProtocol) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_OfEngine(engine))

        def seconds(name: str, words: str) -> Histogram:
            made = Histogram(f"vllm:{name}", words, ["model_name"], registry=self._registry, buckets=_SECONDS)
            return made.labels(engine.name)

        self.first_token = seconds("time_to_first_token_seconds", "From a request to its first token.")
        self.between_tokens = seconds("inter_token_latency_seconds", "From one token of a text to the next.")
        self.whole = seconds("e2e_request_latency_seconds", "From a request to its end.")

    def text(self) -> bytes:
        """All of them, in the text format."""
        return generate_latest(self._registry)
