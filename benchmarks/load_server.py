"""A server in a process of its own, as a user starts it, and what the system says of that process.

Arguments of `ngramspec serve` enter, a `Target` and figures of memory, files and threads leave. Knows no requests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.load_client import Target

START_S = 600.0
TINY = "tiny"
"""Names a model that is made here: random weights, small enough that the server itself is what is measured."""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


@dataclass(frozen=True, slots=True)
class Resources:
    """What a process holds."""

    anonymous_mib: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Process:
    """A server that runs."""

    target: Target
    pid: int

    def resources(self) -> Resources:
        """Linux only: from /proc."""
        proc = Path(f"/proc/{self.pid}")
        rollup = dict(line.split(":", 1) for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
        return Resources(
            int(rollup["Anonymous"].split()[0]) / 1024,
            len(list((proc / "fd").iterdir())),
            len(list((proc / "task").iterdir())),
        )

    def cpu_s(self) -> float:
        """Processor time that it has taken so far, of all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serve(model: str, log: Path | None = None, **settings: Any) -> Iterator[Process]:
    """Run `ngramspec serve --model MODEL` with settings as options (`max_seqs=8`: --max-seqs 8) until the block ends.

    Raises RuntimeError, with the end of what the server wrote, where it does not become healthy or does not end by itself when asked.
    """
    options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    port = _free_port()
    with contextlib.ExitStack() as stack:
        if log is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-load-"))) / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ngramspec", "serve", "--model", model, "--port", str(port), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        try:
            _wait_until_healthy(process, port, log)
            yield Process(Target(port), process.pid)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"the server did not end after SIGTERM\n{_tail(log)}") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start (exit code {process.poll()})\n{_tail(log)}")
        time.sleep(0.1)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def make_tiny(folder: Path, *, hidden: int = 256, layers: int = 4, max_len: int = 4096) -> str:
    """Write a random Llama and a tokenizer of bytes -> the folder, for `--model`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # by words: the tokenizer keeps what it has split
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
