"""Chat templates in their own process: the text is transformers', and a hostile one ends within its limits."""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ngramspec.prompts.template_process import TemplateLimitError, get_template_processes

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hällo \ud800 \U000f0000"}, {"role": "assistant", "content": " b "}]
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ tools | tojson }}{{ extra }}{% endfor %}"
HOSTILE = {
    "a long loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion with two branches": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a power": "{{ 7 ** (7 ** 9) }}",
    "a power of variables": "{% set n = 9 %}{{ (7 ** (7 ** n)) % 10 }}",
    "a repeated text": "{{ 'x' * 10 ** 10 }}",
    "a doubled text": "{% set ns = namespace(s='x' * 99) %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "a wide format": "{{ '%9999999999d' % 1 }}",
    "a centred text": "{{ 'x' | center(10 ** 10) }}",
    "a replaced text": "{% set s = 'x' * 99999 %}{{ s.replace('x', s).replace('x', s) }}",
    "a list": "{{ ([0] * 10 ** 10) | length }}",
    "a filled batch": "{{ [1] | batch(10 ** 10, 0) | list }}",
    "words": "{{ lipsum(n=10 ** 7) }}",
    "much text": "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
}


def render(template: str, **told: Any) -> str:
    return get_template_processes().render(template, {"messages": MESSAGES, "tools": None, "documents": None} | told)


@pytest.mark.parametrize("template", [PLAIN, "{%- generation %}a{% endgeneration %}\n  {% if x %}b{% endif %}{{ strftime_now('%%') }}"])
def test_the_text_is_transformers_own(template: str) -> None:
    told: dict[str, Any] = {"tools": [{"type": "function", "z": 1, "a": None}], "extra": "<s>", "x": 0, "add_generation_prompt": True}
    (expected,), _ = render_jinja_template(conversations=[MESSAGES], documents=None, chat_template=template, **told)
    assert render(template, **told) == expected


def test_what_a_template_refuses_is_no_limit() -> None:
    for template in ("{{ raise_exception('not so') }}", "{{ 1 / 0 }}", "{{ nobody.knows.it }}", "{% if %}", "{{ 'a'.__class__.mro() }}"):
        with pytest.raises(ValueError, match=r"."):
            render(template)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends(name: str) -> None:
    started = time.monotonic()
    with pytest.raises((TemplateLimitError, ValueError)):
        render(HOSTILE[name])
    assert time.monotonic() - started < 60, "it has a second of the processor; the machine may be busy"
    assert render("{{ messages[1].content }}") == " b "
