"""What an installation holds: the datastore under its installed name, every package, the version."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import tiny_gguf
from packaging.requirements import Requirement

import ngramspec
from ngramspec.cli.common import missing_packages
from ngramspec.datastore import Datastore
from tools import build_wheel

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


@pytest.mark.parametrize(
    ("host", "extra", "package"), [("transformers", "transformers", "transformers"), ("llama_cpp", "llama-cpp", "llama-cpp-python")]
)
def test_an_integrations_extra_installs_versions_that_it_runs_in(host: str, extra: str, package: str) -> None:
    tree = ast.parse((ROOT / "ngramspec" / "integrations" / f"{host}.py").read_text())
    (tested,) = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "TESTED"]
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    (allowed,) = [Requirement(each).specifier for each in listed if Requirement(each).name == package]
    *before, last = (int(number) for number in tested[1].split("."))
    assert tested[0] in allowed
    assert tested[1] in allowed
    assert ".".join(str(number) for number in (*before, last + 1)) not in allowed


def test_the_installed_version_is_that_of_the_source() -> None:
    assert importlib.metadata.version("ngramspec") == ngramspec.__version__


def test_the_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="ngramspec")
    assert callable(command.load())


def test_public_names_resolve() -> None:
    for name in ngramspec.__all__:
        assert getattr(ngramspec, name) is not None


@pytest.mark.parametrize(("package", "command", "extra"), [("torch", "complete", "engine"), ("transformers", "beam", "engine")])
def test_a_base_installation_says_what_a_command_needs(package: str, command: str, extra: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = [{command!r}, 'x']; from ngramspec.cli.main import main; main()"
    env = os.environ | {"NGRAMSPEC_CACHE": str(tmp_path)}  # no start before this one
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1]
        == f"ngramspec: {package} is not installed, which this command needs; run: pip install 'ngramspec[{extra}]'"
    )


def test_a_base_installation_builds_a_datastore_for_a_gguf_file(tmp_path: Path) -> None:
    model = tiny_gguf.write(tmp_path / "model.gguf")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.py").write_text("def add(a, b):\n    return a + b\n" * 9)
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extra = [re.split(r"[><=]", name)[0].replace("-", "_") for name in listed["engine"]]
    code = f"import sys; sys.modules |= dict.fromkeys({extra}); from ngramspec.cli.main import main; main()"
    command = ["build-datastore", str(tmp_path / "tree"), "-o", str(tmp_path / "store"), "--tokenizer", str(model)]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with Datastore.open(tmp_path / "store") as store:
        assert store.info()["documents"] == 1


def test_a_base_installation_says_what_the_engine_needs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nfound = m.version\n"
        "def version(name):\n    if name == 'transformers':\n        raise m.PackageNotFoundError(name)\n    return found(name)\n"
        "m.version = version\n"
    )
    code = "try:\n    from ngramspec import Engine\nexcept ImportError as error:\n    print(type(error).__name__, error)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    told = "transformers is not installed, which Engine needs; run: pip install 'ngramspec[engine]'"
    assert done.stdout.strip() == f"MissingPackageError {told}"


def test_the_package_lists_its_public_names_alone() -> None:
    assert dir(ngramspec) == sorted(ngramspec.__all__)
    assert dir(ngramspec.datastore) == sorted(ngramspec.datastore.__all__)


def test_every_package_of_an_extra_is_known_by_its_module() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("engine", "server"):
        names = [re.split(r"[><=]", name)[0].replace("-", "_") for name in extras[extra] if not name.startswith("ngramspec")]
        for name in names:
            assert f"[{extra}]" in str(missing_packages(ModuleNotFoundError("", name=f"{name}.part")))
    assert missing_packages(ModuleNotFoundError("", name="somebody_elses")) is None
    assert missing_packages(ValueError()) is None


def test_torch_is_held_back_by_the_constraints_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [name for name in project["optional-dependencies"]["engine"] if name.startswith("torch")]
    assert torch == "torch>=2.11,<3"
    assert "torch<2.14" in (ROOT / "constraints.txt").read_text()
    assert not [name for name in project["dependencies"] if name.startswith(("torch", "transformers"))]


def test_a_source_package_holds_what_is_tracked(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no clone")
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    for name in tracked:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / "source" / name)
    build = "import setuptools.build_meta as b; b.build_sdist('..')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path / "source", capture_output=True, check=True)
    (package,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tracked) - held <= {".gitignore"}


def test_a_wheel_carries_machine_code_and_the_tags_of_who_can_load_it(tmp_path: Path) -> None:
    source = build_wheel.copy_sources(tmp_path / "source")
    code = source / "datastore" / "machine_code" / "x86-64-v3" / "some.nbc"
    code.parent.mkdir(parents=True)
    code.write_bytes(b"code")
    build_wheel.pack_wheel(source, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name == f"ngramspec-{ngramspec.__version__}-{python}-none-{build_wheel.SYSTEM}.whl"
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        assert archive.read("ngramspec/datastore/machine_code/x86-64-v3/some.nbc") == b"code"
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ngramspec").rglob("*.py")}
    assert not {name for name in modules if name not in held}
