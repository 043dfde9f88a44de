"""
Each kind of work has its own threads: key lookups and polls do not wait for files, or vice versa.

The tests find violations automatically: they call every method of the store while all file threads
are busy, and they record which threads use files of the data folder.
"""

import asyncio
import dataclasses
import enum
import inspect
import sys
import threading
import types
import typing
from collections import abc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import hosted
from tinkex.server.store import Store, open_store

pytestmark = pytest.mark.anyio

#: Methods that work on files, and may wait for them.
WITH_FILES = {
    *("checkpoints.copy_files", "checkpoints.store_files", "snapshots.open", "snapshots.save"),
    *("snapshots.set_aside", "retention.delete_orphans", "checkpoints.discard"),
}
FILE_POOLS = ("_file_threads", "_folder_threads")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(
        db_url=f"sqlite:///{tmp_path / 'tinkex.db'}", storage_url=str(tmp_path), folder=tmp_path
    )
    yield opened
    opened.close()


@contextmanager
def blocked(store: Store, *names: str) -> Iterator[None]:
    """All threads of these pools are busy."""
    release = threading.Event()
    jobs = []
    for name in names:
        pool: ThreadPoolExecutor = getattr(store._database, name)
        busy = threading.Barrier(pool._max_workers + 1)

        def occupied(busy: threading.Barrier = busy) -> None:
            busy.wait()
            release.wait()

        jobs += [pool.submit(occupied) for _ in range(pool._max_workers)]
        busy.wait(10)
    try:
        yield
    finally:
        release.set()
        for job in jobs:
            job.result(10)


def pools(store: Store) -> list[str]:
    found = vars(store._database).items()
    return [name for name, value in found if isinstance(value, ThreadPoolExecutor)]


async def test_a_key_is_looked_up_while_everything_else_is_busy(store: Store) -> None:
    _, secret = await store.keys.create(owner="alice")
    others = [name for name in pools(store) if name != "_key_readers"]
    assert len(others) >= 4
    with blocked(store, *others):
        assert await asyncio.wait_for(store.keys.any(), 10)
        found = await asyncio.wait_for(store.keys.by_secret(secret), 10)
        assert found is not None
        assert await asyncio.wait_for(store.keys.by_id(found.key_id), 10)


async def test_polls_and_payloads_do_not_wait_for_reports_and_folders(store: Store) -> None:
    with blocked(store, "_reporters", "_folder_threads"):
        assert await asyncio.wait_for(store.requests.get("unknown"), 10) is None
        # Larger than what is stored in a row.
        key = await asyncio.wait_for(store.requests.store_result(bytes(200_000)), 10)
        assert key is not None


def methods(store: Store) -> Iterator[tuple[str, Any]]:
    for part, value in vars(store).items():
        if not part.startswith("_") and type(value).__module__.startswith("tinkex.server.store"):
            for name, method in inspect.getmembers(value, inspect.iscoroutinefunction):
                if not name.startswith("_"):
                    yield f"{part}.{name}", method


def made(kind: Any) -> Any:
    """A value of a type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if type(None) in args else made(args[0])
    if origin is tuple:
        return tuple(made(one) for one in args if one is not ...)
    if origin in (abc.Callable, abc.Awaitable) or kind is Any:
        return lambda *_: False
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = [field for field in dataclasses.fields(kind) if field.init]
        return kind(**{field.name: made(hints[field.name]) for field in fields})  # type: ignore[operator]
    known: dict[Any, Any] = {str: "x", int: 1, float: 1.0, bool: False, bytes: b"{}", set: set()}
    by_abstract: dict[Any, Any] = {
        **{one: [] for one in (abc.Sequence, abc.Iterable, abc.Collection, list)},
        **{one: {} for one in (abc.Mapping, dict)},
        set: set(),
    }
    return by_abstract[origin] if origin in by_abstract else known[kind]


async def test_no_method_waits_for_files_unless_it_is_about_files(store: Store) -> None:
    waited, called = set(), set()
    with blocked(store, *FILE_POOLS):
        for name, method in methods(store):
            hints = typing.get_type_hints(method)
            wanted = inspect.signature(method).parameters.values()
            kwargs = {one.name: made(hints[one.name]) for one in wanted if one.default is one.empty}
            positional = [
                kwargs.pop(one.name)
                for one in wanted
                if one.kind is not one.KEYWORD_ONLY and one.name in kwargs
            ]
            called.add(name)
            # Methods that work on files do wait, so a short timeout saves time.
            timeout_s = 0.2 if name in WITH_FILES else 5
            try:
                await asyncio.wait_for(method(*positional, **kwargs), timeout_s)
            except TimeoutError:
                waited.add(name)
            except Exception:  # noqa: BLE001, S110  there is no such row; the method returned
                pass
    assert waited - WITH_FILES == set()
    assert called >= WITH_FILES
    assert len(called) > 60


class _FileUses:
    """Records which threads used files below a folder, and where in the server."""

    def __init__(self) -> None:
        self.below: str | None = None
        self.seen: set[tuple[str, str, str]] = set()
        sys.addaudithook(self._hook)  # cannot be removed

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.below is None or not (event == "open" or event.startswith(("os.", "shutil."))):
            return
        if not args or not str(args[0]).startswith(self.below):
            return
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and "/tinkex/server/" not in frame.f_code.co_filename:
            if "/server/echo.py" in frame.f_code.co_filename:
                return  # the stand-in engine
            frame = frame.f_back
        if frame is not None:
            self.seen.add((threading.current_thread().name, event, frame.f_code.co_qualname))


async def test_files_are_used_only_in_file_threads(tmp_path: Path) -> None:
    uses = _FileUses()
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0, orphan_s=0) as api:
        uses.below = str(tmp_path)
        model_id = await api.model()
        await api.passed(await api.forward_backward(model_id, 1, tokens=60_000))
        step = await api.step("save_weights", model_id=model_id, seq_id=2, path="a")
        path = (await api.result(step))["path"]
        load = {"model_id": model_id, "path": path, "optimizer": False}
        await api.result(await api.step("load_weights", **load, seq_id=3))
        sample = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
        step = await api.step("save_weights_for_sampler", model_id=model_id, seq_id=4, path="s")
        path = (await api.result(step))["path"]
        await api.result(await api.step("asample", **sample, base_model=BASE, model_path=path))
        await api.clean_up()
        uses.below = None
    threads = {name.rpartition("_")[0] or name for name, *_ in uses.seen}
    assert {"tinkex-file", "tinkex-folder"} <= threads
    elsewhere = {
        seen for seen in uses.seen if not seen[0].startswith(("tinkex-file", "tinkex-folder"))
    }
    assert elsewhere == set()
