"""Chat templates by llama.cpp's names: what they make of conversations, and where a prompt begins."""

from __future__ import annotations

import pytest
import tiny

from ngramspec.prompts.chat_template import Prompts, Style
from ngramspec.prompts.named_templates import NAMED_TEMPLATES
from ngramspec.prompts.tool_calls.tool_prompt import Turn

TALK = [Turn("system", " S"), Turn("user", "Hi "), Turn("assistant", "Yo"), Turn("user", "x")]
SHOWN = {  # as llama.cpp's `llama_chat_apply_template` has it
    "chatml": "<|im_start|>system\n S<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<start_of_turn>user\nS\n\nHi<end_of_turn>\n<start_of_turn>model\nYo<end_of_turn>\n<start_of_turn>user\nx<end_of_turn>\n"
    "<start_of_turn>model\n",
    "llama2-sys": "[INST] <<SYS>>\n S\n<</SYS>>\n\nHi  [/INST]Yo</s>[INST] x [/INST]",
    "mistral-v1": " [INST]  S\n\nHi  [/INST] Yo</s> [INST] x [/INST]",
    "deepseek3": " S\n\n<｜User｜>Hi <｜Assistant｜>Yo<｜end▁of▁sentence｜><｜User｜>x<｜Assistant｜>",
}


class Encoder:
    """A tokenizer of bytes that begins texts with its token 1."""

    def __init__(self, name: str) -> None:
        self.tokenizer = tiny.byte_tokenizer()
        self.tokenizer.chat_template = NAMED_TEMPLATES[name]

    def encode_text(self, text: str, *, parse_special: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", SHOWN)
def test_conversations(name: str) -> None:
    assert Prompts(Encoder(name)).render_text(TALK) == SHOWN[name]


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_every_template_shows_messages_in_order_and_goes_on(name: str) -> None:
    prompts = Prompts(Encoder(name))
    prompts.check_template()
    text = prompts.render_text(TALK)
    places = [text.index(word) for word in ("S", "Hi", "Yo")]
    assert places == sorted(places)
    assert prompts.render_text([*TALK, Turn("assistant", "On")], style=Style(False, True)).endswith("On")
