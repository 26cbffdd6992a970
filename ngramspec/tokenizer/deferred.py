"""Read a tokenizer from its files with the `tokenizers` library alone; transformers' object is made when something else is asked of it.

Encoding, decoding and the names of special tokens need only `tokenizer.json` and `tokenizer_config.json`. Importing transformers takes a
second. The files are those of a derived folder (`models.start_cache`), which transformers wrote, so both objects have the same backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class DeferredTokenizer:
    """Stands in for a tokenizer of transformers. Attributes that are not defined here are read from one."""

    def __init__(self, folder: Path) -> None:
        """Read the files in `folder`. Raises OSError, ValueError."""
        path = folder / "tokenizer.json"
        self._config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_bytes())
        template, named = folder / "chat_template.jinja", self._config.pop("chat_template", None)
        self.chat_template: str | dict[str, str] | None = template.read_text(encoding="utf-8") if template.is_file() else None
        """Its text, None if there is none; of several, their texts by their names."""
        if named is not None:
            self.chat_template = {each["name"]: each["template"] for each in named}
        if not path.is_file():
            raise FileNotFoundError(path)
        try:
            self.backend_tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{path} is no tokenizer: {error}") from error
        self.backend_tokenizer.no_truncation()  # which some files ask for, and transformers does when it is asked to
        self.backend_tokenizer.no_padding()
        tokens = {name: self._config.get(name) for name in _SPECIAL}
        self.special_tokens_map = {name: _to_text(token) for name, token in tokens.items() if token is not None}
        """The texts of the special tokens, by their names."""

    @cached_property
    def whole(self) -> PreTrainedTokenizerFast:
        """transformers' object over the same backend."""
        from transformers import PreTrainedTokenizerFast

        config = self._config | {"chat_template": self.chat_template}
        return PreTrainedTokenizerFast(tokenizer_object=self.backend_tokenizer, **config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "backend_tokenizer" not in self.__dict__:
            raise AttributeError(name)
        if name.removesuffix("_id") in _SPECIAL and name.endswith("_id"):
            text = self.special_tokens_map.get(name.removesuffix("_id"))
            return None if text is None else self.backend_tokenizer.token_to_id(text)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str | list[str], *, add_special_tokens: bool = True, **options: Any) -> Mapping[str, Any]:
        if options or not isinstance(text, str):
            return self.whole(text, add_special_tokens=add_special_tokens, **options)
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        if options != {"clean_up_tokenization_spaces": False} or not isinstance(ids, list) or any(isinstance(each, list) for each in ids):
            return self.whole.decode(ids, skip_special_tokens=skip_special_tokens, **options)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """Return the chat template: of several the one of this name, for tools, or the default. Raises ValueError if there is none."""
        if isinstance(own := self.chat_template, dict):
            name = chat_template or ("tool_use" if tools is not None and "tool_use" in own else "default")
            return own.get(name) or self.whole.get_chat_template(chat_template, tools)
        return chat_template or own or self.whole.get_chat_template(chat_template, tools)

    def convert_ids_to_tokens(self, ids: int | list[int]) -> Any:
        """Return the string of a token, None if there is no such one, or those of a list."""
        return self.backend_tokenizer.id_to_token(ids) if isinstance(ids, int) else list(map(self.backend_tokenizer.id_to_token, ids))


def _to_text(token: Any) -> str:
    """Return the text of a special token, which a config has as a string or as the fields of an AddedToken."""
    return str(token["content"] if isinstance(token, dict) else token)
