"""Datastores at run time: listed, added, updated and taken away by an administrator, while requests go on.

Names and paths enter, calls of the engine and of `ngramspec.datastore` leave, off the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from pydantic import BaseModel, ConfigDict, Field

from ngramspec import __version__
from ngramspec.datastore import Datastore, DatastoreError, DatastoreFullError, DatastoreLockedError
from ngramspec.server.auth import Identity, require_administrator
from ngramspec.server.error_responses import ApiError, ErrorBody, retry_after
from ngramspec.server.middleware import ParsedBodyRoute
from ngramspec.server.repositories import ServedRepository
from ngramspec.server.state import ServerState

Name = Annotated[str, Path(pattern=r"^[\w.-]{1,64}$", description="What requests call it.")]
Administrator = Annotated[Identity, Depends(require_administrator)]


class Folder(BaseModel):
    """The folder of a datastore."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$", description="A folder on the server's machine.")


class DatastoreInfo(BaseModel):
    """A datastore in use."""

    name: str
    path: str
    generation: int
    documents: int
    tokens: int
    bytes: int
    sources: list[dict[str, Any]]


class DatastoreList(BaseModel):
    datastores: list[DatastoreInfo]


class Updated(BaseModel):
    """What an update did."""

    name: str
    changed: bool
    added: int
    removed: int
    unchanged: int
    generation: int


class Removed(BaseModel):
    name: str
    removed: bool = True


class StoreProgress(BaseModel):
    """How far a working tree's store is."""

    name: str
    state: str
    ready: bool
    files: int
    n_files: int
    seconds_left: float | None
    message: str


class RepositoryInfo(BaseModel):
    """A working tree that the server drafts from."""

    name: str
    path: str
    address: str
    """What addresses of requests about it begin with."""
    stores: list[StoreProgress]


class RepositoryList(BaseModel):
    repositories: list[RepositoryInfo]


def make_router(state: ServerState) -> APIRouter:
    busy, full = (
        {"model": ErrorBody, "description": "Somebody else writes to it."},
        {"model": ErrorBody, "description": "The disk is full."},
    )
    routes = APIRouter(prefix="/admin", tags=["administration"], route_class=ParsedBodyRoute)
    engine = state.engine

    def find(name: str) -> Datastore:
        store = engine.datastores.get(name)
        if store is None:
            raise ApiError(404, f"there is no datastore {name!r}", param="name", code="unknown_datastore")
        return store

    @routes.get("/datastores")
    async def list_datastores(_: Administrator) -> DatastoreList:
        """List the datastores in use."""

        def describe() -> DatastoreList:
            with _as_api_errors("name"):  # one that is not open may be gone
                return DatastoreList(datastores=[_describe_datastore(name, store) for name, store in engine.datastores.items()])

        return await asyncio.to_thread(describe)

    @routes.put("/datastores/{name}")
    async def put_datastore(name: Name, folder: Folder, _: Administrator) -> DatastoreInfo:
        """Draft from a datastore that lies on the server's machine, or from another one under a name that is in use."""

        def put() -> DatastoreInfo:
            with _as_api_errors("path"):
                engine.add_datastore(name, folder.path)
                return _describe_datastore(name, find(name))

        return await asyncio.to_thread(put)

    @routes.post("/datastores/{name}/update", responses={409: busy, 507: full})
    async def update_datastore(name: Name, _: Administrator) -> Updated:
        """Bring a datastore up to date with the files it was built from. Requests go on, and see it when it is done."""
        from ngramspec.datastore.update import update

        store = find(name)

        def bring_up_to_date() -> Updated:
            with _as_api_errors("name"):
                done = update(store.path, writer=f"ngramspec {__version__}")
            return Updated(
                name=name,
                changed=done.committed,
                added=done.added,
                removed=done.removed,
                unchanged=done.unchanged,
                generation=done.generation,
            )

        return await asyncio.to_thread(bring_up_to_date)

    @routes.delete("/datastores/{name}")
    async def delete_datastore(name: Name, _: Administrator) -> Removed:
        """Draft from a datastore no longer. What is on disk stays."""
        find(name)
        with contextlib.suppress(KeyError):  # somebody else was quicker
            await asyncio.to_thread(engine.remove_datastore, name)
        return Removed(name=name)

    @routes.get("/repositories")
    async def list_repositories(_: Administrator) -> RepositoryList:
        """List the working trees that the server was started with, and how far their stores are."""
        return RepositoryList(repositories=[_describe_repository(each) for each in state.repositories.trees.values()])

    return routes


def _describe_repository(tree: ServedRepository) -> RepositoryInfo:
    stores = [{"name": name, **asdict(progress)} for name, progress in tree.progress.items()]
    return RepositoryInfo.model_validate({"name": tree.name, "path": tree.path, "address": tree.address, "stores": stores})


def _describe_datastore(name: str, store: Datastore) -> DatastoreInfo:
    return DatastoreInfo.model_validate({"name": name, **store.info()})


@contextlib.contextmanager
def _as_api_errors(param: str) -> Iterator[None]:
    """Raise errors of datastores as answers to the administrator."""
    try:
        yield
    except DatastoreLockedError as error:
        raise ApiError(409, str(error), param=param, code="datastore_locked", headers=retry_after(5)) from error
    except DatastoreFullError as error:
        raise ApiError(507, str(error), param=param, code="disk_full") from error
    except (DatastoreError, OSError, ValueError) as error:
        raise ApiError(400, str(error), param=param, code="datastore_error") from error
