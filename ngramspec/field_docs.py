"""Let `help()` show what the fields of a dataclass mean.

A module of dataclasses enters; each class keeps the texts below its fields, or those of its options, where `help` looks for them: as the
values of `__slots__`, which may be a dict. Needs the module's source; without it `help` shows names and types.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from typing import Any


def document_fields(module: str) -> None:
    """Add the meaning of each field to all dataclasses with slots of a module that is being imported."""
    found = sys.modules[module]
    try:
        tree = ast.parse(inspect.getsource(found))
    except (OSError, SyntaxError):  # no source is installed
        return
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and dataclasses.is_dataclass(kind := getattr(found, node.name)) and "__slots__" in vars(kind):
            texts = _read_texts(node)
            vars_of: Any = kind
            vars_of.__slots__ = {field.name: _describe(field, texts.get(field.name, "")) for field in dataclasses.fields(kind)}


def _read_texts(node: ast.ClassDef) -> dict[str, str]:
    """Return the string that stands below each field."""
    texts = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


def _describe(field: dataclasses.Field[Any], text: str) -> str:
    """Return the type, the meaning, and for an option its default and what is accepted."""
    option = field.metadata.get("option")
    if option is None:
        return f"{field.type}. {text}".rstrip(". ") + "."
    default = field.default_factory() if callable(field.default_factory) else field.default
    return f"{field.type}, default {default!r}: {option['help']} Accepted: {option['kind'].accepted}."
