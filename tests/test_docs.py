"""Check that the documents are true: commands parse, links resolve, files and modules exist, tables equal their declarations.

    python tests/test_docs.py      writes the generated tables of docs/settings.md and docs/server.md

No command is run and no model is loaded.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import typer

from ngramspec import SamplingParams
from ngramspec.cli.common import BadInputError
from ngramspec.cli.environment import check_names
from ngramspec.config import EngineConfig
from ngramspec.options import options_of

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")), *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS, SERVER = ROOT / "docs" / "settings.md", ROOT / "docs" / "server.md"
MOST_LINES = 200

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str


def blocks(document: Path, *languages: str) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(*each) for each in found if each[0] in languages]


def prose(document: Path) -> str:
    """Return the text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


# ------------------------------------------------------------------ commands


def commands(document: Path) -> Iterator[list[str]]:
    """Yield the words of each command in the shell blocks. Line ends and pipes end it; a comment begins a line or follows two blanks."""
    for block in blocks(document, "sh"):
        lexer = shlex.shlex(re.sub(r"(^|  +)#.*$", "", block.text, flags=re.MULTILINE), posix=True, punctuation_chars="|;&\n")
        lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
        words: list[str] = []
        for word in [*lexer, "\n"]:
            if word.strip("|;&\n"):
                words.append(word)
            elif words:
                yield words
                words = []


def command_line() -> Any:
    """Return the whole command line as a typer command."""
    from ngramspec.cli.main import app

    return typer.main.get_command(app)


def parse(words: list[str]) -> Any:
    """Parse words as the command line does and return the innermost command's context. Raises what a wrong word raises."""
    command = command_line()
    context = command.make_context(command.name, list(words))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    return context


@each_document
def test_commands_parse(document: Path) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(document):
        if words[:3] == ["python", "-m", "ngramspec"]:
            words = words[2:]
        if words[0] == "ngramspec":
            parse(words[1:])
        elif words[0] == "make":
            assert set(words[1:]) <= set(targets), f"Makefile has no {words[1:]}"
        elif words[:2] == ["python", "-m"] and words[2] != "pytest":
            check_module(words[2], words[3:])
        elif words[0] == "python" and words[1] != "-c":
            assert (ROOT / words[1]).is_file() or words[1] == "-m", words


def commands_for_containers(document: Path) -> Iterator[list[str]]:
    """Yield the words after `ngramspec` of what systemd, containers and `docker run` start."""
    for block in blocks(document, "ini"):
        yield from map(shlex.split, re.findall(r"^ExecStart=\S*/ngramspec (.*)$", block.text, re.MULTILINE))
    for block in blocks(document, "yaml"):
        for words in re.findall(r"^ *(?:command|args): (\[.*\])$", block.text, re.MULTILINE):
            yield ["serve", *json.loads(words)]  # what the image starts
    for words in commands(document):
        if words[:2] == ["docker", "run"]:
            yield ["serve", *words[words.index("ngramspec") + 1 :]]


@each_document
def test_commands_for_containers_parse(document: Path) -> None:
    for words in commands_for_containers(document):
        parse(words)


@each_document
def test_variables_are_settings(document: Path) -> None:
    names = re.findall(r"\bNGRAMSPEC_[A-Z_]*[A-Z]\b", document.read_text("utf-8"))
    check_names(dict.fromkeys(names, "") if document.name != "CHANGELOG.md" else {})  # which names what is gone


def check_module(name: str, words: list[str]) -> None:
    """Check that a program of ours exists, and that it, or one of our modules that it imports, declares the options."""
    place = ROOT / name.replace(".", "/")
    assert (place / "__main__.py").is_file() or place.with_suffix(".py").is_file(), f"{name} cannot be run"
    sources: dict[Path, str] = {}
    read(place, sources)
    for word in words:
        if word.startswith("--"):
            option = f'"{word.partition("=")[0]}"'
            assert any(option in source for source in sources.values()), f"{name} has no option {word}"


def read(place: Path, sources: dict[Path, str]) -> None:
    """Add the source of a module, or of a whole package, and of the programs of ours that it imports."""
    for path in place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
        if path.is_file() and path not in sources:
            sources[path] = path.read_text("utf-8")
            named = re.findall(r"\b(benchmarks|tools)\.(\w+)", sources[path])
            for folder, several in re.findall(r"^from (benchmarks|tools) import (.+)$", sources[path], re.MULTILINE):
                named += [(folder, module) for module in re.findall(r"\w+", several)]
            for folder, module in named:
                read(ROOT / folder / module, sources)


def test_what_is_no_command_is_noticed() -> None:
    parse(["complete", "x", "--max-tokens", "3"])
    parse(["datastore", "lookup", "store", "x"])
    for words in (["complete", "x", "--no-such-option"], ["no-such-command"], ["datastore", "no-such-command"], ["complete", "--n", "x"]):
        with pytest.raises(Exception, match=r"(?i)no such|valid integer"):
            parse(words)


def test_what_containers_cannot_start_is_noticed(tmp_path: Path) -> None:
    assert sum(len(list(commands_for_containers(document))) for document in DOCUMENTS) >= 4
    page = tmp_path / "page.md"
    for text in ("ini\nExecStart=/bin/ngramspec serve --prot 8", 'yaml\nargs: ["--prot", "8"]', "sh\ndocker run --rm ngramspec --prot 8"):
        page.write_text(f"```{text}\n```\n")
        with pytest.raises(Exception, match=r"(?i)no such"):
            test_commands_for_containers_parse(page)
    page.write_text("`NGRAMSPEC_PROT=8`")
    with pytest.raises(BadInputError, match="NGRAMSPEC_PORT is one"):
        test_variables_are_settings(page)


# ------------------------------------------------------------------ Python and patches


@each_document
def test_python_compiles_and_names_what_there_is(document: Path) -> None:
    for block in blocks(document, "python"):
        tree = ast.parse(textwrap.dedent(block.text))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ngramspec":
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                given = {keyword.arg for keyword in node.keywords}
                if node.func.id == "Engine":
                    assert given <= {*options_of(EngineConfig), "config", "tokenizer", "datastore", "drafters", "alone", "progress"}
                if node.func.id == "SamplingParams":
                    assert given <= set(options_of(SamplingParams))


TAKES_TOP_A = """
from ngramspec import SamplingParams
from tests.test_docs import parse

assert SamplingParams(top_a=0.2).top_a == 0.2
assert parse(["complete", "x", "--top-a", "0.2"]).params["top_a"] == 0.2
"""


STOPS_AT_REPEATED_TOKENS = """
import numpy as np
from ngramspec.engine.stop_conditions import find_stop, find_stop_compiled
from ngramspec.sequence_table import RUNNING, SEQUENCE, STOP

for last, wanted in ((7, STOP), (8, RUNNING)):
    row = np.rec.array(np.array([(0, last, 7, 12, 10, 11, 99, *[0] * 9, False, False)], SEQUENCE))[0]
    assert find_stop(row, frozenset()) == find_stop_compiled(row, np.empty(0, np.int32)) == wanted
"""


@pytest.mark.parametrize(("number", "check"), [(0, TAKES_TOP_A), (1, STOPS_AT_REPEATED_TOKENS)], ids=["parameter", "stop rule"])
def test_patches_of_contributing_do_all_that_is_needed(tmp_path: Path, number: int, check: str) -> None:
    """Each patch applies and is the whole change. The server's tests show that routes take a new parameter."""
    patch = blocks(ROOT / "CONTRIBUTING.md", "diff")[number]
    for folder in ("ngramspec", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.text, text=True, check=True)
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, check=True)


# ------------------------------------------------------------------ links and names


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.M | re.S), re.MULTILINE):
        base = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        name, n = base, 0
        while name in found:
            n += 1
            name = f"{base}-{n}"
        found.add(name)
    return found


@each_document
def test_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.is_relative_to(ROOT), f"{target} leaves the repository"
        assert file.exists(), f"{target}: there is no such file"
        if anchor:
            assert anchor in anchors(file), f"{target}: {file.name} has no such heading, but {sorted(anchors(file))}"


@each_document
def test_files_and_modules_exist(document: Path) -> None:
    if document.name == "CHANGELOG.md":  # names what is gone
        return
    for path in re.findall(r"(?<![\w/.-])((?:ngramspec|datastore|tests|benchmarks|docs|tools)/[\w./-]*\w)", document.read_text("utf-8")):
        if "NAME" not in path:
            assert (ROOT / path).exists(), f"there is no {path}"
    for name in re.findall(r"`(ngramspec(?:\.[a-z_]+)+(?:\.[A-Z]\w+)?)[`(]", document.read_text("utf-8")):
        module, _, last = name.rpartition(".")
        if last[:1].isupper():
            assert hasattr(importlib.import_module(module), last), f"{module} has no {last}"
        else:
            assert importlib.util.find_spec(name) is not None, f"there is no module {name}"


def test_functions_of_contributing_are_in_the_files_beside_them() -> None:
    for item in re.split(r"\n\n|\n(?=- )", prose(ROOT / "CONTRIBUTING.md")):
        files = [ROOT / path for path in re.findall(r"`((?:ngramspec|datastore|tests)/[\w/]+\.py)`", item)]
        for name in re.findall(r"`(_?[a-z]+_[a-z_]+|_?[A-Z]+_[A-Z_]+)`", item) if files else ():
            assert any(re.search(rf"\b{name}\b", path.read_text("utf-8")) for path in files), f"{name} is in none of {files}"


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MOST_LINES


@each_document
def test_pages_are_short(document: Path) -> None:
    lines = [line for line in prose(document).splitlines() if line.strip() and not line.lstrip().startswith(("|", "<!--"))]
    assert len(lines) <= MOST_LINES, f"{len(lines)} lines of prose, at most {MOST_LINES}: split the page"


def test_every_document_is_found_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", (ROOT / "README.md").read_text("utf-8")))
    assert {path.relative_to(ROOT).as_posix() for path in DOCUMENTS} - {"README.md"} <= linked


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_whole(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    assert root.get("viewBox")
    assert root.find("{*}title") is not None, "a picture says what it shows"
    assert "prefers-color-scheme: dark" in picture.read_text("utf-8")


def test_the_picture_has_every_room() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    rooms = {room for layer in layers for room in layer.split(" | ") if is_room(ROOT / "ngramspec" / room)} | {"datastore"}
    texts = re.findall(r'class="name"[^>]*>([^<]+)<', (ROOT / "docs" / "architecture.svg").read_text("utf-8"))
    shown = {name.split("/")[0] for text in texts for name in text.split(", ")}
    assert rooms <= shown, f"not in the picture: {rooms - shown}"
    assert shown - rooms <= {"config", "plain data"}, "modules that every room shares"


def is_room(folder: Path) -> bool:
    """Return whether a package has code of its own, not only old names of modules."""
    return any("alias_module(__name__" not in path.read_text("utf-8") for path in folder.glob("[a-z]*.py"))


# ------------------------------------------------------------------ generated tables


def table(settings: type, header: str) -> str:
    """Return a table with a row per option of a dataclass: name, flags, default, what is accepted, meaning."""
    lines = [f"| {header} | command line | default | accepted | meaning |", "|---|---|---|---|---|"]
    for name, option in options_of(settings).items():
        cells = [f"`{name}`", flags(name), _default(option.default), option.kind.accepted, option.help]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def flags(name: str) -> str:
    """Return a setting's flags in `ngramspec complete`, or in `ngramspec serve`, then marked so."""
    for command, behind in (("complete", ""), ("serve", " (`serve`)")):
        for parameter in command_line().commands[command].params:
            if parameter.name == name:
                return ", ".join(f"`{flag}`" for flag in [*parameter.opts, *parameter.secondary_opts]) + behind
    return "–"


def _default(value: object) -> str:
    if value is None or value in ((), {}, ""):
        return "none"
    return ("on" if value else "off") if isinstance(value, bool) else f"`{value}`"


def request_fields() -> str:
    """Return a table with a row for all fields of one fate and reason, with the routes that have them."""
    from ngramspec.server.field_support import FIELDS, ROUTES, FieldSupport

    lines = ["| fields | routes | fate | what they do, or why not | asks for nothing |", "|---|---|---|---|---|"]
    parameters = set(options_of(SamplingParams))
    for fate in (FieldSupport.DONE, FieldSupport.ACCEPTED, FieldSupport.REFUSED):
        for row in FIELDS:
            if row.fate is fate and not (fate is FieldSupport.DONE and parameters.issuperset(row.names) and row.why == _help(row.names[0])):
                names = ", ".join(f"`{name}`" for name in row.names)
                routes = "all" if row.routes == ROUTES else ", ".join(f"`{route}`" for route in row.routes)
                neutral = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral) or "–"
                lines.append(f"| {names} | {routes} | {fate.value} | {row.why} | {neutral if fate is FieldSupport.REFUSED else '–'} |")
    return "\n".join(lines)


def _help(name: str) -> str:
    return options_of(SamplingParams)[name].help


def generated(document: Path) -> dict[str, str]:
    if document == SERVER:
        return {"fields": request_fields()}
    return {
        "engine": table(EngineConfig, "setting"),
        "sampling": table(SamplingParams, "parameter"),
    }


def with_tables(document: Path) -> str:
    """Return the document with its generated tables as they should be."""
    text = document.read_text("utf-8")
    for name, rows in generated(document).items():
        marked = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        text, n = re.subn(marked, lambda found, rows=rows: f"{found[1]}\n{rows}\n\n{found[2]}", text, flags=re.DOTALL)
        assert n == 1, f"no place for the table {name}"
    return text


@pytest.mark.parametrize("document", [SETTINGS, SERVER], ids=lambda path: path.name)
def test_generated_tables_are_the_declarations(document: Path) -> None:
    message = f"{document.name} differs from the declarations; `python tests/test_docs.py` writes it"
    assert document.read_text("utf-8") == with_tables(document), message


@pytest.mark.parametrize("name", ["setting", "limit"])
def test_tables_of_the_server_are_its_settings(name: str) -> None:
    from ngramspec.server.settings import Limits, ServerSettings

    fields = (ServerSettings if name == "setting" else Limits).model_fields
    rows = re.search(rf"^\| {name} \| default \| \w+ \|\n\|---.*?(?:\n\n|\Z)", SETTINGS.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert rows is not None
    told = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", rows[0], re.MULTILINE))
    assert list(told) == list(fields)
    for field, default in told.items():
        assert default == ("see below" if field == "limits" else _default(fields[field].default)), field


if __name__ == "__main__":
    for path in (SETTINGS, SERVER):
        path.write_text(with_tables(path), "utf-8")
        print(f"{path.relative_to(ROOT)} is written")
