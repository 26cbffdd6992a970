"""A real browser for tests: headless Chromium, and the playground as a person handles it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, CHROMEDRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)

CONTRAST = """
const parse = (c) => { const v = c.match(/[\\d.]+/g).map(Number); return v.length > 3 && v[3] === 0 ? null : v.slice(0, 3); };
const light = (c) => {
  const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c) return c; } };
const low = [];
let seen = 0;
for (const e of document.querySelectorAll("body *")) {
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && !e.matches("input, textarea")) continue;
  if (!e.checkVisibility()) continue;
  const style = getComputedStyle(e);
  const found = { text: ratio(parse(style.color), ground(e)) };
  if (/src-(?!model)/.test(e.className)) found.line = ratio(parse(style.textDecorationColor), ground(e.parentElement)) * 1.5;  // 3 to 1
  const field = e.matches(".field input:not([type=checkbox]), textarea");
  if (field) found.edge = ratio(parse(style.borderTopColor), ground(e.parentElement)) * 1.5;
  seen++;
  for (const [what, r] of Object.entries(found)) if (r < 4.5) low.push([e.outerHTML.slice(0, 120), what, r]);
}
return [low, seen];
"""
"""[elements whose text, marks or edges stand out too little from their ground, how many were looked at]."""


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """A headless browser with this new profile, that logs its console and its requests. Skips the test where there is none."""
    for program in (CHROMIUM, CHROMEDRIVER):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian's packages chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The page as a person handles it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.url = ""
        self.refusals: tuple[int, ...] = ()
        """Statuses that the test provokes: the browser reports them on its console."""

    def open(self, url: str, *, width: int = 1280, dark: bool = False) -> Page:
        self.url = url
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(url)
        return self.until(lambda: self.js("return document.querySelector('#server').textContent !== 'Asking the server what it runs…'"))

    def headers(self, **headers: str) -> None:
        """Send these with every request from now on."""
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": headers})

    def until(self, what: Callable[[], Any]) -> Page:
        WebDriverWait(self.driver, 30, poll_frequency=0.05).until(lambda _: what())
        return self

    def js(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def find(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def fill(self, **fields: str) -> Page:
        """Values for fields by id, as if typed."""
        for name, value in fields.items():
            self.js("const f = document.getElementById(arguments[0]); f.value = arguments[1];", name, value)
        return self

    @property
    def running(self) -> bool:
        return "running" in (self.find("body").get_attribute("class") or "")

    def done(self) -> Page:
        return self.until(lambda: not self.running)

    def run(self, button: str = "#run") -> Page:
        """Click and wait for the end of what that begins; what went wrong then, and was not provoked, is said here."""
        before = "about to be run"
        self.js("document.getElementById('status').textContent = arguments[0]", before)
        self.click(button)
        self.until(lambda: self.js("return document.getElementById('status').textContent") != before).done()
        problem = self.js("const p = document.getElementById('problem'); return p.hidden ? '' : p.textContent")
        assert not problem or self.refusals, problem.strip()
        return self

    def tokens(self, lane: int = 0) -> list[tuple[str, str]]:
        """(text, source) of the tokens of an answer."""
        script = """return [...(document.querySelectorAll('.lane')[arguments[0]]?.querySelectorAll('.text .tok') ?? [])].map(
            (t) => [t.textContent, (t.className.match(/src-(\\w+)/) ?? ['', ''])[1]])"""
        return [tuple(pair) for pair in self.js(script, lane)]

    def written(self, lane: int = 0) -> str:
        return "".join(text for text, _ in self.tokens(lane))

    def listen(self) -> Page:
        """Keep a copy of every streamed answer from now on."""
        self.js("""window.heard = [];
            const real = window.fetch;
            window.fetch = async (...asked) => {
              const answer = await real(...asked);
              window.heard.push(answer.clone().text());
              return answer;
            };""")
        return self

    def heard(self) -> list[dict[str, Any]]:
        """The events of the latest answer, as the server sent them."""
        raw = self.driver.execute_async_script("const done = arguments[0]; window.heard.at(-1).then(done)")
        lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def press(self, *keys: str, hold: tuple[str, ...] = ()) -> None:
        chain = ActionChains(self.driver)
        for key in hold:
            chain.key_down(key)
        chain.send_keys(*keys)
        for key in hold:
            chain.key_up(key)
        chain.perform()

    def focused(self) -> str:
        return self.js("const e = document.activeElement; return e.id || e.className || e.tagName")

    def check_clean(self) -> None:
        """Nothing complained: no script error, no breach of the content policy; and nothing was asked of anybody else."""
        complaints = [entry["message"] for entry in self.driver.get_log("browser")]
        provoked = [f"the server responded with a status of {status}" for status in self.refusals]
        assert [c for c in complaints if not any(p in c for p in provoked)] == []
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
        assert asked, "the log of requests is on"
        assert {url for url in asked if not url.startswith((self.url, "data:"))} == set()
