"""What a type checker says to a program that uses the package as its documentation does."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

from test_docs import DOCUMENTS, blocks

ROOT = Path(__file__).parent.parent

PROGRAM = """
import asyncio
from pathlib import Path

from ngramspec import Completion, Delta, Engine, EngineConfig, Grammar, InvalidInputError, NgramspecError, SamplingParams, Stats
from ngramspec.datastore import CorpusOptions, Datastore, DatastoreError, Summary
from ngramspec.datastore.build import build
from ngramspec.datastore.update import merge, prune, update

params = SamplingParams(
    max_tokens=64,
    temperature=0.5,
    stop=["a", "b"],
    stop_token_ids=[1, 2],
    bad_words=["c"],
    allowed_token_ids=[3],
    logit_bias={5: -100.0},
    seed=7,
    grammar=Grammar("regex", "a+"),
    logprobs=2,
)
alike = SamplingParams(stop=("a",), stop_token_ids=(1,), bad_words=())


def show(done: Completion) -> str:
    stats: Stats = done.stats
    rate: float = stats.acceptance_rate
    ids: list[int] = done.token_ids
    sources: list[str | None] = done.draft_sources
    reason: str | None = done.finish_reason
    for choice in done.choices:
        text: str = choice.text
        for entry in choice.logprobs or []:
            number: float = entry.logprob
            print(text, number, entry.top[0][1])
    return f"{done.text} {rate} {ids} {sources} {reason} {done.seed} {done.exactness} {done.ttft_s} {done.duration_s}"


def taken(delta: Delta | Exception) -> None:
    if isinstance(delta, Exception):
        raise delta
    print(delta.text, delta.token_ids, delta.index, delta.completion)


def run(folder: Path) -> None:
    with Engine("smollm2", datastore={"project": folder}, config=EngineConfig(max_seqs=4)) as engine, Engine("smollm2", max_seqs=2):
        one: Completion = engine.complete("def f(", params, prediction="x", datastores=["project"], tenant="me")
        same: Completion = engine.complete([1, 2, 3])
        several: list[Completion] = engine.complete(["a", "b"], SamplingParams(n=2))
        print(show(one), show(same), [show(each) for each in several])
        for delta in engine.stream("def f(", params):
            taken(delta)
        with engine.stream("def f(") as stream:
            first: Delta = next(stream)
        request = engine.submit("def f(", params, deliver=taken, speculation=False)
        request.cancel()
        done: Completion = request.result(timeout=1.5)
        print(first, done.text, request.done, [beam.text for beam in engine.beam_search("a", 4, 16)])
        engine.add_datastore("libs", folder / "libs")
        engine.remove_datastore("libs")
        ids: list[int] = engine.encode_text("a")
        print(ids, engine.datastores["project"].info(), engine.status().running)


async def arun(engine: Engine) -> None:
    one: Completion = await engine.acomplete("a", params)
    several: list[Completion] = await engine.acomplete([[1], [2]])
    print(one.text, len(several))
    pieces = engine.astream("a", params)
    async for delta in pieces:
        print(delta.text)
    await pieces.aclose()


def stores(folder: Path) -> None:
    try:
        summary: Summary = update(folder, options=CorpusOptions(languages=("python",)))
        merge(folder)
        prune(folder, ["tests/"])
    except DatastoreError as error:
        raise SystemExit(str(error)) from error
    with Datastore.open(folder) as store:
        found = store.lookup([1, 2, 3])
        pairs: list[tuple[int, int]] = list(found.continuations)
        print(summary.files, summary.skipped["secret"], found.length, pairs, [(at.path, at.line) for at in found.locations])
    print(build)


try:
    asyncio.run(arun(Engine("smollm2")))
except (InvalidInputError, NgramspecError) as error:
    print(error)
"""

WRONG = """
from ngramspec import Completion, Engine, SamplingParams

SamplingParams(stop=[1])
SamplingParams(max_tokens="many")
one: Completion = Engine("smollm2").complete(["a", "b"])
Engine("smollm2").complete("a", predicted="b")
Engine("smollm2").infill("a", "b", max_tokens="many")
Engine("smollm2").generate("a")
"""

# The names that README's lines for three other engines take from the reader's program.
FRAGMENT = "from typing import Any\n\nids: Any\nllama: Any\nmodel: Any\nvllm: Any\n"


def test_users_programs_and_those_of_the_documents_pass_strict_mypy(tmp_path: Path) -> None:
    """Against the package as it is installed, without the packages that it needs: mypy takes those for `Any`."""
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    skipped = shutil.ignore_patterns("__pycache__", "static")
    shutil.copytree(ROOT / "ngramspec", site / "ngramspec", ignore=skipped)
    shutil.copytree(ROOT / "datastore", site / "ngramspec" / "datastore", ignore=skipped)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(WRONG)
    pages: list[str] = []
    for document in DOCUMENTS:
        for number, block in enumerate(blocks(document, "python")):
            is_fragment = "vllm.LLM(" in block.text and "import vllm" not in block.text
            pages.append(f"{document.stem.lower().replace('-', '_')}_{number}.py")
            (tmp_path / pages[-1]).write_text((FRAGMENT if is_fragment else "") + block.text)
    assert len(pages) > 25
    python = tmp_path / "env" / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--strict", f"--python-executable={python}", "--config-file=", f"--cache-dir={tmp_path}/cache"]
    done = subprocess.run([*command, "program.py", "wrong.py", *pages], cwd=tmp_path, capture_output=True, text=True, check=False)
    missing = "[import-not-found]"  # of other packages
    lines = [line for line in done.stdout.splitlines() if ": error: " in line and (missing not in line or '"ngramspec' in line)]
    found = {line.split(": ", 1)[0] + " " + line.rpartition("[")[2].rstrip("]") for line in lines}
    wrong = {4: "list-item", 5: "arg-type", 6: "assignment", 7: "call-overload", 8: "arg-type", 9: "attr-defined"}
    assert found == {f"wrong.py:{line} {kind}" for line, kind in wrong.items()}, done.stdout
