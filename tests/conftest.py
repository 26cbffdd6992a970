"""Fixtures shared by all tests: tiny random models, and SmolLM2 where its package is installed.

What takes seconds to import is imported where it is needed: the process that hands out tests to others runs none.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import library_settings  # noqa: F401  # before all that imports torch
import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ngramspec.engine.llm_engine import Engine
    from ngramspec.models import loader

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell that starts us in the background has it ignored, here and in our children


PASSES = Path(__file__).parent / "backends"
_COMPILE = """
import sys
from ngramspec.backends.cpu import tiny_pass
from ngramspec.datastore.cache_dir import cache_dir
tiny_pass.compile_other_models(sys.argv[1], cache_dir() / "code")
"""
_compilers: list[subprocess.Popen[bytes]] = []

gc.disable()  # until the tests begin: a quarter of the time that imports take


def pytest_collection_finish() -> None:
    """Leave what the imports made out of all later collections of garbage, of which one would take half a second."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # of files that several processes share, none is long at the end
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):  # a folder of that name is a keyword, too
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile what only some models call beside the processes that run tests, which would all wait for the one that comes to it first."""
    from xdist import is_xdist_controller

    if is_xdist_controller(session) and not session.config.option.collectonly:
        _compilers.extend(subprocess.Popen([sys.executable, "-c", _COMPILE, kv_dtype]) for kv_dtype in ("float32", "float16"))


def pytest_sessionfinish() -> None:
    while _compilers:
        with _compilers.pop() as compiler:
            compiler.terminate()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Compile ahead if a test makes an engine: speculation, which many of them measure, joins only once its code is compiled."""
    modules = {getattr(item, "module", None) for item in session.items}
    makes_engines = any({"Engine", "tiny_engine"} & vars(module).keys() for module in modules if module)
    if not makes_engines or session.config.option.collectonly:
        return
    from ngramspec.engine import background_compiler

    if not background_compiler.is_compiled():
        with contextlib.suppress(OSError):  # what cannot be kept is compiled where it is called
            background_compiler.compile_all(print)


@pytest.fixture(scope="module", autouse=True)
def thread_count(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let passes compute with one thread where a test asks for no more: with a tiny model, each further one is awake only to wait.

    Tests of passes themselves keep all threads.
    """
    if request.path.is_relative_to(PASSES):
        yield
        return
    import numba

    from ngramspec.engine import assembly

    before = numba.get_num_threads()
    numba.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "count_cores", lambda: 1)
        yield
    numba.set_num_threads(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let passes in this thread compute with two threads, where the machine has as many."""
    import numba

    before = numba.get_num_threads()
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    yield
    numba.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model(arch, seed=0, **config)`: see tiny.ARCHITECTURES for the families."""
    import tiny

    return tiny.tiny_model


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerBase:
    import tiny

    return tiny.byte_tokenizer()


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerBase:
    import tiny

    return tiny.word_tokenizer()


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """`real_model("qwen2.5-coder-1.5b")`: that GGUF file in the folder that NGRAMSPEC_TEST_MODELS names; the test is skipped without it.

    Tests that use it carry the marker `models`; `make test-models MODELS=FOLDER` runs them.
    """

    def find(name: str) -> Path:
        folder = os.environ.get("NGRAMSPEC_TEST_MODELS", "")
        path = Path(folder) / f"{name}.gguf"
        if not folder or not path.is_file():
            pytest.skip(f"NGRAMSPEC_TEST_MODELS names no folder with {path.name}")
        return path

    return find


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    from ngramspec.models import smollm2 as smollm2_package

    if importlib.util.find_spec(smollm2_package.SMOLLM2_PACKAGE) is None:
        pytest.skip(f"smollm2 is not installed: {smollm2_package.SMOLLM2_COMMAND}")
    return smollm2_package.smollm2_gguf()


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> loader.LoadedModel:
    """SmolLM2 in fp32. Shared: a test that changes the model loads its own from `smollm2_gguf`."""
    from ngramspec.models import loader

    return loader.load_model(str(smollm2_gguf))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path) -> Any:
    from ngramspec.models import loader

    return loader.load_tokenizer(str(smollm2_gguf))


@pytest.fixture(scope="session")
def smollm2_engine(smollm2_gguf: Path) -> Iterator[Engine]:
    """An engine on SmolLM2 with a small pool; it leaves nothing behind."""
    from ngramspec.engine.llm_engine import Engine

    with Engine(str(smollm2_gguf), max_seqs=16, max_model_len=2048, kv_memory=512 << 20) as engine:
        yield engine
        assert not engine.core.scheduler.has_work
        engine.runner.pool.check_integrity()
        assert engine.runner.pool.n_available == engine.runner.pool.n_blocks
