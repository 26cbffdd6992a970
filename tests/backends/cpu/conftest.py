"""Kernels of every target of this machine, with compiled code where the engine keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from ngramspec.backends.cpu.codegen.kernels import Kernels
from ngramspec.backends.cpu.codegen.targets import Target, list_targets
from ngramspec.datastore.cache_dir import cache_dir

TARGETS = list_targets()
if TARGETS[0].dot == "vnni512":  # what a processor with AVX-512 of the first generation takes
    TARGETS.insert(1, TARGETS[0]._replace(name="AVX-512", dot="maddubs"))


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is derived from tiny files goes when they go; compiled code stays."""
    folder, code = tmp_path_factory.mktemp("cache"), cache_dir() / "code"
    code.mkdir(parents=True, exist_ok=True)
    (folder / "code").symlink_to(code.resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NGRAMSPEC_CACHE", str(folder))
        yield


@pytest.fixture(scope="session")
def kernels_of() -> Callable[[Target], Kernels]:
    return cache(lambda target: Kernels(target, cache_dir() / "code"))


@pytest.fixture(scope="session")
def generic(kernels_of: Callable[[Target], Kernels]) -> Kernels:
    assert TARGETS[-1].dot == "plain"
    return kernels_of(TARGETS[-1])


@pytest.fixture(scope="session", params=TARGETS[:-1], ids=lambda target: target.name)
def other(request: pytest.FixtureRequest, kernels_of: Callable[[Target], Kernels]) -> Kernels:
    """Each target but the generic one."""
    return kernels_of(request.param)
