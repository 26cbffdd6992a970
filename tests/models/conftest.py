"""Fixtures of the models' tests: a tiny Llama in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.tiny_model("llama").save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A model that the test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))
