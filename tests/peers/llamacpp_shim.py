# ruff: noqa: E402 - a module that is missing is put in place first
"""A pytest plugin under which llama.cpp's server tests start our server, in this process, instead of `llama-server`.

Its options become our settings. The model is SmolLM2 instead of a tiny one that only knows stories, so what those tests expect of its words
(`match_regex`) is not compared. Needs the folder of llama.cpp's tests on the path.
"""

from __future__ import annotations

import sys
import types
from typing import Any

sys.modules["wget"] = types.ModuleType("wget")  # only models are downloaded with it

import utils
from own_server import OwnServer, pytest_unconfigure  # noqa: F401 - pytest calls it
from requests.structures import CaseInsensitiveDict

from ngramspec.server.settings import ServerSettings

UNSUPPORTED = ("server_embeddings", "server_reranking", "lora_files", "models_dir", "models_preset", "sleep_idle_seconds", "mmproj_url")


def start(self: Any, timeout_seconds: int = 60) -> None:
    """Serve with what the settings of a test's `ServerProcess` mean to us."""
    if asked := [name for name in UNSUPPORTED if getattr(self, name)] or (["server_tools"] if self.server_tools else []):
        raise NotImplementedError(f"not done here: {', '.join(asked)}")
    n_slots = self.n_slots or 4
    length = (self.n_ctx or 4096) // (1 if self.kv_unified else n_slots)
    self.running = OwnServer(make_settings(self), max_model_len=length, max_seqs=n_slots)
    self.process = None
    utils.server_instances.add(self)


def make_settings(process: Any) -> ServerSettings:
    given = {
        "host": process.server_host,
        "port": process.server_port,
        "alias": ",".join(sorted((process.model_alias or "").split(","))),  # a set there
        "tags": process.model_tags or "",
        "admin_on_loopback": process.api_key is None,
        "api_keys": process.api_key or (),
        "sampling": {"temperature": process.temperature, "seed": process.seed},
        "playground": not process.no_ui,
        "slots": bool(process.server_slots),
        "metrics": bool(process.server_metrics),
        "prefill_assistant": True,
        "chat_template_kwargs": {"enable_thinking": process.reasoning != "off"},
        "cors_origins": process.cors_origins or "*",
        "chat_template": process.chat_template_file or process.chat_template or "",
    }
    if process.n_predict is not None and process.n_predict > 0:
        given["sampling"]["max_tokens"] = process.n_predict
    return ServerSettings(**given)


def make_request(self: Any, method: str, path: str, data: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Ask for `__verbose` where the test has started `llama-server --verbose`."""
    if self.debug and isinstance(data, dict) and "messages" in data:
        data = {"verbose": True} | data
    response = _make_request(self, method, path, data, *args, **kwargs)
    response.headers = CaseInsensitiveDict(response.headers)  # as names of headers are
    return response


def stop(self: Any) -> None:
    utils.server_instances.discard(self)
    if (running := getattr(self, "running", None)) is not None:
        self.running = None
        running.stop()


_make_request = utils.ServerProcess.make_request
utils.ServerProcess.start, utils.ServerProcess.make_request = start, make_request
utils.ServerProcess.stop = stop
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.match_regex = lambda regex, text: True
