"""
Ages are measured by the monotonic clock; the system clock says only which moment it is.

A system clock that is set back makes everything younger that was measured by it: a revoked key went
on opening doors until the clock had caught up. So every use of the system clock in the server is
listed here with its reason, unless it plainly stamps a moment onto something. A new one fails.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.echo import EchoExecutor
from server.hosting import hosted
from server.tenants import new_key, with_key
from tinkex.server.api import auth
from tinkex.server.api.auth import Gate, Tokens
from tinkex.server.api.errors import Refusal
from tinkex.server.store import Keys, open_store

SERVER = Path(auth.__file__).parents[1]
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}

EXPIRES = "expiry is a moment that was told to somebody"
KEPT = "compared with rows or files, which outlive the process"
SHOWN = "a moment that is shown or stored"
HOUR = "an hour of the calendar"

#: (file, function) -> why it asks the system clock.
ALLOWED = {
    ("api/audit.py", "audit"): SHOWN,
    ("api/auth.py", "Gate.__init__"): EXPIRES,
    ("api/billing.py", "usage_events"): KEPT,
    ("api/billing.py", "current_storage"): KEPT,
    ("api/copies.py", "copy_weights"): SHOWN,
    ("api/history.py", "search_sessions"): EXPIRES,
    ("api/history.py", "trace"): SHOWN,
    ("api/keys.py", "exchange"): EXPIRES,
    ("api/runs.py", "set_ttl"): EXPIRES,
    ("dispatch/dispatcher.py", "Dispatcher.start"): EXPIRES,
    ("futures.py", "_is_old"): KEPT,
    ("presence.py", "Presence.__init__"): KEPT,
    ("saving.py", "_naming"): EXPIRES,
    ("signing.py", "Signer.opens"): EXPIRES,
    ("signing.py", "Signer.sign"): EXPIRES,
    ("maintenance/cleanup.py", "Cleanup.__init__"): KEPT,
    ("store/checkpoint_lists.py", "CheckpointLists._change"): EXPIRES,
    ("store/checkpoint_lists.py", "CheckpointLists.checkpoint"): EXPIRES,
    ("store/checkpoint_lists.py", "CheckpointLists.checkpoints"): EXPIRES,
    ("store/checkpoint_lists.py", "CheckpointLists.delete"): EXPIRES,
    ("store/checkpoint_lists.py", "CheckpointLists.runs"): EXPIRES,
    ("store/checkpoint_lists.py", "CheckpointLists.set_expiry"): EXPIRES,
    ("store/checkpoint_lists.py", "CheckpointLists.set_public"): EXPIRES,
    ("store/checkpoint_lists.py", "_earlier_copy"): EXPIRES,
    ("store/checkpoint_lists.py", "_newest"): EXPIRES,
    ("store/checkpoints.py", "Checkpoints._named"): EXPIRES,
    ("store/checkpoints.py", "Quotas._allowed"): EXPIRES,
    ("store/checkpoints.py", "Quotas._used"): EXPIRES,
    ("store/checkpoints.py", "Quotas.within"): KEPT,
    ("store/checkpoints.py", "_assign_name"): EXPIRES,
    ("store/events.py", "Telemetry.record"): HOUR,
    ("store/inspection.py", "_inspect_files"): KEPT,
    ("store/request_writes.py", "RequestInsert"): SHOWN,
    ("store/request_writes.py", "_values"): SHOWN,
    ("store/request_writes.py", "count_tokens"): HOUR,
    ("store/requests.py", "Requests.mark_all_fetched"): SHOWN,
    ("store/sessions.py", "Sessions.contents"): EXPIRES,
    ("store/sessions.py", "Sessions.create_session.act"): SHOWN,
    ("store/sessions.py", "_readable"): EXPIRES,
}


class Uses(ast.NodeVisitor):
    """Where one file asks for the system clock, apart from plain stamps (`created_s=time.time()`)."""

    def __init__(self) -> None:
        self._inside: list[str] = []
        self._stamps: set[ast.AST] = set()
        self.found: list[str] = []

    def _enter(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _enter

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and str(key.value).endswith("_s"):
                self._stamps.update(_called(value))
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if (node.arg or "").endswith("_s") and node.arg != "now_s":
            self._stamps.update(_called(node.value))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = (ast.unparse(node.value).rpartition(".")[2], node.attr)
        if name in WALL and node not in self._stamps:
            self.found.append(".".join(self._inside))
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module == "time":
            self.found.append(f"import {node.names[0].name}")  # it would not be seen above


def _called(value: ast.expr) -> list[ast.AST]:
    """The clock in `clock()`, and nothing when something is computed with it."""
    return [value.func] if isinstance(value, ast.Call) else []


def uses() -> Iterator[tuple[str, str]]:
    for file in sorted(SERVER.rglob("*.py")):
        visitor = Uses()
        visitor.visit(ast.parse(file.read_text()))
        for inside in visitor.found:
            yield file.relative_to(SERVER).as_posix(), inside


def test_every_use_of_the_system_clock_has_a_reason() -> None:
    found = set(uses())
    new = sorted(found - set(ALLOWED))
    assert not new, f"an age is measured by time.monotonic(); if it is none, say why here: {new}"
    assert sorted(set(ALLOWED) - found) == [], "these are gone: take them out of the list"


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("def f():\n    return time.time() - began_s", True),
        ("def f(clock=time.time): ...", True),
        ("def f():\n    return g(now_s=time.time())", True),
        ("def f():\n    return g(created_s=time.time() - 5)", True),
        ("def f():\n    return datetime.now(UTC) - since", True),
        ("from time import time", True),
        ("def f():\n    return Row(created_s=time.time())", False),
        ('def f():\n    return {"finished_s": time.time()}', False),
        ("def f():\n    return time.monotonic() - began_s", False),
    ],
)
def test_the_rule_finds_ages(text: str, is_found: bool) -> None:
    visitor = Uses()
    visitor.visit(ast.parse(text))
    assert bool(visitor.found) is is_found


class Clock:
    """Both clocks of a machine; the system clock can be set."""

    def __init__(self) -> None:
        self.running_s = 1_000.0
        self.set_by_s = 1.7e9

    def monotonic(self) -> float:
        return self.running_s

    def moment(self) -> float:
        return self.running_s + self.set_by_s


@pytest.mark.anyio
@pytest.mark.parametrize("step_s", [-2 * 86_400.0, 2 * 86_400.0])
async def test_a_clock_that_is_set_does_not_keep_a_revoked_key_alive(
    tmp_path: Path, step_s: float
) -> None:
    store = open_store(
        db_url=f"sqlite:///{tmp_path / 'tinkex.db'}", storage_url=str(tmp_path), folder=tmp_path
    )
    clock = Clock()
    gate = Gate(store.keys, Tokens(b"k"), clock=clock.monotonic, moment=clock.moment)
    try:
        assert (await gate.caller(None)).owner == "local"
        clock.set_by_s += step_s
        key, secret = await store.keys.create(owner="alice")
        clock.running_s += auth.BELIEVED_S
        with pytest.raises(Refusal, match="without one"):
            await gate.caller(None)
        assert (await gate.caller(secret)).owner == "alice"
        clock.set_by_s += step_s
        await store.keys.revoke(key.key_id)
        clock.running_s += auth.BELIEVED_S
        with pytest.raises(Refusal, match="is revoked"):
            await gate.caller(secret)
    finally:
        store.close()


@pytest.mark.anyio
async def test_expiry_goes_by_the_system_clock(tmp_path: Path) -> None:
    store = open_store(
        db_url=f"sqlite:///{tmp_path / 'tinkex.db'}", storage_url=str(tmp_path), folder=tmp_path
    )
    clock = Clock()
    gate = Gate(store.keys, Tokens(b"k"), clock=clock.monotonic, moment=clock.moment)
    try:
        expires_s = clock.moment() + 1.0
        _, secret = await store.keys.create(owner="alice", expires_s=expires_s)
        assert (await gate.caller(secret)).owner == "alice"
        clock.running_s += 1.0
        with pytest.raises(Refusal, match="is expired"):
            await gate.caller(secret)
    finally:
        store.close()


@pytest.mark.anyio
async def test_unknown_keys_do_not_push_known_ones_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered of strangers has an end of its own, and costs the others nothing."""
    monkeypatch.setattr(auth, "MOST_CACHED", 20)
    monkeypatch.setattr(auth, "MOST_REFUSED_CACHED", 20, raising=False)
    monkeypatch.setattr(auth, "BELIEVED_S", 1000.0)
    looked_up: list[str] = []
    by_secret = Keys.by_secret

    async def counted(self: Keys, secret: str) -> object:
        looked_up.append(secret)
        return await by_secret(self, secret)

    monkeypatch.setattr(Keys, "by_secret", counted)
    alices = await new_key(tmp_path, "alice")
    async with hosted(EchoExecutor(), tmp_path) as nobody, with_key(nobody, alices) as alice:
        for number in range(50):
            assert (await alice.get("/api/v1/auth/apikey/me")).status == 200
            async with with_key(nobody, f"tml-nobody{number}") as stranger:
                assert (await stranger.get("/api/v1/auth/apikey/me")).status == 401
        assert looked_up.count(alices) == 1
        assert nobody.app
        gate = nobody.app.state.gate
        assert len(gate._refused) == 20
