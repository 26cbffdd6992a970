"""`ngramspec serve --repo`: which trees are taken, what is refused before a model is loaded, and what is printed for editors."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from playback import PlaybackEngine, run

from ngramspec.cli import editors
from ngramspec.cli.common import BadInputError
from ngramspec.cli.serve import parse_workspaces

ROOT = Path(__file__).resolve().parents[2]
URL = "http://127.0.0.1:8000"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "my project"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.py").write_text(f"x = {n}\n")
    return folder


def serve(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code, and what the server would have been run with; it is said to be ready at once."""
    made: dict[str, Any] = {}

    def served(make_engine: Any, settings: Any, repositories: Any, ready: Any) -> None:
        made["repositories"] = repositories
        ready(URL, SimpleNamespace(name="tiny", tokenizer=tiny.byte_tokenizer()))

    monkeypatch.setitem(sys.modules, "ngramspec.server.run", SimpleNamespace(run=served))
    return run(monkeypatch, "serve", *arguments), made


def test_trees_by_name(
    engine: type[PlaybackEngine], tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tree)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    code, made = serve(monkeypatch, "--repo", tmp_path / "link", "--repo", "mine=.")
    assert code == 0
    assert {name: each.path for name, each in made["repositories"].trees.items()} == {
        "my_project": str(tree),
        "mine": str(tmp_path / "other"),
    }
    printed = capsys.readouterr().out
    assert f"{URL}/repo/my_project\n" in printed
    assert f"{URL}/repo/mine\n" in printed
    assert f"'endpoint_fim': '{URL}/repo/my_project/infill'" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repo", "absent"], "is no folder"),
        (["--repo", "tree/0.py"], "is no folder"),
        (["--repo", "tree", "--repo", "x=tree/../tree"], "is given twice"),
        (["--repo", "a=tree", "--repo", "a=."], "the name a is given twice"),
        (["--with-installed"], "name the working tree"),
        (["--repo", "tree", "--drafter", "lookahead", "--alone"], "leave out --alone"),
        (["--repo", "\udcff"], "is not valid Unicode"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(
    engine: type[PlaybackEngine],
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    tree.rename(tree.parent / "tree")
    monkeypatch.chdir(tree.parent)
    code, made = serve(monkeypatch, *arguments)
    assert (code, made) == (2, {})
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_a_store_and_a_tree_have_different_names(tree: Path) -> None:
    assert list(parse_workspaces([str(tree)], {"my_project": ""})) == ["my_project-2"]
    with pytest.raises(BadInputError, match="the name project is given twice"):
        parse_workspaces([f"project={tree}"], {"project": ""})
    assert parse_workspaces([str(tree)], {}) == {"my_project": str(tree)}


def test_what_editors_are_given() -> None:
    text = editors.format_settings(URL, 'a "b"', ["one"], infill=True, keys=False)
    assert "/repo/" not in text, "one tree is everybody's"
    assert all(f"{place}:" in text for place in editors.EDITORS)
    assert "key" not in text.partition("llama.vim")[0]
    assert "trained to fill in" not in text
    for template in (editors.LLAMA_VSCODE, editors.ZED):
        json.loads(template.substitute(url=URL, model=json.dumps('a "b"')))
    text = editors.format_settings(URL, "m", ["my tree", "b/c"], infill=False, keys=True)
    assert f"{URL}/repo/my%20tree/v1" in text
    assert f"{URL}/repo/b%2Fc\n" in text
    assert text.startswith("m was not trained to fill in the middle")
    assert "wants a key" in text


def test_the_documents_have_the_same_lines() -> None:
    document = (ROOT / "docs" / "server.md").read_text("utf-8")
    for template in editors.EDITORS.values():
        pasted = template.substitute(url=URL, model='"MODEL"')
        assert f"```\n{pasted}\n```" in re.sub(r"```\w+", "```", document).replace("model: MODEL", 'model: "MODEL"'), pasted
