"""Texts that come through HTTP are the engine's own, token for token, whatever runs beside them and wherever drafts come from."""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from prometheus_client.parser import text_string_to_metric_families
from tiny_server import Server, fim_tokenizer, left_clean, tiny_engine

from ngramspec.datastore.build import build
from ngramspec.engine.llm_engine import Engine
from ngramspec.prompts.fim import MIDDLE_LINES, Fim, FimOptions
from ngramspec.sampling_params import SamplingParams
from ngramspec.speculative.budget.threshold import SpeculationThreshold

N_CLIENTS = 16
N_TOKENS = 32
SHARED = "".join(f"def add_{i}(a, b):\n    return a + b + {i}\n\n\n" for i in range(8))
"""Many requests begin with it; several blocks of the cache long."""
SUFFIX = "\n\nprint(add_1(1, 2))\n"
KINDS = ("text", "ids", "chat", "llama", "infill")
DRAFTED = "ngramspec:spec_decode_num_draft_tokens_by_source"


@dataclass(frozen=True)
class Ask:
    """A request, and the same for the engine."""

    path: str
    body: dict[str, Any]
    prompt: list[int]
    params: SamplingParams


def asks(engine: Engine) -> list[Ask]:
    """Every kind of request, greedy and seeded, streaming and not, alone and two at a time, some with a hint that changes no token."""
    fim = Fim.detect(engine.tokenizer, FimOptions("auto", middle_lines=MIDDLE_LINES, heals=True))
    assert fim is not None
    hints: Iterator[dict[str, Any]] = itertools.cycle([{}, {"speculation": False}, {}, {"datastore": []}, {"prediction": SHARED}, {}, {}])
    made = []
    for number, (kind, sampled, stream) in enumerate(itertools.product(KINDS, (False, True), (False, True))):
        text, healed = f"{SHARED}def mul_{number % 3}(a, b):\n    ret", ""
        sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 30, "min_p": 0.01, "seed": number} if sampled else {"temperature": 0}
        n = 2 if sampled and kind in ("text", "chat") else 1
        common = {"ignore_eos": True, "stream": stream} | sampling | next(hints)
        prompt = list(text.encode())
        if kind == "text":
            path, body = "/v1/completions", {"prompt": text, "max_tokens": N_TOKENS, "n": n}
        elif kind == "ids":
            path, body = "/v1/completions", {"prompt": prompt, "max_tokens": N_TOKENS}
        elif kind == "chat":
            messages = [{"role": "system", "content": SHARED}, {"role": "user", "content": text}]
            path, body = "/v1/chat/completions", {"messages": messages, "max_tokens": N_TOKENS, "n": n}
            prompt = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            if "prediction" in common:
                common["prediction"] = {"type": "content", "content": common["prediction"]}
        elif kind == "llama":
            path, body = "/completion", {"prompt": text, "n_predict": N_TOKENS, "cache_prompt": bool(number % 2)}
        else:
            path, body = "/infill", {"input_prefix": text, "input_suffix": SUFFIX, "n_predict": N_TOKENS}
            prompt, healed = fim.make_prompt(text, SUFFIX), fim.find_unfinished(text)
        params = SamplingParams(max_tokens=N_TOKENS, n=n, ignore_eos=True, healed=healed, **sampling)
        made.append(Ask(path, body | common, prompt, params))
    return made


def texts(client: httpx.Client, ask: Ask) -> list[str]:
    """What a server answers, choice by choice."""
    found: dict[int, str] = defaultdict(str)

    def take(answer: dict[str, Any]) -> None:
        assert "error" not in answer, answer
        for choice in answer.get("choices", [answer]):
            said = choice.get("message") or choice.get("delta") or choice
            found[choice["index"]] += said.get("content", said.get("text")) or ""

    if ask.body["stream"]:
        with client.stream("POST", ask.path, json=ask.body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    take(json.loads(line[6:]))
    else:
        response = client.post(ask.path, json=ask.body)
        assert response.status_code == 200, response.text
        take(response.json())
    return [found[index] for index in sorted(found)]


@dataclass(frozen=True)
class Truth:
    asks: list[Ask]
    texts: list[list[str]]
    """Of each, as an engine without drafts and cache writes it, one after the other."""
    store: Path
    """A datastore that holds what some of them begin with, and how they go on."""


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Truth]:
    with tiny_engine(tokenizer=fim_tokenizer(), max_seqs=2, prefix_cache=False) as alone:
        wanted = asks(alone)
        written = [
            [choice.text for choice in alone.complete(ask.prompt, ask.params, speculation=False, prefix_cache=False).choices]
            for ask in wanted
        ]
        folder = tmp_path_factory.mktemp("same")
        (folder / "source").mkdir()
        for i, ask in enumerate(wanted):
            if isinstance(ask.body.get("prompt"), str):
                (folder / "source" / f"{i}.py").write_text(ask.body["prompt"] + written[i][0], "utf-8")
        build([folder / "source"], folder / "store", alone.tokenizer.backend_tokenizer, alone.name)
        yield Truth(wanted, written, folder / "store")


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no cache", "prefix cache"])
@pytest.mark.parametrize("stored", [False, True], ids=["no store", "datastore"])
def test_sixteen_clients_get_what_the_engine_writes(
    start_server: Callable[..., Server], truth: Truth, prefix_cache: bool, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeculationThreshold, "get_threshold", lambda *_: 0.0)  # a store is asked as often on a slow machine
    order = random.Random(0).sample(range(len(truth.asks)), len(truth.asks))
    datastore = [str(truth.store)] if stored else []
    with left_clean(tiny_engine(tokenizer=fim_tokenizer(), prefix_cache=prefix_cache, datastore=datastore)) as engine:
        engine.use(cost=tiny.FreeRows())
        server = start_server(engine)
        limits = httpx.Limits(max_connections=N_CLIENTS)
        with httpx.Client(base_url=server.url, timeout=120, limits=limits) as client, ThreadPoolExecutor(N_CLIENTS) as pool:
            answers = dict(zip(order, pool.map(lambda i: texts(client, truth.asks[i]), order), strict=True))
            counted = client.get("/metrics").text
            for i, ask in enumerate(truth.asks):
                assert answers[i] == truth.texts[i], (ask.path, ask.body)
        drafted = {
            sample.labels["source"]: sample.value
            for family in text_string_to_metric_families(counted)
            if family.name == DRAFTED
            for sample in family.samples
        }
        assert (drafted["datastore"] > 0) == stored, "how many are accepted, 0 to 5, depends on which requests share a pass"
        assert sum(row.made for row in engine.status().reliability) > 0
        assert (engine.status().prefix_hits > 0) == prefix_cache
