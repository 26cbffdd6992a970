"""Images lose their data, in every form that clients send; all else of a body stays as it is."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest

from ngramspec.server.image_data import drop_image_data

LONG = base64.b64encode(random.Random(1).randbytes(6000)).decode()
SHORT = "aGk="
LINES = base64.encodebytes(random.Random(2).randbytes(6000)).decode()  # as Ruby's Base64.encode64 and MIME have it
FORMS: dict[str, Any] = {
    "openai": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{LONG}", "detail": "low"}},
    "openai, responses": {"type": "input_image", "image_url": f"data:image/svg+xml;base64,{LONG}"},
    "openai, a file": {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{LONG}", "filename": "a.pdf"}},
    "openai, audio": {"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}},
    "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": LONG}},
    "ollama": {"role": "user", "content": "a", "images": [LONG]},
    "ollama, several": {"images": [LONG, SHORT, LONG, f"data:image/png;base64,{LONG}"], "role": "user"},
    "ollama, a short one first": {"images": [SHORT, "", LONG]},
    "in lines": {"images": [LINES, LINES]},
}
TEXTS: list[Any] = [
    {"content": LONG},
    {"content": f'see "url": "{LONG}" and "images": ["{LONG}"]'},
    {"images": [1, LONG]},
    {"images": {"a": LONG}},
    {"prompt": [LONG, LONG]},
    {"url": "https://a.example/" + "a" * 3000},
]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("blanks", [None, (",", ":"), (" ,\n ", " :  ")], ids=["python", "javascript", "spread"])
def test_images_lose_their_data(name: str, blanks: tuple[str, str] | None) -> None:
    turns = {"messages": [*TEXTS, FORMS[name], *TEXTS, FORMS[name]]}
    for body in (whole := json.dumps(turns, separators=blanks).encode(), whole.replace(b"/", b"\\/")):
        left = drop_image_data(body)
        shortened = json.loads(left)["messages"]
        assert [*shortened[:6], *shortened[7:13]] == TEXTS * 2
        assert max(len(each) for form in (shortened[6], shortened[13]) for each in find_texts(form)) < 1060
        places = random.Random(name)
        for _ in range(20):  # as it comes
            at = places.randrange(len(body))
            assert drop_image_data(drop_image_data(body[:at]) + body[at:]) == left


def find_texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [text for each in (value.values() if isinstance(value, dict) else value) for text in find_texts(each)]


def test_escapes_are_not_cut() -> None:
    for n in range(1000, 1040):
        body = '{"images": ["' + "a" * n + "\\/" * 30 + '", "b"]}'
        assert json.loads(drop_image_data(body.encode()))["images"][1] == "b"
