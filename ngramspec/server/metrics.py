"""What Prometheus reads: counters of finished and refused requests, and gauges of the engine at the moment of the scrape.

Completions enter as they finish, text leaves when it is asked for. Names are vLLM's after our prefix, so that its dashboards need a new
prefix and little else, and beside them llama.cpp's own. Knows neither requests nor who sent them: every label has a fixed set of values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import ngramspec
from ngramspec.engine.llm_engine import Engine
from ngramspec.outputs import Completion, Stats

PREFIX, LLAMA_PREFIX = "ngramspec:", "llamacpp:"
# A counter to llama.cpp, without the end that Prometheus' text formats give the names of counters.
PEAK = f"{LLAMA_PREFIX}n_tokens_max"
FINISH_REASONS = ("stop", "length")
BODIES_FULL = "bodies_full"
REFUSALS = ("queue_full", "draining", "engine_dead", "unauthorized", "too_large", "invalid", "key_limit", BODIES_FULL)
# What a label says where the value is none of its fixed set.
OTHER = "other"

_PASS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
_WAIT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_WHOLE_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Metrics:
    """The counters of one server. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.started = int(time.time())
        self._llama = _LlamaMetrics(engine)
        self.sources = frozenset(name.partition(":")[0] for name in engine.source_names)
        """Who may have proposed a draft token, without the file and line that a datastore adds."""

        def make_counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def make_histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

        draft, accepted = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
        self._drafts = make_counter("spec_decode_num_drafts", "Passes that verified a draft.")
        self._draft_tokens = make_counter(draft, "Draft tokens verified; a draft is a tree, so several may stand for one position.")
        self._accepted_tokens = make_counter(accepted, "Draft tokens that the model confirmed.")
        self._accepted_per_pos = make_counter(
            f"{accepted}_per_pos", "Drafts of which the token at this depth, from 0, was confirmed.", "position"
        )
        self._draft_by_source = make_counter(f"{draft}_by_source", "Draft tokens verified, by who proposed them.", "source")
        self._accepted_by_source = make_counter(f"{accepted}_by_source", "Draft tokens confirmed, by who proposed them.", "source")
        self._expected_by_source = make_counter(
            "spec_decode_num_expected_tokens_by_source",
            "Sum of the probabilities that draft tokens were verified with: what those accepted should come to.",
            "source",
        )
        self._prompt_tokens = make_counter("prompt_tokens", "Tokens of prompts, those from the prefix cache included.")
        self._generation_tokens = make_counter("generation_tokens", "Tokens generated.")
        self._success = make_counter("request_success", "Texts that came to their end.", "finished_reason")
        self._cancelled = make_counter("request_cancelled", "Requests that their client left, or that a timeout ended.")
        self._failed = make_counter("request_failed", "Requests that an error of the server ended.")
        self._refused = make_counter("request_refused", "Requests that were turned away before they reached the engine.", "reason")
        self._ttft = make_histogram("time_to_first_token_seconds", "From the request's arrival at the engine to its first token.", _WAIT_S)
        self._per_token = make_histogram("time_per_output_token_seconds", "Mean time between two tokens of a text, per request.", _PASS_S)
        self._latency = make_histogram(
            "e2e_request_latency_seconds", "From the request's arrival at the engine to its last token.", _WHOLE_S
        )
        self._queued = make_histogram("request_queue_time_seconds", "From the request's arrival at the engine to its first pass.", _WAIT_S)

        info = Gauge(f"{PREFIX}engine_info", "What serves: always 1.", ("model_name", "version", "exactness"), registry=self.registry)
        info.labels(engine.name, ngramspec.__version__, engine.promise).set(1)
        for reason in FINISH_REASONS:
            self._success.labels(reason)
        for reason in (*REFUSALS, OTHER):
            self._refused.labels(reason)
        for source in sorted(self.sources):
            self._draft_by_source.labels(source)
            self._accepted_by_source.labels(source)
            self._expected_by_source.labels(source)
        self.registry.register(_Status(engine))
        self.registry.register(self._llama)

    def count_finished(self, completion: Completion, outcome: str) -> None:
        """Count a request that reached the engine. `outcome`: "done", "cancelled" or "error"."""
        stats, (prompt_s, text_s) = completion.stats, completion.split_time()
        self._llama.add(completion, stats, prompt_s, text_s)
        self._drafts.inc(stats.drafts)
        self._draft_tokens.inc(stats.drafted)
        self._accepted_tokens.inc(stats.accepted)
        for position, count in enumerate(stats.accepted_by_depth):
            self._accepted_per_pos.labels(str(position)).inc(count)
        counted: tuple[tuple[Mapping[str, float], Counter], ...] = (
            (stats.drafted_by_source, self._draft_by_source),
            (stats.accepted_by_source, self._accepted_by_source),
            (stats.expected_by_source, self._expected_by_source),
        )
        for by_source, counter in counted:
            for name, n in by_source.items():
                source = name.partition(":")[0]
                counter.labels(source if source in self.sources else OTHER).inc(n)
        self._prompt_tokens.inc(len(completion.prompt_token_ids))
        self._generation_tokens.inc(stats.tokens)
        if outcome == "cancelled":
            self._cancelled.inc()
        elif outcome == "error":
            self._failed.inc()
        else:
            self._observe(completion)

    def _observe(self, completion: Completion) -> None:
        """Observe reasons and times of a request that came to its end; those of one that was cut short would be too good."""
        for choice in completion.choices:
            self._success.labels(choice.finish_reason if choice.finish_reason in FINISH_REASONS else OTHER).inc()
        self._queued.observe(completion.queued_s)
        self._ttft.observe(completion.ttft_s)
        self._latency.observe(completion.duration_s)
        if (longest := max(len(choice.token_ids) for choice in completion.choices)) > 1:
            self._per_token.observe((completion.duration_s - completion.ttft_s) / (longest - 1))

    def count_refused(self, reason: str) -> None:
        """Count a request that was turned away; `reason` is one of REFUSALS."""
        self._refused.labels(reason if reason in REFUSALS else OTHER).inc()

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Return everything, in the format that an Accept header asks for -> (body, content type)."""
        encode, content_type = choose_encoder(accept)
        body = encode(_WithoutCreated(self.registry))
        if encode is generate_latest:  # OpenMetrics knows no other names of counters
            body = body.replace(f"{PEAK}_total".encode(), PEAK.encode())
        return body, content_type


class _Status(Collector):
    """What the engine says of itself, read when it is asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status()
        for name, text, value in (
            ("num_requests_running", "Sequences that take part in passes.", status.running),
            ("num_requests_waiting", "Sequences that wait for a slot or for memory.", status.waiting),
            ("kv_cache_usage_perc", "Share of the KV cache that running sequences hold, 0 to 1.", status.kv_used / status.kv_tokens),
            ("prefix_cache_tokens", "Tokens in the KV cache that no sequence holds and that later prompts may use.", status.kv_cached),
            ("spec_decode_gain", "Speed over that of the same engine without drafts, in its last seconds.", status.speculation_gain),
            ("spec_decode_price_bar", "By how much drafts must be worth more than their time: above 1 while they lost.", status.price_bar),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        for name, text, value in (
            ("prefix_cache_queries", "Tokens that were looked for in the prefix cache.", status.prefix_queries),
            ("prefix_cache_hits", "Tokens that were found there.", status.prefix_hits),
            ("num_preemptions", "Sequences that gave up their memory and were computed anew.", status.preemptions),
            ("engine_passes", "Passes of the model.", status.passes),
            (
                "prompt_tokens_ahead",
                "Tokens of prompts that were computed while nothing ran, before a request had them.",
                status.tokens_ahead,
            ),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        for name, text, field in (
            ("draft_tokens", "Draft tokens verified, by the upper bound of their probability.", "nodes"),
            ("expected_tokens", "Sum of these draft tokens' probabilities: how many should be confirmed.", "expected"),
            ("accepted_tokens", "Of these draft tokens, those that the model confirmed.", "made"),
        ):
            family = CounterMetricFamily(f"{PREFIX}spec_decode_num_{name}_by_confidence", text, labels=("confidence",))
            for bound in sorted({row.high for row in status.reliability}):
                family.add_metric((f"{bound:g}",), sum(getattr(row, field) for row in status.reliability if row.high == bound))
            yield family


class _LlamaMetrics(Collector):
    """llama.cpp's names for what /metrics tells, beside ours, so that its dashboards work. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        self._prompt_tokens = self._cached_tokens = self._tokens = self._longest = self._drafts = self._drafted = self._accepted = 0
        self._prompt_s = self._tokens_s = 0.0

    def add(self, completion: Completion, stats: Stats, prompt_s: float, text_s: float) -> None:
        """Count a request that reached the engine, which has these statistics, and seconds for prompt and text."""
        length = len(completion.prompt_token_ids) + max((len(choice.token_ids) for choice in completion.choices), default=0)
        with self._lock:
            self._prompt_tokens += len(completion.prompt_token_ids) - completion.cached_tokens
            self._cached_tokens += completion.cached_tokens
            self._prompt_s += prompt_s
            self._tokens += stats.tokens
            self._tokens_s += text_s
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
            yield CounterMetricFamily(LLAMA_PREFIX + name, text, value=value)
        for name, text, value in gauges:
            yield GaugeMetricFamily(LLAMA_PREFIX + name, text, value=value)


class _WithoutCreated(Collector):
    """Leaves out the second series that the client library gives every counter, its time of birth; switching it off is global."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
