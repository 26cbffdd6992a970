"""llama.cpp's names for what /metrics tells, beside ours, so that its dashboards work.

Completions enter as they finish, Prometheus' families leave. Knows neither requests nor who sent them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ngramspec.engine.llm_engine import Engine
from ngramspec.outputs import Completion
from ngramspec.server import response_stats

PREFIX = "llamacpp:"
# A counter to llama.cpp, without the end that Prometheus' text formats give the names of counters.
PEAK = f"{PREFIX}n_tokens_max"


class LlamaMetrics(Collector):
    """llama.cpp's counters and gauges of one server. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        self._prompt_tokens = self._cached_tokens = self._tokens = self._longest = self._drafts = self._drafted = self._accepted = 0
        self._prompt_s = self._tokens_s = 0.0

    def add(self, completion: Completion) -> None:
        """Count a request that reached the engine."""
        found, stats = response_stats.timings(completion), completion.stats
        length = len(completion.prompt_token_ids) + max((len(choice.token_ids) for choice in completion.choices), default=0)
        with self._lock:
            self._prompt_tokens += int(found["prompt_n"])
            self._cached_tokens += completion.cached_tokens
            self._prompt_s += found["prompt_ms"] / 1e3
            self._tokens += stats.tokens
            self._tokens_s += found["predicted_ms"] / 1e3
            self._longest = max(self._longest, length)
            self._drafts += stats.drafts
            self._drafted += stats.drafted
            self._accepted += stats.accepted

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status()
        with self._lock:
            counters = (
                ("prompt_tokens", "Tokens of prompts that were computed.", self._prompt_tokens),
                ("prompt_tokens_cached", "Tokens of prompts that the prefix cache had.", self._cached_tokens),
                ("prompt_seconds", "Time for prompts.", self._prompt_s),
                ("tokens_predicted", "Tokens generated.", self._tokens),
                ("tokens_predicted_seconds", "Time for generated tokens.", self._tokens_s),
                ("n_decode", "Passes of the model.", status.passes),
                ("n_tokens_max", "Most tokens of a sequence so far.", self._longest),
                ("spec_decode_num_drafts", "Passes that verified a draft.", self._drafts),
                ("spec_decode_num_draft_tokens", "Draft tokens verified.", self._drafted),
                ("spec_decode_num_accepted_tokens", "Draft tokens that the model confirmed.", self._accepted),
            )
            gauges = (
                ("prompt_tokens_seconds", "Tokens of prompts in a second, on average.", self._prompt_tokens / (self._prompt_s or 1)),
                ("predicted_tokens_seconds", "Tokens generated in a second, on average.", self._tokens / (self._tokens_s or 1)),
                ("requests_processing", "Sequences that take part in passes.", status.running),
                ("requests_deferred", "Sequences that wait for a slot or for memory.", status.waiting),
                ("n_busy_slots_per_decode", "Tokens generated in a pass, on average.", self._tokens / (status.passes or 1)),
            )
        for name, text, value in counters:
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        for name, text, value in gauges:
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
