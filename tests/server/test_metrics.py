"""What /metrics says: vLLM's names under our prefix, counted rightly, with labels that no request can add to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import resources
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_server import Server

from ngramspec.engine.llm_engine import Engine
from ngramspec.outputs import Choice, Completion, Stats
from ngramspec.sampling_params import SamplingParams
from ngramspec.server.metrics import PREFIX, REFUSALS, Metrics
from ngramspec.server.settings import ServerSettings

VLLM_COUNTERS = (
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    *("spec_decode_num_accepted_tokens_per_pos", "prefix_cache_queries", "prefix_cache_hits"),
    *("prompt_tokens", "generation_tokens", "request_success"),
)
VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
VLLM_HISTOGRAMS = (
    *("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
)

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(metrics: Metrics) -> Series:
    return parse(metrics.expose()[0].decode())


def parse(text: str) -> Series:
    return {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, tuple(sorted(labels.items()))]


def completion(stats: Stats, *reasons: str | None, tokens: int = 5) -> Completion:
    choices = [Choice(i, token_ids=[1] * tokens, finish_reason=reason) for i, reason in enumerate(reasons)]
    choices[0].stats = stats
    return Completion([1, 2, 3], choices, 0, "bitwise", queued_s=0.01, ttft_s=0.2, duration_s=1.0)


@pytest.fixture
def metrics(engine: Engine) -> Metrics:
    return Metrics(engine)


def test_the_names_are_vllms_after_our_prefix(metrics: Metrics) -> None:
    metrics.count_finished(completion(Stats(drafts=1, drafted=1, accepted=1, accepted_by_depth=[1], tokens=5), "stop"), "done")
    kinds = {family.name: family.type for family in text_string_to_metric_families(metrics.expose()[0].decode())}
    for names, kind in ((VLLM_COUNTERS, "counter"), (VLLM_GAUGES, "gauge"), (VLLM_HISTOGRAMS, "histogram")):
        assert {name: kinds.get(PREFIX + name) for name in names} == dict.fromkeys(names, kind)
    assert not [name for name in kinds if name.endswith("_created")]
    assert {name.partition(":")[0] for name in kinds} == {PREFIX[:-1], "llamacpp"}


def test_a_finished_request_is_counted_once(metrics: Metrics) -> None:
    stats = Stats(
        passes=3,
        tokens=5,
        drafts=2,
        drafted=7,
        accepted=3,
        drafted_by_source={"ngram": 4, "datastore": 3},
        accepted_by_source={"ngram": 1, "datastore": 2},
        expected_by_source={"ngram": 1.5, "datastore": 0.25},
        accepted_by_depth=[2, 1],
    )
    metrics.count_finished(completion(stats, "stop", "length"), "done")
    series = read(metrics)
    for name, expected in (
        ("spec_decode_num_drafts_total", 2),
        ("spec_decode_num_draft_tokens_total", 7),
        ("spec_decode_num_accepted_tokens_total", 3),
        ("prompt_tokens_total", 3),
        ("generation_tokens_total", 5),
        ("time_to_first_token_seconds_sum", 0.2),
        ("time_per_output_token_seconds_sum", 0.2),
        ("e2e_request_latency_seconds_sum", 1.0),
        ("request_queue_time_seconds_count", 1),
        ("request_cancelled_total", 0),
        ("request_failed_total", 0),
    ):
        assert value(series, name) == pytest.approx(expected), name
    assert [value(series, "spec_decode_num_accepted_tokens_per_pos_total", position=p) for p in "01"] == [2, 1]
    assert [value(series, "request_success_total", finished_reason=reason) for reason in ("stop", "length")] == [1, 1]
    assert value(series, "spec_decode_num_draft_tokens_by_source_total", source="ngram") == 4
    assert value(series, "spec_decode_num_accepted_tokens_by_source_total", source="datastore") == 2
    assert value(series, "spec_decode_num_expected_tokens_by_source_total", source="ngram") == 1.5


@pytest.mark.parametrize(("outcome", "counter"), [("cancelled", "request_cancelled_total"), ("error", "request_failed_total")])
def test_a_request_that_was_cut_short_has_tokens_and_no_times(metrics: Metrics, outcome: str, counter: str) -> None:
    metrics.count_finished(completion(Stats(tokens=5), "cancelled"), outcome)
    series = read(metrics)
    assert value(series, counter) == 1
    assert value(series, "generation_tokens_total") == 5
    assert not any(count for (name, _), count in series.items() if name.endswith("_count") or name == "request_success_total")


def test_no_label_takes_a_value_from_outside(metrics: Metrics) -> None:
    sources = {f"datastore:secret/file{i}.py:12": 1 for i in range(20)} | {f"own{i}": 1 for i in range(20)}
    for i in range(20):
        metrics.count_refused(f"reason {i}")
        metrics.count_finished(completion(Stats(drafted=40, drafted_by_source=sources), f"reason {i}"), "done")
    series = read(metrics)
    seen: dict[str, set[str]] = {}
    for _, labels in series:
        for name, label in labels:
            seen.setdefault(name, set()).add(label)
    assert seen["source"] == {*metrics.sources, "other"}
    assert seen["reason"] == {*REFUSALS, "other"}
    assert seen["finished_reason"] == {"stop", "length", "other"}
    assert value(series, "spec_decode_num_draft_tokens_by_source_total", source="datastore") == 400
    assert value(series, "request_refused_total", reason="other") == 20


def test_every_source_that_the_engine_names_has_a_label(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "source_names", property(lambda _: ["ngram", "datastore", "lookahead"]))
    metrics = Metrics(engine)
    drafted = {"lookahead": 2, "datastore:a.py:1": 3, "unheard-of": 4}
    metrics.count_finished(completion(Stats(drafted=9, drafted_by_source=drafted), "stop"), "done")
    name, series = "spec_decode_num_draft_tokens_by_source_total", read(metrics)
    found = {source: value(series, name, source=source) for source in ("ngram", "datastore", "lookahead", "other")}
    assert found == {"ngram": 0, "datastore": 3, "lookahead": 2, "other": 4}


def test_each_application_counts_for_itself(engine: Engine) -> None:
    one, other = Metrics(engine), Metrics(engine)
    one.count_refused("queue_full")
    assert value(read(one), "request_refused_total", reason="queue_full") == 1
    assert value(read(other), "request_refused_total", reason="queue_full") == 0


def test_gauges_say_what_the_engine_says(engine: Engine, metrics: Metrics) -> None:
    before = read(metrics)
    done = engine.complete([[1, 2, 3] * 40] * 2, SamplingParams(max_tokens=8))
    after, status = read(metrics), engine.status()
    assert value(after, "num_requests_running") == value(after, "num_requests_waiting") == value(after, "kv_cache_usage_perc") == 0
    assert value(after, "engine_passes_total") == status.passes > value(before, "engine_passes_total")
    assert value(after, "prefix_cache_queries_total") == status.prefix_queries
    assert value(after, "prefix_cache_hits_total") == status.prefix_hits >= sum(each.cached_tokens for each in done)
    assert value(after, "spec_decode_gain") == status.speculation_gain > 0
    assert value(after, "spec_decode_price_bar") == status.price_bar >= 1
    for name, field in (("draft", "nodes"), ("expected", "expected"), ("accepted", "made")):
        found = [n for (key, _), n in after.items() if key == f"spec_decode_num_{name}_tokens_by_confidence_total"]
        assert len(found) > 5
        assert sum(found) == pytest.approx(sum(getattr(row, field) for row in status.reliability))
    # While a request runs, its sequence and its memory show.
    seen: list[Series] = []
    engine.submit([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True), deliver=lambda _: seen.append(read(metrics))).result(30)
    assert value(seen[0], "num_requests_running") == 1
    assert 0 < value(seen[0], "kv_cache_usage_perc") <= 1


def test_openmetrics_for_who_asks_for_it(metrics: Metrics) -> None:
    body, content_type = metrics.expose("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_what_is_served_is_what_was_counted(make_server: Callable[..., Server]) -> None:
    server = make_server()
    body = {"prompt": "abcabcabcabc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        before = parse(client.get("/metrics").text)
        answer = client.post("/v1/completions", json=body)
        refused = client.post("/v1/completions", json=body | {"prompt": "a" * (3 << 20)})
        scrape = client.get("/metrics")
    assert (answer.status_code, refused.status_code) == (200, 413)
    assert scrape.headers["content-type"].startswith("text/plain; version=0.0.4")
    after = parse(scrape.text)

    def gained(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    usage = answer.json()["usage"]
    assert gained("prompt_tokens_total") == usage["prompt_tokens"]
    assert gained("generation_tokens_total") == usage["completion_tokens"] == 12
    assert gained("request_success_total", finished_reason="length") == 1
    assert gained("e2e_request_latency_seconds_count") == 1
    assert gained("request_refused_total", reason="too_large") == 1


def test_with_keys_the_figures_need_an_administrators(make_server: Callable[..., Server]) -> None:
    server = make_server(ServerSettings(api_keys=("correct-horse",), admin_keys=("battery-staple",)))
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"Authorization": "Bearer correct-horse"}).status_code == 403
        answer = client.get("/metrics", headers={"Authorization": "Bearer battery-staple"})
    assert answer.status_code == 200
    assert value(parse(answer.text), "request_refused_total", reason="unauthorized") == 1


def test_the_dashboard_asks_for_nothing_that_is_not_there(metrics: Metrics) -> None:
    metrics.count_finished(completion(Stats(accepted_by_depth=[1]), "stop"), "done")
    there = {name for name, _ in read(metrics) if not name.startswith("llamacpp:")}
    dashboard: dict[str, Any] = json.loads((resources.files("ngramspec.server") / "deploy" / "grafana.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    asked = {name for query in queries for name in re.findall(rf"{PREFIX}(\w+)", query)}
    assert asked <= there
    assert all(PREFIX in query for query in queries)
    counters = {name for name in there if name.endswith("_total")}
    assert counters - asked <= {"num_preemptions_total", "engine_passes_total"}, "counters that the dashboard does not show"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
