"""The page in a real browser, on a real server. The model writes a text that is known beforehand, and so is what the page must show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import CONTRAST, Page, chromium
from scripted import Gate, reciting_engine, tokenizer_with
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from ngramspec.datastore.build import build as build_store
from ngramspec.engine.llm_engine import Engine
from ngramspec.server.playground import POLICY
from ngramspec.server.settings import Key, ServerSettings

IMAGE = "<img src=x onerror=\"document.title='ran'\">"  # one token of the model's
HOSTILE = f"{IMAGE}</div><script>document.title='ran'</script>\n"
PROMPT = f"def area(w, h):\n    return w * h\n\n{HOSTILE.replace('x', 'y')}"
STORED = "class Quaternion:\n    def norm(self):\n        return math.hypot(*self.parts)\n"
EXPECTED = "for each in sorted(found, key=len):\n    print(each.upper())\n"
ANSWER = f"ok: {STORED}\n# {HOSTILE}{EXPECTED}def area(w, h):\n    return w * h\nünïcode 日本 😀 end\n"
KEY, ADMIN = "a-key-for-tests", "an-administrators-key"


@dataclass
class Recital:
    url: str
    engine: Engine
    gate: Gate
    in_flight: Callable[[], int]


@pytest.fixture(scope="module")
def recital(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recital]:
    """A server with room for two texts, whose model writes ANSWER behind PROMPT and has a datastore that holds STORED."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "src").mkdir()
    (root / "src" / "quaternion.py").write_text(f"import math\n\n\n{STORED}")
    tokenizer = tokenizer_with(IMAGE)
    build_store([root / "src"], root / "maths", tokenizer.backend_tokenizer, "tiny")
    engine, gate = reciting_engine(PROMPT + ANSWER, tokenizer, datastore=root / "maths", similar=False, answers=0, recycle=False)
    with engine:
        server = start_server(engine, ServerSettings(max_queue=0))
        yield Recital(server.url, engine, gate, lambda: server.app.state.server.admission.in_flight)
        gate.open()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def page(driver: webdriver.Chrome) -> Iterator[Page]:
    page = Page(driver)
    driver.get("about:blank")
    for log in ("browser", "performance"):
        driver.get_log(log)
    yield page
    if page.url:
        driver.execute_script("localStorage.clear(); sessionStorage.clear()")
    page.headers()
    page.check_clean()


def ask(url: str, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": 400, "return_sources": True, "speculative_metrics": "detailed"} | body
    return httpx.post(url + path, json=body, timeout=60).raise_for_status().json()


def recite(page: Page, recital: Recital, **options: Any) -> Page:
    return page.open(recital.url, **options).fill(prompt=PROMPT, max_tokens="400", prediction=EXPECTED)


# ------------------------------------------------------------------ what is shown


def test_tokens_come_with_their_sources(page: Page, recital: Recital) -> None:
    assert ask(recital.url, prompt=PROMPT, prediction=EXPECTED)["choices"][0]["text"] == ANSWER
    recite(page, recital).listen().run()
    assert page.written() == ANSWER
    sent = [token for event in page.heard() for choice in event["choices"] for token in choice["ngramspec"]["tokens"]]
    sources = [(token["text"], (token["source"] or "model").split(":")[0]) for token in sent]
    assert page.tokens() == [(text, source) for text, source in sources if text]
    counts = Counter(source for _, source in sources)
    assert {"model", "ngram", "datastore", "prediction"} <= set(counts)
    legend = page.js("return [...document.querySelectorAll('.legend li')].map((e) => [e.dataset.source, e.querySelector('b').textContent])")
    assert {name: int(n) for name, n in legend} == counts
    marks = page.js(
        "return [...document.querySelectorAll('.legend .tok')].map((e) => getComputedStyle(e).textDecorationStyle + e.className)"
    )
    assert len({mark.split("tok")[0] for mark in marks if "model" not in mark}) == len(counts) - 1, "told apart without colour"


def test_figures_of_a_run(page: Page, recital: Recital) -> None:
    recite(page, recital).listen().run()
    last = page.heard()[-1]
    metrics, n_tokens = last["metrics"]["speculative_decoding"], last["usage"]["completion_tokens"]
    stats = page.js("return Object.fromEntries([...document.querySelectorAll('[data-stat]')].map((e) => [e.dataset.stat, e.textContent]))")
    assert int(stats["tokens"]) == n_tokens == len(recital.engine.encode(ANSWER)) + 1
    assert float(stats["per_pass"]) == pytest.approx(n_tokens / (n_tokens - metrics["num_accepted_draft_tokens"]), abs=0.005)
    assert float(stats["rate"]) > 0
    bars = page.js("return [...document.querySelectorAll('.bars .count')].map((e) => Number(e.textContent || 0))")
    assert sum(bars) == metrics["num_spec_steps"] > 0
    assert bars[:16] == metrics["acceptance_histogram"][: len(bars)][:16]
    assert str(metrics["num_accepted_draft_tokens"]) in page.text(".lengths .hint")


def test_pointing_at_a_token_says_where_it_came_from(page: Page, recital: Recital) -> None:
    recite(page, recital).run()
    for source, expected in (("datastore", "quaternion.py:"), ("prediction", "Expected output, line 1"), ("ngram", "Prompt, line ")):
        marked = page.driver.find_elements(By.CSS_SELECTOR, f".text .src-{source}")[3]
        ActionChains(page.driver).scroll_to_element(marked).move_to_element(marked).perform()
        page.until(lambda expected=expected: expected in page.text("#inspector"))


def test_markup_is_text(page: Page, recital: Recital) -> None:
    recite(page, recital).run("#compare")
    assert HOSTILE in page.written()
    assert IMAGE in dict(page.tokens())
    page.js("document.querySelector('.text .src-ngram').focus()")
    assert page.js("return document.images.length + document.querySelectorAll('body script').length") == 0
    assert page.driver.title == "ngramspec playground"


def test_compare(page: Page, recital: Recital) -> None:
    recite(page, recital).run("#compare")
    assert page.written(0) == page.written(1) == ANSWER
    assert {source for _, source in page.tokens(1)} == {"model"}
    assert page.text("#badge").endswith("Identical")
    assert "differs" not in page.find("#verdict").get_attribute("class")
    took = page.js(
        "return ['draft', 'plain'].map((name) => parseFloat(document.getElementById(`time-${name}`).style.getPropertyValue('--share')))"
    )
    assert took[1] / took[0] == pytest.approx(float(page.find("#verdict").get_attribute("data-factor")), rel=0.01)
    assert "times as" in page.text("#verdict-text")


def test_compare_measures_both_alike(page: Page, recital: Recital) -> None:
    """Both compute the prompt: neither finds it in the prefix cache, though it was computed before."""
    recite(page, recital).run()
    page.listen().run("#compare")
    used = [event["usage"] for event in page.heard() if event.get("usage")]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in used] == [0] * len(used)
    assert used


def test_compare_adds_what_is_missing(page: Page, recital: Recital) -> None:
    recite(page, recital).run()
    page.js("window.first = document.querySelector('.lane')")
    page.run("#compare")
    assert page.js("return document.querySelectorAll('.lane').length") == 2
    assert page.js("return document.querySelector('.lane') === window.first"), "the same request was not asked again"
    page.fill(prompt=PROMPT[1:]).run("#compare")
    assert not page.js("return document.querySelector('.lane') === window.first"), "another one was"
    assert page.text("#badge").endswith("Identical")


def test_texts_that_differ_are_told_apart(page: Page, server: Any) -> None:
    page.open(server.url).fill(prompt="hello", temperature="1.2", max_tokens="40", seed="1")
    page.js("""const real = window.fetch;
        window.fetch = (path, options) => {
          const body = options.body && JSON.parse(options.body);
          return real(path, body?.speculation === false ? { ...options, body: JSON.stringify({ ...body, seed: body.seed + 1 }) } : options);
        };""")
    page.run("#compare")
    assert page.written(0) != page.written(1)
    assert page.text("#badge").endswith("Different")
    assert "differs" in page.find("#verdict").get_attribute("class")
    a, b = page.written(0), page.written(1)
    n_same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert f"From character {n_same + 1} on" in page.text("#verdict-text")


def test_chat(page: Page, server: Any) -> None:
    page.open(server.url).fill(prompt="Say <|im_end|> hello", max_tokens="30", prediction="hello hello")
    page.click('.switch label:has([value="chat"])')
    page.run("#compare")
    messages = [{"role": "user", "content": "Say <|im_end|> hello"}]
    truth = ask(server.url, "/v1/chat/completions", messages=messages, max_tokens=30)
    assert page.written(0) == page.written(1) == truth["choices"][0]["message"]["content"] != ""


def test_without_a_chat_template_there_is_no_chat(page: Page, recital: Recital) -> None:
    page.open(recital.url)
    assert not page.find('[value="chat"]').is_enabled()
    assert page.find("#no-chat").is_displayed()


def test_parameters_reach_the_server(page: Page, recital: Recital) -> None:
    recite(page, recital).fill(**{"stop-strings": "norm(\\n\n# <img", "max_tokens": "300"})
    page.click('[name="datastore"]')
    page.run()
    assert page.written() == ANSWER[: ANSWER.index("# <img")]
    assert "datastore" not in {source for _, source in page.tokens()}
    page.fill(**{"stop-strings": "", "max_tokens": "7"}).run()
    assert page.written() == ANSWER[:7]
    assert "token limit" in page.text(".ending")
    page.fill(max_tokens="0").click("#run")
    assert page.js("return document.activeElement.id") == "max_tokens", "the browser points at the field"
    assert page.written() == ANSWER[:7]


# ------------------------------------------------------------------ stopping, errors, keys


@contextmanager
def held(recital: Recital, free: int) -> Iterator[None]:
    recital.gate.shut(free)
    try:
        yield
    finally:
        recital.gate.open()


def test_stop(page: Page, recital: Recital) -> None:
    recite(page, recital)
    with held(recital, free=3):
        page.click("#run")
        page.until(lambda: recital.gate.held.is_set() and page.written())
        assert page.running
        assert ANSWER.startswith(page.written()), "tokens are shown as they come"
        assert [page.find(f"#{name}").get_attribute("aria-disabled") for name in ("run", "compare", "stop")] == ["true", "true", "false"]
        page.click("#stop")
        page.done()
        assert page.text("#status") == "Stopped."
    page.until(lambda: recital.in_flight() == 0)
    assert 0 < len(page.written()) < len(ANSWER)
    page.run()
    assert page.written() == ANSWER, "and it can be run again"


def test_a_full_server_says_when_to_try_again(page: Page, recital: Recital) -> None:
    page.refusals = (429,)
    recite(page, recital)
    body = {"prompt": PROMPT, "max_tokens": 400, "n": 2, "stream": True}
    with held(recital, free=1), httpx.stream("POST", f"{recital.url}/v1/completions", json=body, timeout=60) as other:
        pieces = other.iter_raw()  # kept: without its iterator the response is closed
        next(pieces)
        page.run()
        assert "The server is busy" in page.text("#problem-text")
        assert "Try again in " in page.text("#problem-text")
        assert page.js("return document.querySelectorAll('.lane').length") == 0
    page.until(lambda: recital.in_flight() == 0)
    page.run("#again")
    assert page.written() == ANSWER
    assert not page.find("#problem").is_displayed()


def test_an_error_is_shown_as_text(page: Page, recital: Recital) -> None:
    page.refusals = (400,)
    page.open(recital.url).fill(prompt="x" * 2000).run()
    assert "2000 tokens" in page.text("#problem-text")
    assert not page.running


@pytest.fixture(scope="module")
def locked(start_server: Callable[..., Any], recital: Recital) -> str:
    keys = (Key(key=KEY, name="reader", stores=frozenset()), Key(key=ADMIN, name="boss", admin=True))
    return start_server(recital.engine, ServerSettings(api_keys=keys)).url


def test_a_key(page: Page, locked: str) -> None:
    page.refusals = (401,)
    page.open(locked)
    assert page.find("#key-field").is_displayed()
    assert page.focused() == "key"
    page.press("not-a-good-key", Keys.ENTER)
    page.until(lambda: "does not know this key" in page.text("#problem-text"))
    page.fill(key=KEY).click("#key-use")
    page.until(lambda: "bit" in page.text("#server"))
    assert not page.find("#stores").is_displayed(), "this key may use none"
    page.fill(prompt=PROMPT, max_tokens="400").run()
    assert page.written() == ANSWER
    assert page.js("return Object.values(localStorage).concat(document.cookie).join('')") == ""
    page.driver.refresh()
    page.until(lambda: "bit" in page.text("#server"))
    assert not page.find("#problem").is_displayed(), "the tab keeps the key"


def test_without_leave_to_see_sources_the_text_comes_without_marks(page: Page, locked: str) -> None:
    page.refusals = (401, 403)
    page.open(locked).fill(key=KEY).click("#key-use")
    page.until(lambda: "bit" in page.text("#server"))
    page.headers(**{"X-Forwarded-For": "203.0.113.9"})  # as behind a proxy: from now on not of this machine
    page.fill(prompt=PROMPT, max_tokens="400").run("#compare")
    assert page.written(0) == page.written(1) == ANSWER
    assert {source for _, source in page.tokens()} == {""}
    assert page.find("#no-sources").is_displayed()
    assert page.text("#badge").endswith("Identical")
    page.driver.refresh()
    page.until(lambda: page.find("#no-sources").is_displayed())


# ------------------------------------------------------------------ who uses it how


def test_keyboard_alone(page: Page, recital: Recital) -> None:
    page.open(recital.url)
    seen = []
    for _ in range(40):
        page.press(Keys.TAB)
        seen.append(page.focused())
        if seen[-1] == "prompt":
            break
    assert seen[-1] == "prompt"
    assert page.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid", "focus is visible"
    ActionChains(page.driver).send_keys(PROMPT).perform()
    page.fill(max_tokens="400")
    page.press(Keys.ENTER, hold=(Keys.CONTROL,))
    page.until(lambda: page.written() == ANSWER).done()
    page.press(Keys.ENTER, hold=(Keys.CONTROL, Keys.SHIFT))
    page.until(lambda: page.find("#badge").is_displayed()).done()
    for _ in range(40):
        page.press(Keys.TAB)
        if page.js("return document.activeElement.matches('.text .tok')"):
            break
    assert page.js("return document.activeElement.dataset.index") == "0"
    assert "Token 1 " in page.text("#inspector")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert "Token 2 " in page.text("#inspector")
    page.press(Keys.ARROW_DOWN)
    assert page.js("return document.activeElement.className !== document.activeElement.previousSibling.className"), "the next source"
    page.press(Keys.END)
    assert page.js("return document.activeElement.nextSibling") is None
    page.press(Keys.ESCAPE)
    assert not page.find("#inspector").is_displayed()
    with held(recital, free=2):
        page.press(Keys.ENTER, hold=(Keys.META,))
        page.until(lambda: recital.gate.held.is_set() and page.running)
        page.press(Keys.ESCAPE)
        page.done()
        assert page.text("#status") == "Stopped."


def test_every_field_has_a_name_and_the_text_does_not_shout(page: Page, recital: Recital) -> None:
    recite(page, recital).run("#compare")
    unnamed = """return [...document.querySelectorAll('input, textarea, button')].filter(
        (e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel)).map((e) => e.outerHTML)"""
    assert page.js(unnamed) == []
    assert (
        page.js("return document.querySelectorAll('[aria-live] .text, [role=status] .text, [role=alert] .text, .text[aria-live]').length")
        == 0
    )
    assert "identical" in page.find("#status").text


def test_phone_width(page: Page, recital: Recital) -> None:
    too_wide = "return document.documentElement.scrollWidth - innerWidth"
    page.open(recital.url, width=390)
    assert page.js(too_wide) <= 0
    page.fill(prompt=PROMPT, max_tokens="400").run("#compare")
    page.js("document.querySelector('.text .tok').focus()")
    assert page.js(too_wide) <= 0
    top_and_bottom = "const r = document.querySelector(arguments[0]).getBoundingClientRect(); return [r.top, r.bottom]"
    with held(recital, free=2):
        page.js("scrollTo(0, 0); document.getElementById('form').requestSubmit()")
        page.until(lambda: recital.gate.held.is_set() and page.running)
        assert page.js(top_and_bottom, "#results")[0] < 20, "the answer is in sight"
        assert 0 < page.js(top_and_bottom, "#stop")[1] <= page.js("return innerHeight"), "and so is the way to stop it"
        page.click("#stop")
        page.done()
    assert page.js("return Math.max(...[...document.querySelectorAll('body *')].map((e) => e.getBoundingClientRect().right))") <= 390


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(page: Page, recital: Recital, dark: bool) -> None:
    recite(page, recital, dark=dark)
    brightness = page.js("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)")
    assert (brightness < 200) == dark
    assert page.js(CONTRAST)[0] == []
    page.run("#compare")
    page.js("document.querySelector('.text .src-ngram').focus()")
    page.js("""for (const id of ['problem', 'no-sources', 'key-field', 'no-chat']) document.getElementById(id).hidden = false;
        document.getElementById('problem-text').textContent = 'An error.'; document.getElementById('prediction-box').open = true;
        const box = document.querySelector('.text');
        for (const name of ['similar', 'answers', 'recycled', 'syntax', 'other']) {
          const t = box.appendChild(document.createElement('span')); t.className = `tok src-${name}`; t.textContent = name;
        }""")
    low, seen = page.js(CONTRAST)
    assert low == []
    assert seen > 200
    page.js("document.getElementById('verdict').classList.add('differs')")
    assert page.js(CONTRAST)[0] == []


def test_the_choice_of_colours_is_kept(page: Page, recital: Recital) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    page.open(recital.url)
    light = page.js(ground)
    assert page.text("#theme") == "Dark"
    page.click("#theme")
    assert page.js(ground) != light
    assert page.text("#theme") == "Light"
    page.driver.refresh()
    assert page.js(ground) != light
    page.click("#theme")
    assert page.js(ground) == light


# ------------------------------------------------------------------ the files


def test_policy_and_files(recital: Recital, locked: str) -> None:
    for url in (recital.url, locked):
        with httpx.Client(base_url=url) as client:
            for path in ("/", *(f"/static/{file.name}" for file in static_files())):
                answer = client.get(path)
                assert answer.status_code == 200
                assert answer.headers["content-security-policy"] == POLICY
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["referrer-policy"] == "no-referrer"
            for path in (
                "/static/",
                "/static/nothing.js",
                "/static/..%2fplayground.py",
                "/static/%2e%2e/playground.py",
                "/static/index.html%00",
            ):
                assert client.get(path).status_code in (401, 404)
    assert httpx.get(f"{locked}/playground/config").status_code == 401
    assert "unsafe" not in POLICY


def test_nothing_inline_and_nothing_as_markup() -> None:
    html = next(file for file in static_files() if file.name == "index.html").read_text("utf-8")
    assert " style=" not in html
    assert "<style" not in html
    assert all(" src=" in tag.partition(">")[0] for tag in html.split("<script")[1:])
    for file in static_files():
        text = file.read_text("utf-8")
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), f"{file.name} names no other site"
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "setHTML"):
            assert way not in text


def static_files() -> list[Path]:
    import ngramspec.server

    assert ngramspec.server.__file__
    return sorted((Path(ngramspec.server.__file__).parent / "static").iterdir())
