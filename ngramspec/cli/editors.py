"""What to paste into editors so that they use a running server: llama.vim, llama.vscode, Continue and Zed.

The server's address and its model's name enter, texts leave; docs/server.md explains them. Knows nothing of servers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from string import Template
from urllib.parse import quote

LLAMA_VIM = Template("""let g:llama_config = {'endpoint_fim': '$url/infill', 'endpoint_inst': '$url/v1/chat/completions'}""")

LLAMA_VSCODE = Template("""{"llama-vscode.endpoint": "$url", "llama-vscode.endpoint_chat": "$url", "llama-vscode.ai_model": $model}""")

CONTINUE = Template("""name: ngramspec
version: 0.0.1
schema: v1
models:
  - name: ngramspec
    provider: openai
    model: $model
    apiBase: $url/v1
    roles: [chat, edit, apply]
  - name: ngramspec at the cursor
    provider: llama.cpp
    model: qwen2.5-coder
    apiBase: $url/
    roles: [autocomplete]""")

ZED = Template("""{
  "language_models": {
    "openai_compatible": {
      "ngramspec": {
        "api_url": "$url/v1",
        "available_models": [
          {
            "name": $model,
            "max_tokens": 8192,
            "capabilities": {"tools": true, "images": false, "parallel_tool_calls": true, "prompt_cache_key": false}
          }
        ]
      }
    }
  }
}""")

# What each is given, by where it goes
EDITORS = {
    "llama.vim, before it loads": LLAMA_VIM,
    "llama.vscode, in settings.json": LLAMA_VSCODE,
    "Continue, in ~/.continue/config.yaml": CONTINUE,
    "Zed, in settings.json": ZED,
}


def make_address(url: str, name: str) -> str:
    """Return the address of a working tree of a server."""
    return f"{url}/repo/{quote(name, safe='')}"


def format_settings(url: str, model: str, repositories: Iterable[str], *, infill: bool, keys: bool) -> str:
    """Return what the four editors are given. `repositories`: the names of the server's working trees. Several have an address each."""
    names = list(repositories)
    several = len(names) > 1
    text = [] if infill else [f"{model} was not trained to fill in the middle: completion at the cursor needs a model that was.", ""]
    if keys:
        text += ["This server wants a key, which every editor has a setting for.", ""]
    if several:
        text += ["Each working tree has an address. What follows is for the first; for another, put its address instead.", ""]
        text += [*(f"  {make_address(url, name)}" for name in names), ""]
    for place, template in EDITORS.items():
        pasted = template.substitute(url=make_address(url, names[0]) if several else url, model=json.dumps(model))
        text += [f"{place}:", "", pasted, ""]
    return "\n".join(text)
