"""What the report measures on: kinds of work, each with its prompts and what is known beside them.

A folder of JSONL files and a tokenizer enter; categories leave. Rows have `id`, and `prompt` or `messages`; Spec-Bench's also `task`.
A repository's prompts are made from an installed package: functions of some of its files, to be completed, and a datastore of the others.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import Prompt, encode_chat, get_first_turn, iterate_rows
from benchmarks.recordings import find_edited_text
from ngramspec.datastore.build import build
from ngramspec.datastore.corpus import CorpusOptions
from ngramspec.datastore.reader import Datastore

# By name: its source in words; its files, and of each the tasks that count, none for all of them.
CATEGORIES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("categories.toml").read_text(encoding="utf-8"))
# Every eighth file of the repository is left out of its datastore; the prompts are functions of these files.
HELD_OUT = 8
SEED = 0
# As many times the prompts that are measured by the clock are followed without it.
FOLLOWED = 4


@dataclass(slots=True)
class Category:
    """One kind of work."""

    name: str
    followed: list[Prompt]
    """Those that drafts follow without a clock."""
    limit: int
    """The number of prompts, from the first on, that are measured by the clock."""
    predictions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """Text, by prompt, that its output will be much like, where the request has it."""
    store: Datastore | None = None

    @property
    def prompts(self) -> list[Prompt]:
        return self.followed[: self.limit]


def read_category(name: str, data: Path, tokenizer: Any, limit: int, longest: int) -> Category:
    """Read at most `limit` prompts of at most `longest` tokens, FOLLOWED times as many to follow, in an order drawn once and for all.

    Raises FileNotFoundError, ValueError.
    """
    rows = []
    for file, tasks in CATEGORIES[name]["files"].items():
        some = [row for _, row in iterate_rows(data / file) if not tasks or row.get("task") in tasks]
        rows.append(random.Random(SEED).sample(some, len(some)))
    category = Category(name, [], limit)
    for row in (row for several in zip(*rows, strict=False) for row in several):  # of each file in turn
        if len(category.followed) == FOLLOWED * limit:
            break
        ids = encode_chat(get_first_turn(row["messages"]), tokenizer) if "messages" in row else list(tokenizer(row["prompt"])["input_ids"])
        if len(ids) <= longest:
            category.followed.append(Prompt(str(row["id"]), ids))
            if len(category.followed) <= limit and (edited := find_edited_text(row)):
                category.predictions[tuple(ids)] = list(tokenizer(edited, add_special_tokens=False)["input_ids"])
    return _check_category(category, longest)


def read_repository(package: str, tokenizer: Any, folder: Path, limit: int, longest: int) -> Category:
    """Return functions of every eighth file of an installed package, and in `folder` a datastore of the others. Raises ValueError."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"there is no installed package {package!r}")
    root = Path(found.submodule_search_locations[0])
    modules = [path.relative_to(root) for path in sorted(root.rglob("*.py")) if path.name != "__init__.py"]
    files = [path for path in modules if "tests" not in path.parts]
    held_out = files[::HELD_OUT]
    options = CorpusOptions(languages=("python",), exclude=("tests", *(f"/{path.as_posix()}" for path in held_out)))
    build([root], folder, tokenizer.backend_tokenizer, "report", options=options, router=True)
    prompts = [
        Prompt(f"{package}/{path.as_posix()}:{line}", ids)
        for path in held_out
        for line, text in iterate_heads((root / path).read_text(encoding="utf-8"))
        if len(ids := list(tokenizer(text)["input_ids"])) <= longest
    ]
    random.Random(SEED).shuffle(prompts)
    return _check_category(Category("repository", prompts[: FOLLOWED * limit], limit, store=Datastore.open(folder)), longest)


def package_version(package: str) -> str:
    """Return the version of its distribution, "" if it has none."""
    names = importlib.metadata.packages_distributions().get(package, [])
    return f"{package} {importlib.metadata.version(names[0])}" if names else package


def iterate_heads(source: str) -> Iterator[tuple[int, str]]:
    """Yield for each top-level function with a docstring its line, and the file's imports followed by it up to the docstring's end."""
    lines = source.splitlines(keepends=True)
    body = ast.parse(source).body
    imports = "".join("".join(lines[n.lineno - 1 : n.end_lineno]) for n in body if isinstance(n, ast.Import | ast.ImportFrom))
    for function in body:
        if isinstance(function, ast.FunctionDef) and ast.get_docstring(function) and len(function.body) > 1:
            first = min([function.lineno, *(line.lineno for line in function.decorator_list)])
            yield function.lineno, f"{imports}\n\n" + "".join(lines[first - 1 : function.body[0].end_lineno])


def _check_category(category: Category, longest: int) -> Category:
    if not category.prompts:
        raise ValueError(f"{category.name}: no prompt has {longest} tokens or fewer")
    return category
