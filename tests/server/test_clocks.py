"""
Ages are measured by the monotonic clock; the system clock is for timestamps only.

When the system clock is set back, ages measured by it shrink: a revoked key would stay valid until
the clock has caught up. So every use of the system clock in the server is listed here with its
reason, unless it is a plain timestamp (`created_s=time.time()`). A new use fails this test.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.echo import EchoExecutor
from server.hosting import hosted
from server.tenants import new_key, with_key
from tinkex.server.api import auth
from tinkex.server.api.auth import Authenticator, Tokens
from tinkex.server.api.errors import Refusal
from tinkex.server.store import Keys, open_store

SERVER = Path(auth.__file__).parents[1]
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}

EXPIRES = "an expiry is a point in time that clients know"
KEPT = "compared with rows or files, which outlive the process"
SHOWN = "a timestamp that is shown or stored"
HOUR = "a calendar hour"

#: (file, function) -> why it uses the system clock.
ALLOWED = {
    ("api/account.py", "audit"): SHOWN,
    ("api/account.py", "current_storage"): KEPT,
    ("api/account.py", "exchange"): EXPIRES,
    ("api/account.py", "usage_events"): KEPT,
    ("api/auth.py", "Authenticator.__init__"): EXPIRES,
    ("api/auth.py", "Signer.sign"): EXPIRES,
    ("api/auth.py", "Signer.verifies"): EXPIRES,
    ("api/console_data.py", "create_key_of_owner"): EXPIRES,
    ("api/console_data.py", "get_usage_by_day"): HOUR,
    ("api/console_data.py", "list_keys"): EXPIRES,
    ("api/console_data.py", "server_state"): SHOWN,
    ("api/openai_answers.py", "Answer"): SHOWN,
    ("api/usage_by_key.py", "usage_by_key"): HOUR,
    ("api/weights.py", "copy_weights"): SHOWN,
    ("api/sessions.py", "search_sessions"): EXPIRES,
    ("api/sessions.py", "trace"): SHOWN,
    ("api/runs_and_checkpoints.py", "set_ttl"): EXPIRES,
    ("maintenance/cleanup.py", "Cleanup.__init__"): KEPT,
    ("registration.py", "Registration.__init__"): SHOWN,
    ("scheduler/checkpoints.py", "_naming"): EXPIRES,
    ("scheduler/result_waiters.py", "_may_be_deleted"): KEPT,
    ("scheduler/session_status.py", "SessionTimeouts.__init__"): KEPT,
    ("store/checkpoint_catalog.py", "CheckpointCatalog._change"): EXPIRES,
    ("store/checkpoint_catalog.py", "CheckpointCatalog.checkpoint"): EXPIRES,
    ("store/checkpoint_catalog.py", "CheckpointCatalog.checkpoints"): EXPIRES,
    ("store/checkpoint_catalog.py", "CheckpointCatalog.delete"): EXPIRES,
    ("store/checkpoint_catalog.py", "CheckpointCatalog.runs"): EXPIRES,
    ("store/checkpoint_catalog.py", "CheckpointCatalog.set_expiry"): EXPIRES,
    ("store/checkpoint_catalog.py", "CheckpointCatalog.set_public"): EXPIRES,
    ("store/checkpoint_catalog.py", "_earlier_copy"): EXPIRES,
    ("store/checkpoint_catalog.py", "_newest"): EXPIRES,
    ("store/checkpoint_catalog.py", "_runs"): KEPT,
    ("scheduler/scheduler.py", "Scheduler.refresh"): EXPIRES,
    ("store/checkpoints.py", "Checkpoints._named"): EXPIRES,
    ("store/keys.py", "Keys.by_cookie"): EXPIRES,
    (
        "store/notifier.py",
        "Notifier._listen",
    ): "compared with the time in request ids of other processes",
    ("store/keys.py", "Keys.sign_in"): EXPIRES,
    ("store/quotas.py", "Quotas._allowed"): EXPIRES,
    ("store/quotas.py", "Quotas._used"): EXPIRES,
    ("store/quotas.py", "Quotas.within"): KEPT,
    ("store/checkpoints.py", "_assign_name"): EXPIRES,
    ("store/events.py", "Telemetry.record"): HOUR,
    ("store/inspection.py", "_inspect_files"): KEPT,
    ("store/request_rows.py", "finish_many"): SHOWN,
    ("store/request_rows.py", "insert"): SHOWN,
    ("store/requests.py", "Requests.accept"): SHOWN,
    ("store/request_rows.py", "_values"): SHOWN,
    ("store/request_rows.py", "count_tokens"): HOUR,
    ("store/requests.py", "Requests.mark_all_fetched"): SHOWN,
    ("store/step_rows.py", "record_step"): SHOWN,
    ("store/sessions.py", "Sessions.contents"): EXPIRES,
    ("store/sessions.py", "Sessions.create_session.operation"): SHOWN,
    ("store/sessions.py", "_readable"): EXPIRES,
}


class Uses(ast.NodeVisitor):
    """The uses of the system clock in one file, except for plain timestamps."""

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
            self.found.append(f"import {node.names[0].name}")  # such calls would not be found above


def _called(value: ast.expr) -> list[ast.AST]:
    """The clock in `clock()`; nothing if the value is part of a computation."""
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
    assert not new, f"measure ages with time.monotonic(), or add the reason here: {new}"
    assert sorted(set(ALLOWED) - found) == [], (
        "these uses no longer exist: remove them from the list"
    )


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
def test_the_rule_finds_ages_measured_by_the_system_clock(text: str, is_found: bool) -> None:
    visitor = Uses()
    visitor.visit(ast.parse(text))
    assert bool(visitor.found) is is_found


class Clock:
    """Both clocks of a machine; the system clock can be changed."""

    def __init__(self) -> None:
        self.running_s = 1_000.0
        self.set_by_s = 1.7e9

    def monotonic(self) -> float:
        return self.running_s

    def moment(self) -> float:
        return self.running_s + self.set_by_s


@pytest.mark.anyio
@pytest.mark.parametrize("step_s", [-2 * 86_400.0, 2 * 86_400.0])
async def test_changing_the_system_clock_does_not_keep_a_revoked_key_alive(
    tmp_path: Path, step_s: float
) -> None:
    store = open_store(
        db_url=f"sqlite:///{tmp_path / 'tinkex.db'}", storage_url=str(tmp_path), folder=tmp_path
    )
    clock = Clock()
    authenticator = Authenticator(
        store.keys, Tokens(b"k" * 32), clock=clock.monotonic, moment=clock.moment
    )
    try:
        assert (await authenticator.caller(None)).owner == "local"
        clock.set_by_s += step_s
        key, secret = await store.keys.create(owner="alice")
        clock.running_s += auth.KEY_CACHE_TTL_S
        with pytest.raises(Refusal, match="without one"):
            await authenticator.caller(None)
        assert (await authenticator.caller(secret)).owner == "alice"
        clock.set_by_s += step_s
        await store.keys.revoke(key.key_id)
        clock.running_s += auth.KEY_CACHE_TTL_S
        with pytest.raises(Refusal, match="is revoked"):
            await authenticator.caller(secret)
    finally:
        store.close()


@pytest.mark.anyio
async def test_expiry_goes_by_the_system_clock(tmp_path: Path) -> None:
    store = open_store(
        db_url=f"sqlite:///{tmp_path / 'tinkex.db'}", storage_url=str(tmp_path), folder=tmp_path
    )
    clock = Clock()
    authenticator = Authenticator(
        store.keys, Tokens(b"k" * 32), clock=clock.monotonic, moment=clock.moment
    )
    try:
        expires_s = clock.moment() + 1.0
        _, secret = await store.keys.create(owner="alice", expires_s=expires_s)
        assert (await authenticator.caller(secret)).owner == "alice"
        clock.running_s += 1.0
        with pytest.raises(Refusal, match="is expired"):
            await authenticator.caller(secret)
    finally:
        store.close()


@pytest.mark.anyio
async def test_unknown_keys_do_not_evict_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown keys have a bounded cache of their own."""
    monkeypatch.setattr(auth, "MAX_CACHED_KEYS", 20)
    monkeypatch.setattr(auth, "MAX_CACHED_UNKNOWN_KEYS", 20, raising=False)
    monkeypatch.setattr(auth, "KEY_CACHE_TTL_S", 1000.0)
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
        authenticator = nobody.app.state.authenticator
        assert len(authenticator._refused) == 20
