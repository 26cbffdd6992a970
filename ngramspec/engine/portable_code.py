"""Compile what the engine runs for all processors of a level, to be carried along with the package (`datastore.bundled_code`).

For whoever makes wheels and images: their users' first starts compile nothing. A child process compiles what numba compiles, since numba is
told the processor once per process. Only levels that this processor has are compiled: compiling runs the code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ngramspec.backends.cpu import tiny_pass
from ngramspec.backends.cpu.attention import CpuAttentionPass
from ngramspec.backends.cpu.codegen.targets import list_targets
from ngramspec.backends.cpu.experts_modules import PackedExperts, PackedRouter
from ngramspec.backends.cpu.matmul import CpuProduct, MatmulContext
from ngramspec.backends.cpu.row_loops import apply_gelu
from ngramspec.datastore import Datastore, bundled_code, code_cache
from ngramspec.datastore.build import build
from ngramspec.datastore.bundled_code import Level
from ngramspec.datastore.cache_dir import cache_dir
from ngramspec.engine import background_compiler
from ngramspec.engine.background_compiler import Progress
from ngramspec.models.expert_routing import RouterParts
from ngramspec.models.expert_weights import ExpertWeights
from ngramspec.models.q8_blocks import BLOCK, quantise_rows
from ngramspec.sampling.batch import Span, pack
from ngramspec.sampling.topk import rank_rows
from ngramspec.speculative.datastore_drafter import DatastoreDrafter


def compile_portable(folder: Path, progress: Progress) -> None:
    """Write a folder of machine code for each level that this processor has, in place of earlier ones.

    Raises OSError if `folder` cannot be written, this processor has no level, or the child fails, which writes why.
    """
    if not (levels := bundled_code.list_levels()):
        raise OSError("code can be compiled for processors from x86-64-v3 on, which this one is not")
    for level in levels:
        with tempfile.TemporaryDirectory() as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            for target in [each for each in list_targets()[:-1] if each.fits_level(level)]:
                progress(f"for {level.name}: kernels of {target.name}")
                tiny_pass.compile_all_kernels(target.cover_level(level), made)
            progress(f"for {level.name}: what numba compiles, for some minutes")
            _compile_for(level, Path(temporary, "numba"), Path(temporary, "cache"))
            for path in [*Path(temporary, "numba").rglob(f"*{code_cache.SUFFIX}"), *Path(temporary, "cache", "code").iterdir()]:
                shutil.copyfile(path, made / path.name)
            shutil.rmtree(folder / level.name, ignore_errors=True)
            shutil.copytree(made, folder / level.name)


def _compile_for(level: Level, numba_folder: Path, cache: Path) -> None:
    folders = {"NUMBA_CACHE_DIR": str(numba_folder), "NGRAMSPEC_CACHE": str(cache)}
    processor = {"NUMBA_CPU_NAME": level.name, "NUMBA_CPU_FEATURES": level.features}
    code = f"from {__name__} import compile_everything; compile_everything()"
    ended = subprocess.run([sys.executable, "-c", code], env={**os.environ, **folders, **processor}, check=False)
    if ended.returncode:
        raise OSError(f"the process that compiles for {level.name} ended with exit code {ended.returncode}")


# ------------------------------------------------------------------ in the child


def compile_everything() -> None:
    """Compile what every engine runs, and then what only some models and datastores run."""
    background_compiler.compile_all(lambda _: None)
    folder = cache_dir() / "code"
    for kv_dtype in ("float16", "float32"):
        tiny_pass.compile_other_models(kv_dtype, folder)
        _compile_attention(kv_dtype, folder)
    for kind, n_bytes in (("F32", 4), ("BF16", 2)):
        quantise_rows(kind, np.zeros((1, n_bytes * BLOCK), np.uint8))
    _compile_experts(folder)
    _compile_datastores()


def _compile_attention(kv_dtype: str, folder: Path) -> None:
    """Compile what models that run as transformers' modules call beside their products."""
    forward, pool = tiny_pass.make_tiny_pass(kv_dtype, folder)
    n, n_dim = 3, forward.decoder.options.head_dim
    rows = torch.zeros(n, 1, n_dim)
    of_pass = CpuAttentionPass(pool, pack([Span(0, np.zeros(n, np.int32), 0)], pool), [0])
    of_pass.attend(0, rows, rows, rows, scale=1.0, window=0, softcap=0.0)
    rank_rows(rows[:, 0].numpy()[:, : n_dim // 2])
    apply_gelu(rows.view(-1).numpy(), rows.view(-1).numpy())


def _compile_experts(folder: Path) -> None:
    """Compile the modules that models' checks compare with."""
    context = MatmulContext(int8=False, folder=folder)
    matrix = tiny_pass.make_tiny_matrix(context)
    experts = PackedExperts(context, [matrix] * 3, ExpertWeights(("", None), ("", None)), 1, "silu")
    router = PackedRouter(CpuProduct(context, [matrix]), experts.experts.options, 1.0, RouterParts("", None))
    x = torch.zeros(1, experts.n_in)
    _, weights, ids = router(x)
    experts(x, ids, weights)


def _compile_datastores() -> None:
    """Build, check, search and draft from datastores of one file whose lines end in CRLF, with tokens of either width."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    for n_tokens in (len(alphabet), 1 << 17):
        words = [*alphabet, *(f"word {i}" for i in range(len(alphabet), n_tokens))]
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        with tempfile.TemporaryDirectory() as temporary:
            Path(temporary, "some.py").write_bytes(b"a = 1\r\nb = 2\r\n" * 100)
            build([Path(temporary, "some.py")], Path(temporary, "store"), tokenizer, "bytes", router=True)
            with Datastore.open(Path(temporary, "store"), verify="full") as store:
                context = np.array(tokenizer.encode("a = 1\r\nb").ids, np.int32)
                store.lookup(context.tolist())
                drafter = DatastoreDrafter({"some": store}, 1)
                assert drafter.line_ends
                drafter.line_ends.result()
                drafter.begin(0, context)
                drafter.propose(np.zeros(1, np.int32))
