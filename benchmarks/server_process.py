"""A server in a process of its own, as a user starts it, and what the system says of that process.

Options of `ngramspec serve` enter, an address and figures of memory, files and threads leave. Knows no requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.http_client import ServerAddress

START_S = 600.0  # a server that is not healthy after so long does not start
# Names a model that is made here: random weights, small enough that the server itself is what is measured.
TINY = "tiny"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


@dataclass(frozen=True, slots=True)
class Resources:
    """What a process holds."""

    anonymous_mib: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that runs."""

    address: ServerAddress
    pid: int
    started: float
    """When its process was started, by `time.perf_counter`."""

    @property
    def age_s(self) -> float:
        return time.perf_counter() - self.started

    def read_resources(self) -> Resources:
        """Read /proc, which Linux alone has."""
        proc = Path(f"/proc/{self.pid}")
        rollup = dict(line.split(":", 1) for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
        n_files, n_threads = (len(list((proc / name).iterdir())) for name in ("fd", "task"))
        return Resources(int(rollup["Anonymous"].split()[0]) / 1024, n_files, n_threads)

    def read_cpu_s(self) -> float:
        """Return the processor time that it has taken so far, of all threads."""
        return read_cpu_s(self.pid)

    def call(self, path: str, body: Any = None) -> Any:
        """Return the JSON of an answer. Raises OSError for a refusal."""
        with open_url(self.address, path, body) as answer:
            return json.load(answer)


def read_cpu_s(pid: int) -> float:
    """Return the processor time that a process has taken so far, of all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_url(address: ServerAddress, path: str, body: Any = None) -> Any:
    """Send a request, GET without a body, and return what its answer is read from."""
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(address.url + path, data, {"Content-Type": "application/json"}), timeout=300)


@contextlib.contextmanager
def serve(model: str, environment: Mapping[str, str] | None = None, **settings: Any) -> Iterator[ServerProcess]:
    """Run `ngramspec serve --model MODEL` with settings as options until the block ends. `max_seqs=8`: --max-seqs 8, `x=True`: --x.

    Raises RuntimeError, with the end of what the server wrote, if it does not become healthy or does not end by itself when asked.
    """
    options = [
        part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = ServerAddress(int(sock.getsockname()[1]))
    with tempfile.TemporaryDirectory(prefix="ngramspec-server-") as folder:
        log, started = Path(folder) / "server.log", time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ngramspec", "serve", "--model", model, "--port", str(address.port), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        try:
            while not _is_healthy(address):
                if process.poll() is not None or time.perf_counter() > started + START_S:
                    raise RuntimeError(f"the server did not start (exit code {process.poll()})\n{_read_end(log)}")
                time.sleep(0.02)
            yield ServerProcess(address, process.pid, started)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"the server did not end after SIGTERM\n{_read_end(log)}") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _is_healthy(address: ServerAddress) -> bool:
    with contextlib.suppress(OSError), open_url(address, "/health") as answer:
        return bool(answer.status == 200)
    return False


def _read_end(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def make_tiny(folder: Path, *, hidden: int = 256, layers: int = 4, max_len: int = 4096) -> str:
    """Write a random Llama and a tokenizer of bytes. Return the folder, for `--model`."""
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
