"""Check import-linter's contracts (pyproject.toml), and that no private name leaves its package.

    python -m tools.contracts

`datastore/` is installed as `ngramspec.datastore`, which import-linter cannot see in the source tree. So this checks a copy of the package
with everything in its place. Exit status 1 if a contract is broken, with the imports that break it.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from importlinter import Contract, ContractCheck, fields, output
from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent
KNOWN = {"_asdict", "_fields", "_replace", "_make"}  # methods of named tuples, public in spite of their underscore


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        only_code = shutil.ignore_patterns("__pycache__", "*.nb[ic]", "static", "deploy", "*.npz")
        shutil.copytree(ROOT / "ngramspec", Path(folder) / "ngramspec", ignore=only_code)
        shutil.copytree(ROOT / "datastore", Path(folder) / "ngramspec" / "datastore", ignore=only_code)
        sys.path.insert(0, folder)
        os.chdir(folder)
        try:
            return int(lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True))
        finally:
            os.chdir(ROOT)


class PrivateNames(Contract):
    """The contract that a name with a leading underscore stays in its package. Import-linter itself sees only modules.

    A package is a folder of modules; `ngramspec` itself is one. It is broken by `from elsewhere import _name`, and by `thing._name` if no
    module of the package defines that name.

    `folders`: where to look. `foreign`: private names of libraries that have no public equivalent.
    """

    type_name = "private_names"
    folders = fields.ListField(subfield=fields.StringField())
    foreign = fields.ListField(subfield=fields.StringField(), required=False, default=[])

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        broken = sorted({line for folder in self.folders for line in find_crossings(ROOT / str(folder), {*KNOWN, *map(str, self.foreign)})})  # type: ignore[attr-defined]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["broken"]:
            output.print_error(line)


def find_crossings(folder: Path, known: set[str]) -> Iterator[str]:
    """Yield "path:line: name" for each private name that leaves its package, in all packages of a folder."""
    for package in sorted({path.parent for path in folder.rglob("*.py")}):
        trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(package.glob("*.py"))}
        own = set(known)
        for tree in trees.values():
            own.update(_find_definitions(tree))
        for path, tree in trees.items():
            for line, name in _find_uses(tree, package.name):
                if name not in own:
                    yield f"{path.relative_to(folder.parent)}:{line}: {name}"


def _is_private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.startswith("__")


def _find_definitions(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module defines or assigns, including those of its classes and their instances."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and _is_private(node.name):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and _is_private(node.id):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and _is_private(node.attr)
            and isinstance(node.value, ast.Name)
        ) and node.value.id in ("self", "cls", "other"):
            yield node.attr


def _find_uses(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the private names that a module takes from elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if _is_private(alias.name) and not (node.module or "").startswith("_"):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node.lineno, node.attr


if __name__ == "__main__":
    sys.exit(main())
