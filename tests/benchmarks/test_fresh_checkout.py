"""benchmarks.server repo: the checkout that it makes, and what it prints, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from benchmarks import fresh_checkout, server


def test_a_checkout_is_a_repository_of_as_many_files(tmp_path: Path) -> None:
    for n in range(5):
        (tmp_path / "source" / str(n)).mkdir(parents=True)
        (tmp_path / "source" / str(n) / "module.py").write_text(f"x = {n}\n")
    assert fresh_checkout.make_checkout(tmp_path / "tree", [tmp_path / "source"], 3) == 3
    assert (tmp_path / "tree" / ".git").is_dir()


@pytest.mark.soak
def test_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model takes no number of a saved line, so that this part is left out."""
    tiny.tiny_model("llama", vocab_size=320, max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "source").mkdir()
    for n in range(3):
        (tmp_path / "source" / f"{n}.py").write_text(f"def f{n}(x):\n    return x + {n}\n")
    monkeypatch.setattr(fresh_checkout, "save_line", lambda *_: 0.5)
    monkeypatch.setattr(fresh_checkout, "PAUSE_S", 0.01)
    server.main(["repo", "--model", str(tmp_path / "model"), "--files", "3", "--saves", "2", "--sources", str(tmp_path / "source")])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["files"], document["save_s"], document["save_s_all"]) == (3, 0.5, [0.5, 0.5])
    assert 0 < document["first_completion_s"] <= document["build_s"]
    assert document["restart_s"] > 0
    assert document["tokens"] > 0
    assert set(document["completion_ms"]) == set(document["held_up"]) == {"building", "after"}
    assert document["longest_pass_ms"]["after"] > 0
    assert set(document["while"]) <= {"waiting", "building", "ready", "followed"}


def test_passes_that_were_held_up() -> None:
    """The first of a text is a prompt's."""
    quick, held = [0.5, 0.01, 0.02, 0.01], [0.5, 0.02, 0.08, 0.05]
    assert fresh_checkout.summarise_passes({"building": [[quick, held]], "after": [[quick, quick]]}) == {
        "completion_ms": {"building": 595.0, "after": 540.0},
        "passes": {"building": 6, "after": 6},
        "longest_pass_ms": {"building": 80.0, "after": 20.0},
        "held_up": {"building": 1, "after": 0},
    }
    assert fresh_checkout.summarise_passes({"building": [], "after": [[quick]]})["longest_pass_ms"]["building"] is None
