"""What an installation holds: the datastore under its installed name, every package, the version."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path

import ngramspec

ROOT = Path(__file__).parent.parent


def test_the_datastore_is_part_of_the_package() -> None:
    datastore = importlib.import_module("ngramspec.datastore")
    assert datastore.__doc__
    assert importlib.util.find_spec("ngramspec.datastore").name == "ngramspec.datastore"


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    code = {path.parent.relative_to(ROOT) for top in ("ngramspec", "datastore") for path in (ROOT / top).rglob("*.py")}
    names = {".".join(folder.parts) for folder in code}
    names = {f"ngramspec.{name}" if name.split(".")[0] == "datastore" else name for name in names}
    assert sorted(listed) == sorted(names), "packages in pyproject.toml and folders with code differ"
    for folder in code:
        assert (ROOT / folder / "__init__.py").is_file(), f"{folder} has no __init__.py"


def test_the_installed_version_is_that_of_the_source() -> None:
    assert importlib.metadata.version("ngramspec") == ngramspec.__version__


def test_the_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="ngramspec")
    assert callable(command.load())


def test_public_names_resolve() -> None:
    for name in ngramspec.__all__:
        assert getattr(ngramspec, name) is not None
