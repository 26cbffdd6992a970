"""Chat templates by llama.cpp's names, for models whose files have none.

A name enters, Jinja leaves. Each is written from what stands before and after a message of each role. None of them begins with the token
that begins texts: that is left to the tokenizer, as in llama.cpp. Knows no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

# What stands before a message, and what after it.
Around: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a family of models writes conversations. Messages of other roles than these three are written as the user's."""

    system: Around
    user: Around
    assistant: Around
    answer: str = ""
    """What an answer begins after."""
    joined: bool = False
    """A system message is the beginning of the user's next one."""
    trimmed: bool = False
    """Messages are without blanks at both ends."""

    def write_template(self) -> str:
        """Return the form as Jinja."""
        text = "(message['content'] or '')" + (" | trim" if self.trimmed else "")
        system, user, assistant = (_write(around, text) for around in (self.system, self.user, self.assistant))
        if self.joined:
            system = f"{{% set held.text = held.text ~ {self.system[0]!r} ~ {text} ~ {self.system[1]!r} %}}"
            user = _write(self.user, f"held.text ~ {text}") + "{% set held.text = '' %}"
        return (
            "{% set held = namespace(text='') %}{% for message in messages %}"
            f"{{% if message['role'] == 'system' %}}{system}{{% elif message['role'] == 'assistant' %}}{assistant}{{% else %}}{user}"
            f"{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {self.answer!r} }}}}{{% endif %}}"
        )


def _write(around: Around, text: str) -> str:
    return f"{{{{ {around[0]!r} ~ ({text}) ~ {around[1]!r} }}}}"


def _make_labelled(
    head: str, end: str, names: tuple[str, str, str] = ("system", "user", "assistant"), *, trimmed: bool = False
) -> ChatForm:
    """Return a form whose messages begin with their role in a heading. `head`: with {} for the role."""
    system, user, assistant = (head.format(name) for name in names)
    return ChatForm((system, end), (user, end), (assistant, end), assistant, trimmed=trimmed)


_LLAMA_2 = ChatForm(("<<SYS>>\n", "\n<</SYS>>\n\n"), ("[INST] ", " [/INST]"), ("", "</s>"), joined=True)
_MISTRAL_V1 = ChatForm(("", "\n\n"), (" [INST] ", " [/INST]"), (" ", "</s>"), joined=True)
_COHERE = ("<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
_FORMS = {
    "chatml": _make_labelled("<|im_start|>{}\n", "<|im_end|>\n"),
    "command-r": _make_labelled("<|START_OF_TURN_TOKEN|>{}", "<|END_OF_TURN_TOKEN|>", _COHERE, trimmed=True),
    "deepseek": ChatForm(("", ""), ("### Instruction:\n", "\n"), ("### Response:\n", "\n<|EOT|>\n"), "### Response:\n"),
    "deepseek2": ChatForm(("", "\n\n"), ("User: ", "\n\n"), ("Assistant: ", "<｜end▁of▁sentence｜>"), "Assistant:"),
    "deepseek3": ChatForm(("", "\n\n"), ("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"), "<｜Assistant｜>"),
    "falcon3": _make_labelled("<|{}|>\n", "\n"),
    "gemma": ChatForm(
        ("", "\n\n"),
        ("<start_of_turn>user\n", "<end_of_turn>\n"),
        ("<start_of_turn>model\n", "<end_of_turn>\n"),
        "<start_of_turn>model\n",
        joined=True,
        trimmed=True,
    ),
    "granite": _make_labelled("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
    "llama2": ChatForm(("", "\n"), _LLAMA_2.user, _LLAMA_2.assistant, joined=True),
    "llama2-sys": _LLAMA_2,
    "llama3": _make_labelled("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", trimmed=True),
    "llama4": _make_labelled("<|header_start|>{}<|header_end|>\n\n", "<|eot|>", trimmed=True),
    "mistral-v1": _MISTRAL_V1,
    "mistral-v3": ChatForm(("", "\n\n"), ("[INST] ", "[/INST]"), (" ", "</s>"), joined=True),
    "mistral-v3-tekken": ChatForm(("", "\n\n"), ("[INST]", "[/INST]"), ("", "</s>"), joined=True),
    "mistral-v7": ChatForm(("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"), ("[INST] ", "[/INST]"), (" ", "</s>")),
    "mistral-v7-tekken": ChatForm(("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("[INST]", "[/INST]"), ("", "</s>")),
    "openchat": ChatForm(
        ("", "<|end_of_turn|>"),
        ("GPT4 Correct User: ", "<|end_of_turn|>"),
        ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        "GPT4 Correct Assistant:",
    ),
    "phi3": _make_labelled("<|{}|>\n", "<|end|>\n"),
    "phi4": _make_labelled("<|im_start|>{}<|im_sep|>", "<|im_end|>"),
    "vicuna": ChatForm(("", "\n\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:"),
    "zephyr": _make_labelled("<|{}|>\n", "<|endoftext|>\n"),
}

NAMED_TEMPLATES: dict[str, str] = {name: form.write_template() for name, form in _FORMS.items()}
