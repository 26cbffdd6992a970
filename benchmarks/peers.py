"""Peers that benchmarks compare with: transformers' own generation, vLLM and llama.cpp, on the same token ids, weights and threads.

Prompts go in as token ids; token ids and the seconds of their generation come out; the other requests that a peer answers stand in its
worker (`_peer_worker.py`). Each peer is a process of its own, as an OpenMP runtime that serves two of them makes both slow; it keeps its
model loaded, and waits without using a core. A peer that cannot run says why (PeerAbsentError).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ngramspec import SamplingParams, Stats
from ngramspec.backends.cpu.cores import count_cores

# transformers' drafts: prompt lookup; and an assistant, which is the model's own first third of layers (`assistant_early_exit`).
HF_DRAFTS: dict[str, dict[str, Any]] = {"hf": {}, "hf-pld": {"lookup": 10}, "hf-assisted": {"exit_share": 1 / 3}}
# vLLM's, as its documentation shows them, or by their own defaults.
VLLM_SPECULATION: dict[str, dict[str, Any] | None] = {
    "vllm-none": None,
    "vllm-ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    "vllm-suffix": {"method": "suffix"},
}
# llama.cpp's, on the GGUF file itself; the other peers have its weights dequantised.
LLAMA_LOOKUP: dict[str, int | None] = {"llama-none": None, "llama-pld": 10}
NAMES = (*HF_DRAFTS, *VLLM_SPECULATION, *LLAMA_LOOKUP)

LLAMA_COMMAND = "pip install llama-cpp-python"
# Interpreters that `make peers` and `make llama` install.
LOCAL_VLLM, LOCAL_LLAMA = Path(".venv-vllm/bin/python"), Path(".venv-llama/bin/python")
STOP_S = 30  # a peer that has not ended by then is killed
VLLM_REST_S = 1.2  # vLLM's processes go on spinning for a second after a request, and the next contender would lack that core


class PeerAbsentError(Exception):
    """A contender is not installed here, or stopped working; the message says why."""


@dataclass(slots=True)
class TimedRun:
    """Prompts that were generated for together."""

    outputs: list[list[int]]
    seconds: float
    stats: Stats = field(default_factory=Stats)
    plain_passes: float = 0.0
    """Cost of its passes by the engine's cost model; the prompt, and a pass with one row, cost 1 each. 0: not counted."""
    prompt_s: float = 0.0
    """Seconds until the last of them had its first token; 0: not measured."""
    wall_s: float = 0.0
    """Seconds until the caller could go on."""

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.outputs))


class Contender(Protocol):
    """An engine or a peer that completes prompts in a comparison."""

    def complete(self, prompts: list[list[int]]) -> TimedRun: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PeerTask:
    """What every peer is given."""

    folder: Path
    """Holds the weights in safetensors."""
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    threads: int
    max_len: int
    """Most tokens of a prompt with its output."""
    device: str = "cpu"
    dtype: str = "float32"
    gguf: Path | None = None
    """File that the weights come from, if it is one."""


def add_llama_python_option(parser: argparse.ArgumentParser) -> None:
    local = LOCAL_LLAMA if LOCAL_LLAMA.exists() else Path(sys.executable)
    text = f"interpreter of an environment with llama-cpp-python; default {LOCAL_LLAMA} if it is there, else this one"
    parser.add_argument("--llama-python", type=Path, default=local, metavar="PATH", help=text)


def add_llama_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks that compare with llama.cpp's own passes."""
    parser.add_argument("--against", choices=["llama"], help="llama.cpp, through llama-cpp-python, in turns with ours")
    add_llama_python_option(parser)
    parser.add_argument("--llama-gguf", type=Path, metavar="F.gguf", help="the file that llama.cpp takes; default the model's own")


def open_peer(name: str, task: PeerTask, vllm_python: Path | None, llama_python: Path = Path(sys.executable)) -> Peer:
    """Start a peer and wait until its model is loaded. Raises PeerAbsentError."""
    settings: dict[str, Any] = {
        "max_tokens": task.params.max_tokens,
        "temperature": task.params.temperature,
        "seed": task.params.seed or 0,
        "eos": task.eos_token_ids,
        "dtype": task.dtype,
    }
    if name in HF_DRAFTS:
        settings |= {"threads": task.threads, "device": task.device, **HF_DRAFTS[name]}
        return Peer(Path(sys.executable), "hf", task.folder, settings, {})
    if task.device != "cpu":
        raise PeerAbsentError(f"{name} is compared with on the CPU only, not on {task.device}")
    if name in LLAMA_LOOKUP:
        del settings["dtype"]
        settings |= {"threads": task.threads, "max_len": task.max_len, "lookup": LLAMA_LOOKUP[name]}
        return open_llama_worker(llama_python, "llama", task.gguf, settings)
    if vllm_python is None:
        raise PeerAbsentError("vLLM needs its own environment: `make peers`, then --vllm-python PATH")
    settings |= {"max_len": task.max_len, "speculation": VLLM_SPECULATION[name]}
    return Peer(vllm_python, "vllm", task.folder, settings, make_vllm_environment(vllm_python, task.threads), rest_s=VLLM_REST_S)


def open_llama_passes(args: argparse.Namespace, gguf: Path | None, max_len: int, rest_s: float = 0.0, **settings: Any) -> Peer:
    """Open the llama.cpp of `add_llama_options` for its own passes, on `gguf` if no other file was given. Raises SystemExit."""
    settings |= {"threads": args.threads or count_cores(), "max_len": max_len}
    try:
        return open_llama_worker(args.llama_python, "passes", args.llama_gguf or gguf, settings, rest_s)
    except PeerAbsentError as error:
        raise SystemExit(f"--against llama: {error}") from error


def open_llama_worker(python: Path, kind: str, gguf: Path | None, settings: dict[str, Any], rest_s: float = 0.0) -> Peer:
    """Open llama.cpp as this kind of worker, on a GGUF file (of several parts the first). Raises PeerAbsentError."""
    if gguf is None:
        raise PeerAbsentError("llama.cpp takes a GGUF file, and the weights do not come from one")
    try:
        return Peer(python, kind, gguf, settings, {}, rest_s)
    except PeerAbsentError as error:
        if "No module named 'llama_cpp'" not in str(error):
            raise
        raise PeerAbsentError(
            f"llama-cpp-python is not installed here, and is compiled for minutes: `make llama`, or {python} -m {LLAMA_COMMAND}"
        ) from error


class Peer:
    """A process that computes on request."""

    def __init__(
        self, python: Path, kind: str, model: Path | str, settings: dict[str, Any], environment: dict[str, str], rest_s: float = 0.0
    ) -> None:
        """Start the process. `rest_s`: seconds for which the process still uses a core after it has answered."""
        self.rest_s = rest_s
        self.log = tempfile.TemporaryFile("w+", prefix="ngramspec-peer-")  # noqa: SIM115
        worker = Path(__file__).with_name("_peer_worker.py")
        try:
            self.process = subprocess.Popen(
                [python, worker, kind, model, json.dumps(settings)],
                env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"} | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerAbsentError(f"{python} cannot be run: {error}") from error
        try:
            self.version: str = self._read_answer()["version"]
        except BaseException:
            self.close()
            raise

    def complete(self, prompts: list[list[int]]) -> TimedRun:
        """Raises PeerAbsentError when the process has ended."""
        answer = self.ask(prompts=prompts)
        return TimedRun(answer["outputs"], answer["seconds"])

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer. Raises PeerAbsentError when the process has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self._read_answer()
        time.sleep(self.rest_s)
        return answer

    def close(self) -> None:
        """End the process, by force if it does not go; what it started goes with it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def _read_answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerAbsentError(f"it ended with status {self.process.wait(STOP_S)}: {self._read_last_words()}")
        return json.loads(line)

    def _read_last_words(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it said nothing"])[-1][-600:]


def make_vllm_environment(python: Path, threads: int) -> dict[str, str]:
    """Return settings for as many threads as we have, and the OpenMP runtime that vLLM asks for, if its environment has it."""
    settings = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if hasattr(os, "sched_getaffinity"):
        settings["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    runtime = python.absolute().parent.parent / "lib" / "libiomp5.so"
    if sys.platform == "linux" and runtime.is_file():
        settings["LD_PRELOAD"] = str(runtime)
    return settings
