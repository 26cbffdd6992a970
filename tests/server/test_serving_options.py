"""What a server is told at its start and every request sees: defaults of sampling, a prefix of paths, a chat template, a Unix socket."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn
from pydantic import ValidationError
from starlette.testclient import TestClient

from ngramspec.cli.common import BadInputError
from ngramspec.cli.serve_options import parse_object, parse_sampling
from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import InvalidInputError
from ngramspec.server.app import create_app
from ngramspec.server.run import listen, make_uvicorn_config
from ngramspec.server.settings import ServerSettings

ROUTES = [("/v1/completions", {"prompt": "a"}), ("/completion", {"prompt": "a"})]


def client(engine: Engine, settings: ServerSettings) -> TestClient:
    return TestClient(create_app(engine, settings), base_url="http://localhost")


@pytest.mark.parametrize(("path", "body"), [*ROUTES, ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})])
def test_requests_that_do_not_say_get_the_servers_sampling(engine: Engine, path: str, body: dict[str, object]) -> None:
    own = {"temperature": 0.9, "top_k": 7, "seed": 5, "max_tokens": 4, "ignore_eos": True}
    with client(engine, ServerSettings(sampling=own)) as theirs, client(engine, ServerSettings()) as plain:
        for more in ({}, {"temperature": 0.1}, {"seed": 6, "top_k": 2}, {"max_tokens": 2}):
            answers = [theirs.post(path, json=body | more).json(), plain.post(path, json=body | own | more).json()]
            assert len({str(answer.get("content") or answer["choices"]) for answer in answers}) == 1
        settings = theirs.get("/props").json()["default_generation_settings"]["params"]
    assert {name: settings[name] for name in ("temperature", "top_k", "seed", "n_predict")} == {
        "temperature": 0.9,
        "top_k": 7,
        "seed": 5,
        "n_predict": 4,
    }


def test_sampling_that_cannot_be_is_refused_at_the_start() -> None:
    for wrong in ({"temperature": -1}, {"speed": 1}, {"grammar": "a"}):
        with pytest.raises(ValidationError):
            ServerSettings(sampling=wrong)
    assert parse_sampling(["temperature=0.2", 'bad_words=["a"]']) == {"temperature": 0.2, "bad_words": ["a"]}
    assert parse_sampling(["stop=" + "[" * 100_000]) == {"stop": "[" * 100_000}
    with pytest.raises(BadInputError):
        parse_sampling(["temperature"])


def test_all_routes_are_under_the_prefix(engine: Engine) -> None:
    with client(engine, ServerSettings(api_prefix="/llm/one")) as prefixed:
        assert prefixed.get("/llm/one/health").status_code == 200
        assert prefixed.post("/llm/one/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        for path in ("/health", "/llm/health", "/llm/onehealth", "/llm/one//health"):
            assert prefixed.get(path).status_code == 404
    with pytest.raises(ValidationError):
        ServerSettings(api_prefix="llm/")


def test_a_proxy_shows_the_server_under_a_path(engine: Engine) -> None:
    with client(engine, ServerSettings(root_path="/llm")) as served:
        for path in ("/health", "/llm/health", "/llm/v1/models"):
            assert served.get(path).status_code == 200
        assert served.get("/llmhealth").status_code == 404


def test_metrics_have_llamacpps_names_or_are_off(engine: Engine) -> None:
    with client(engine, ServerSettings()) as served:
        answer = served.post("/completion", json={"prompt": "abc", "n_predict": 3}).json()
        metrics = served.get("/metrics")
        assert int(metrics.headers["Process-Start-Time-Unix"]) > 0
        values = dict(line.split(" ") for line in metrics.text.splitlines() if line.startswith("llamacpp:"))
        assert all(f"# TYPE {name} " in metrics.text for name in values)
        assert float(values["llamacpp:tokens_predicted_total"]) == answer["timings"]["predicted_n"] == 3
        assert float(values["llamacpp:prompt_tokens_total"]) == answer["timings"]["prompt_n"]
        assert float(values["llamacpp:n_tokens_max"]) == answer["tokens_evaluated"] + 3
        assert "n_tokens_max_total" in served.get("/metrics", headers={"Accept": "application/openmetrics-text"}).text
    with client(engine, ServerSettings(metrics=False)) as served:
        assert served.get("/metrics").status_code == 501


def test_what_the_server_says_for_requests_that_do_not(engine: Engine) -> None:
    settings = ServerSettings(return_tokens_as_token_ids=True, force_include_usage=True, prefill_assistant=True)
    hi, begun = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "One, "}
    with client(engine, settings) as served:
        answer = served.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "logprobs": 1}).json()
        assert answer["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        assert '"usage":{' in served.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "stream": True}).text
        assert served.post("/apply-template", json={"messages": [hi, begun]}).json()["prompt"].endswith("One, ")
        ended = served.post("/apply-template", json={"messages": [hi, begun], "add_generation_prompt": False}).json()["prompt"]
        assert ended.endswith("<|im_end|>\n")
        assert served.post("/apply-template", json={"messages": [hi, begun, begun]}).status_code == 400


def test_times_of_every_request(engine: Engine) -> None:
    with client(engine, ServerSettings(per_request_metrics=True)) as served:
        for n in (1, 4):
            times = served.post("/v1/completions", json={"prompt": "a", "max_tokens": n, "ignore_eos": True}).json()["metrics"]
            assert all(value >= 0 for value in times.values())
            assert times["tokens_per_second"] > 0
            assert ("mean_itl_ms" in times) is (n > 1)


def test_variables_of_the_template(engine: Engine) -> None:
    before = engine.tokenizer.chat_template
    engine.tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}{{ place }}"
    try:
        with client(engine, ServerSettings(chat_template_kwargs={"mood": "calm", "place": "here"})) as served:
            body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"mood": "wild"}}
            assert served.post("/apply-template", json=body).json()["prompt"] == "awildhere"
        with pytest.raises(InvalidInputError):
            client(engine, ServerSettings(chat_template_kwargs={"messages": []}))
    finally:
        engine.tokenizer.chat_template = before
    assert parse_object('{"a": 1}') == {"a": 1}
    for wrong in ("[1]", "{", "[" * 100_000):
        with pytest.raises(BadInputError):
            parse_object(wrong)


def test_any_page_may_ask_without_credentials(engine: Engine) -> None:
    with client(engine, ServerSettings(cors_origins="*")) as served:
        wanted = {
            "Origin": "https://site.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "Authorization",
        }
        answer = served.options("/completions", headers=wanted)
        assert answer.headers["access-control-allow-origin"] == "https://site.example"
        assert "access-control-allow-credentials" not in answer.headers
        assert served.delete("/admin/datastores/x", headers={"Origin": "https://site.example"}).status_code == 403


def test_a_template_is_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}", "utf-8")
    assert ServerSettings(chat_template=str(file)).chat_template == "{{ messages }}"
    assert ServerSettings(chat_template="{{ a }}").chat_template == "{{ a }}"
    assert "<|im_start|>" in ServerSettings(chat_template="chatml").chat_template
    marked = "{% generation %}{{ a }}{%- endgeneration -%}{% for m in a %}{% break %}{% endfor %}"
    assert ServerSettings(chat_template=marked).chat_template == marked
    for wrong in ("no-such-file", "{{ messages", "{% for m in messages %}"):
        with pytest.raises(ValidationError, match="Jinja"):
            ServerSettings(chat_template=wrong)


def test_pages_of_this_machine_may_ask(engine: Engine) -> None:
    with client(engine, ServerSettings(cors_origins="localhost")) as served:
        for origin, allowed in (("http://localhost:3000", True), ("http://[::1]:1", True), ("http://localhost.evil.com", False)):
            answer = served.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"Origin": origin})
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


def test_a_unix_socket(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    settings = ServerSettings(host=str(path))
    listen(settings.host, 0).close()  # what an earlier server left
    listener = listen(settings.host, 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(OSError, match="cannot listen"):
        listen(settings.host, 0)
    server = uvicorn.Server(make_uvicorn_config(create_app(engine, settings), settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=60) as http:
            body = {"prompt": "a", "max_tokens": 3, "return_sources": True}  # as from this machine
            assert http.post("/v1/completions", json=body).status_code == 200
            assert http.get("/health", headers={"Host": "evil.example"}).status_code == 403
            assert http.get("/health", headers={"Host": "server.sock"}).status_code == 200
    finally:
        server.should_exit = True
        thread.join(10)
    (tmp_path / "file.sock").write_text("x")
    with pytest.raises(OSError, match="cannot listen"):
        listen(str(tmp_path / "file.sock"), 0)
    assert (tmp_path / "file.sock").read_text() == "x"
