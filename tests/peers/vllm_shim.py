"""A pytest plugin under which vLLM's entrypoint tests start our server, in this process, instead of `vllm serve`.

`tests.utils.RemoteOpenAIServer` is ours, with SmolLM2 under the name that a test asks for. `vllm` is not installed: whatever a test imports
from it is a stand-in, and a test or a file that calls one, and so is about vLLM's inside, is skipped.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, Self

import openai
import pytest
from own_server import OwnServer, pytest_unconfigure  # noqa: F401 - pytest calls it
from pydantic import SecretStr

from ngramspec.sampling_params import MAX_LOGPROBS
from ngramspec.server.engine_input import ALL
from ngramspec.server.settings import Key, Limits, ServerSettings

LENGTH = 2048
SEQUENCES = 8
OPTIONS = (
    "max-model-len",
    "max-num-seqs",
    "served-model-name",
    "port",
    "host",
    "uds",
    "root-path",
    "chat-template",
    "api-key",
    "max-logprobs",
)
FLAGS = ("return-tokens-as-token-ids", "enable-force-include-usage", "enable-per-request-metrics")
tokenizers: list[Any] = []  # that of the server started last


class StandIn:
    """Something of vLLM that a test names."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip(f"about vLLM's inside: {self.name}", allow_module_level=True)

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.name}.{name}")

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)


class Anything(types.ModuleType):
    """A module of vLLM."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {}) if name.endswith("Error") else StandIn(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every module of vLLM."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(KNOWN.get(module.__name__, {}))


class ModelConfig:
    def __init__(self, **_: Any) -> None: ...

    def get_vocab_size(self) -> int:
        return 49152


class Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: False


class Hub:
    def snapshot_download(self, **_: Any) -> str:
        return "adapter"


def get_tokenizer(*_: Any, **__: Any) -> Any:
    return tokenizers[-1]


class RemoteOpenAIServer:
    """Our server with what the options of `vllm serve` mean to us."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, args: list[str], *, env_dict: dict[str, str] | None = None, **_: Any) -> None:
        parser = argparse.ArgumentParser()
        for option in OPTIONS:
            parser.add_argument(f"--{option}")
        for flag in FLAGS:
            parser.add_argument(f"--{flag}", action="store_true")
        given, _rest = parser.parse_known_args(args)
        key = given.api_key or (env_dict or {}).get("VLLM_API_KEY")
        settings = ServerSettings(
            host=given.uds or given.host or "127.0.0.1",
            port=int(given.port or 0),
            alias=(given.served_model_name or model,),
            strict_model=True,
            api_keys=(Key.model_construct(key=SecretStr(key), name="test"),) if key else (),  # shorter than ours have to be
            root_path=given.root_path or "",
            per_request_metrics=given.enable_per_request_metrics,
            force_include_usage=given.enable_force_include_usage,
            return_tokens_as_token_ids=given.return_tokens_as_token_ids,
            chat_template=given.chat_template or "",
            limits=Limits(logprobs=ALL if int(given.max_logprobs or 0) > MAX_LOGPROBS else 20),
            max_queue=1024,
            admin_on_loopback=not key,
        )
        self.uds = given.uds
        sequences = min(int(given.max_num_seqs or SEQUENCES), SEQUENCES)
        self.own = OwnServer(settings, max_model_len=min(int(given.max_model_len or LENGTH), 8192), max_seqs=sequences)
        tokenizers.append(self.own.engine.tokenizer)
        self.host, self.port = ("", 0) if self.uds else self.own.address[:2]
        self.show_hidden_metrics = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.own.stop()

    @property
    def url_root(self) -> str:
        return f"http://{self.uds.split('/')[-1]}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/" + "/".join(part.strip("/") for part in parts if part)

    def _make(self, kind: Any, address: str, **options: Any) -> Any:
        return kind(base_url=address, **({"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 120} | options))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return self._make(openai.OpenAI, self.url_for("v1"), **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return self._make(openai.AsyncOpenAI, self.url_for("v1"), **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return self._make(anthropic.AsyncAnthropic, self.url_for(), **options)


KNOWN: dict[str, dict[str, Any]] = {
    "vllm.config": {"ModelConfig": ModelConfig},
    "vllm.envs": {"VLLM_USE_RUST_FRONTEND": False},
    "vllm.model_executor.model_loader.weight_utils": {"download_weights_from_hf": lambda name, **_: name},
    "vllm.platforms": {"current_platform": Platform()},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.transformers_utils.repo_utils": {"hf_api": Hub},
    "vllm.version": {"_prev_minor_version": lambda: "0.32"},
}


def put_in_place() -> None:
    from ngramspec import __version__

    KNOWN["vllm.version"]["__version__"] = __version__
    KNOWN["vllm"] = {"__version__": __version__, "envs": types.SimpleNamespace(**KNOWN["vllm.envs"])}
    sys.meta_path.insert(0, Finder())
    utils, conftest = types.ModuleType("tests.utils"), types.ModuleType("tests.conftest")
    vars(utils).update(RemoteOpenAIServer=RemoteOpenAIServer, ROCM_EXTRA_ARGS=[], ROCM_ENV_OVERRIDES={})
    vars(utils).update(dict.fromkeys(("multi_gpu_only", "requires_fp8"), lambda *a, **_: a[0] if a else (lambda test: test)))
    vars(conftest).update(LocalAssetServer=StandIn("LocalAssetServer"))
    sys.modules.update({"tests.utils": utils, "tests.conftest": conftest})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "-lora" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="about adapters"))


put_in_place()
