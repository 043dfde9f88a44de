"""
Sends mutated request bodies to the real application in this process.

Seeds are recorded requests of official clients (tests/data/wire) and one body per route. Findings are
statuses of 500 or more, slow responses, and growing memory. The first body for each kind of answer
goes into the corpus, which `make test` sends again.
"""

import asyncio
import base64
import copy
import gzip
import json
import logging
import random
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard
from fastapi import FastAPI

from qa.fuzz.mutations import mutate_bytes, with_odd_values
from server.echo import BASE, EchoExecutor
from tinkex.server.app import create_app
from tinkex.server.settings import Settings
from tinkex.server.store import open_store
from tinkex.wire.codec import JSON_TYPE, PROTOBUF_TYPE
from tinkex.wire.proto import tinkex_wire_pb2 as pb
from tinkex.wire.proto.frames_pb2 import Order

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
CORPUS = DATA / "fuzz" / "bodies.jsonl"
MAX_RESPONSE_S = 20.0
# Bodies close sessions and unload models; new ones are created after this many bodies.
NEW_SESSION_EVERY = 1_000
MEMORY_EVERY = 250


class _DiscardingList(list[Order]):
    """Discards the work that ran; otherwise the test itself would grow."""

    def append(self, _work: Order) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """One request."""

    path: str
    body: bytes
    content_type: str = JSON_TYPE
    encoding: str = ""
    method: str = "POST"

    def headers(self) -> list[tuple[bytes, bytes]]:
        sent = [(b"host", b"127.0.0.1"), (b"content-type", self.content_type.encode())]
        if self.encoding:
            sent.append((b"content-encoding", self.encoding.encode()))
        return sent


@dataclass
class Findings:
    """Statuses, findings and measurements of a run."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    #: The first case of each kind of answer.
    interesting: dict[str, Case] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)
    elapsed_s: float = 0.0
    slowest_s: float = 0.0

    def quarters(self) -> tuple[float, float]:
        """Mean resident bytes in the first and in the last quarter."""
        part = max(1, len(self.memory) // 4)
        first, last = self.memory[:part], self.memory[-part:]
        return sum(first) / len(first), sum(last) / len(last)


class AppClient:
    """Calls the ASGI application directly, without a socket."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def send(self, case: Case) -> tuple[int, bytes]:
        path, _, query = case.path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": case.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": case.headers(),
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
            "state": {},
        }
        sent = iter([{"type": "http.request", "body": case.body, "more_body": False}])
        status, parts = 0, []

        async def receive() -> Any:
            message = next(sent, None)
            if message is None:
                await asyncio.sleep(3600)  # the client waits for the response
            return message

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, b"".join(parts)

    async def post(self, path: str, body: Any) -> Any:
        status, answer = await self.send(Case(f"/api/v1/{path}", json.dumps(body).encode()))
        assert status == 200, (path, status, answer)
        return json.loads(answer)


@asynccontextmanager
async def app_client(folder: Path, **settings: Any) -> AsyncIterator[AppClient]:
    """The application with the echo executor and short timeouts."""
    # Unfetched results expire soon; otherwise the database would grow.
    kept = {"unfetched_kept_s": 5.0, "result_kept_s": 1.0, "janitor_s": 5.0}
    short = {"gap_s": 0.1, "long_poll_s": 0.01, "stream_grace_s": 0.1}
    chosen = Settings(data=str(folder), **(kept | short | settings))
    echo = EchoExecutor()
    echo.ran = _DiscardingList()
    store = open_store(db_url=chosen.db_url, storage_url=chosen.storage_url, folder=chosen.folder)
    app = create_app(chosen, echo, store)
    try:
        async with app.router.lifespan_context(app):
            yield AppClient(app)
    finally:
        store.close()


async def create_resources(client: AppClient) -> dict[str, str]:
    """Creates one resource of each kind; their ids by placeholder."""
    about = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
    session = (await client.post("create_session", about))["session_id"]
    made = {"session_id": session, "base_model": BASE}
    model = await client.post(
        "create_model", {**made, "model_seq_id": 0, "lora_config": {"rank": 8}}
    )
    sampler = await client.post("create_sampling_session", {**made, "sampling_session_seq_id": 0})
    return {
        "session": session,
        # A session to be finished, so that the other one stays usable.
        "spent": (await client.post("create_session", about))["session_id"],
        "model": model["model_id"],
        "request": model["request_id"],
        "sampler": sampler["sampling_session_id"],
        "path": f"tinker://{model['model_id']}/weights/a",
    }


# -- seeds ---------------------------------------------------------------------------------------

#: Recorded ids and their placeholders.
_RECORDED = (
    ("/sessions/session-1/finish", "/sessions/{spent}/finish"),
    ("session-1:sample:0", "{sampler}"),
    ("session-1:train:0", "{model}"),
    ("session-1", "{session}"),
)

#: Bodies for routes without a recording.
MADE: Mapping[str, Any] = {
    "cancel_future": {"request_id": "{request}"},
    "copy_weights": {"source_path": "{path}", "destination_project_id": "p", "ttl_seconds": 3600},
    "get_info": {"model_id": "{model}"},
    "join_sampling_session": {"sampling_session_id": "{sampler}"},
    "retrieve_future": {"request_id": "{request}", "allow_metadata_only": True},
    "retrieve_futures": {
        "target": {
            "type": "sampling_session",
            "sampling_session_id": "{sampler}",
            "cloned_sampler_id": 0,
        },
        "prev_cursor": 0,
        "timeout": 0.01,
        "retrieved_request_ids": ["{request}"],
    },
    "sessions/search": {
        "user_metadata": {"a": "b"},
        "statuses": [{"type": "active"}],
        "limit": 5,
        "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "{session}"},
    },
    "sessions/{spent}/finish": {"reason": {"type": "success"}, "detail": "x"},
    "stream_sample": {
        "sampling_session_id": "{sampler}",
        "seq_id": 1,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2, "stop": ["a"], "seed": 1},
    },
    "/v1/chat/completions": {
        "model": BASE,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "b"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
            },
        ],
        "max_completion_tokens": 2,
        "stop": ["a"],
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"1": 0.5},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}},
        },
        "chat_template_kwargs": {"x": 1},
    },
    "/v1/completions": {"model": BASE, "prompt": ["a", "b"], "echo": True, "logprobs": 1},
    "unload_model": {"model_id": "{model}"},
    "weights_info": {"tinker_path": "{path}"},
}


def seeds() -> list[Case]:
    """Cases with placeholders instead of ids."""
    found = [
        Case(path if path.startswith("/") else f"/api/v1/{path}", json.dumps(body).encode())
        for path, body in MADE.items()
    ]
    found.append(
        Case(
            "/api/v1/training_runs/{model}/checkpoints/weights/a/ttl",
            b'{"ttl_seconds": 3600}',
            method="PUT",
        )
    )
    for file in sorted((DATA / "wire").glob("*/*.json")):
        for recorded in json.loads(file.read_text()):
            if recorded["method"] != "POST":
                continue
            path, body = recorded["path"], recorded.get("body")
            for before, after in _RECORDED:
                path = path.replace(before, after)
                body = body and body.replace(before, after)
            if body:
                found.append(Case(path, body.encode()))
    for graph in (DATA / "graphs").glob("*.jsonl"):
        for text in graph.read_text().splitlines():
            body = {**json.loads(text), "session_id": "{session}"}
            found.append(Case("/api/v1/create_custom_loss", json.dumps(body).encode()))
    return found


def passes() -> list[bytes]:
    """Protobuf bodies that the newest official client sent."""
    recorded = json.loads((DATA / "wire" / "0.36.0" / "forward_backward.json").read_text())
    return [base64.b64decode(request["body_base64"]) for request in recorded]


# -- mutations -----------------------------------------------------------------------------------

ODD: Sequence[Any] = (
    *(None, True, 0, -1, 1, 2**31, 2**31 - 1, 2**63, -(2**63) - 1, 2**64, 10**400),
    *(0.5, -0.0, 1e308, 1e-320, "", "a", "1", "\0", "\ud800", "é" * 300, "x" * 5000, "../../etc"),
    *("{session}", "{model}", "tinker://{model}/weights/../a", "tinker://a/b/c/d", "tinker://"),
    *([], {}, [[]], [{}], {"": ""}, {"type": "x"}, [None], [1] * 1500, {"ref": "x"}, ["a", 1]),
    *("2026-01-01T00:00:00", "9999-12-31T23:59:59Z", "NaN", "true", "custom", "dimuon"),
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths_in(value[key], (*path, key))
    elif isinstance(value, list):
        for position in range(min(len(value), 40)):
            yield from paths_in(value[position], (*path, position))


def mutate_json(body: Any, draw: random.Random) -> Any:
    """Replaces, deletes, repeats, renames or nests parts of a JSON value."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        spots = [place for place in paths_in(body) if place]
        if not spots:
            return draw.choice(ODD)
        *way, last = draw.choice(spots)
        holder = body
        for step in way:
            holder = holder[step]
        match draw.randrange(8):
            case 0:
                del holder[last]
            case 1 if isinstance(holder, list):
                holder.extend([holder[last]] * draw.choice([1, 5, 300]))
            case 1 | 2 if isinstance(holder, dict):
                holder[draw.choice(["", "type", f"{last}s", "x" * 300])] = holder.pop(last)
            case 3:
                holder[last] = [holder[last]]
            case 4:
                deep: Any = holder[last]
                for _ in range(draw.choice([3, 50, 180, 250])):
                    deep = [deep]
                holder[last] = deep
                return body  # deeper nesting would exceed this program's recursion limit
            case 5 if isinstance(holder[last], str):
                holder[last] = holder[last] * draw.choice([2, 50])
            case 6 if isinstance(holder[last], int | float):
                holder[last] = -holder[last] * draw.choice([1, 2**40])
            case _:
                holder[last] = copy.deepcopy(draw.choice(ODD))
    return body


def compressed(body: bytes, encoding: str) -> bytes:
    if encoding == "zstd":
        return zstandard.compress(body, 1)
    return gzip.compress(body, 1) if encoding == "gzip" else body


class BodyGenerator:
    """Generates random cases from the seeds."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._seeds = seeds()
        self._passes = passes()

    def next(self, ids: Mapping[str, str]) -> Case:
        draw = self._draw
        case = self._protobuf(ids) if draw.random() < 0.4 else self._json(ids)
        encoding = draw.choice(["", "", "", "", "", "zstd", "gzip", "br", "identity"])
        body = compressed(case.body, encoding)
        if encoding and draw.random() < 0.3:
            body = mutate_bytes(body, draw)
        kind = case.content_type
        if draw.random() < 0.03:
            kind = draw.choice([JSON_TYPE, PROTOBUF_TYPE, "text/plain", "\xff;charset=x"])
        return Case(case.path, body, kind, encoding, case.method)

    def _json(self, ids: Mapping[str, str]) -> Case:
        draw = self._draw
        seed = draw.choice(self._seeds)
        if draw.random() < 0.25:
            body = mutate_bytes(seed.body, draw)
        else:
            text = json.dumps(mutate_json(json.loads(seed.body), draw))
            body = text.encode(errors="surrogatepass")
        return Case(
            path_with_ids(seed.path, ids),
            body_with_ids(body, ids),
            seed.content_type,
            "",
            seed.method,
        )

    def _protobuf(self, ids: Mapping[str, str]) -> Case:
        draw = self._draw
        message = pb.ForwardBackwardRequest.FromString(draw.choice(self._passes))
        message.model_id, message.seq_id = ids["model"], draw.choice([0, 1, 2, 3, 50, 2**31 - 1])
        body = (
            with_odd_values(message, draw) if draw.random() < 0.5 else message.SerializeToString()
        )
        if draw.random() < 0.5:
            body = mutate_bytes(body, draw)
        return Case("/api/v1/forward_backward", body, PROTOBUF_TYPE)


def path_with_ids(path: str, ids: Mapping[str, str]) -> str:
    for name, value in ids.items():
        path = path.replace("{" + name + "}", value)
    return path


def body_with_ids(body: bytes, ids: Mapping[str, str]) -> bytes:
    """The body with ids instead of placeholders."""
    for name, value in ids.items():
        body = body.replace(b"{%s}" % name.encode(), value.encode())
    return body


# -- sending -------------------------------------------------------------------------------------


def answer_kind(case: Case, status: int, answer: bytes) -> str:
    """Answers of one kind are alike: the route, the status, and which fields were wrong."""
    route = case.path.split("/")[3] if case.path.count("/") > 2 else case.path
    try:
        detail = json.loads(answer).get("detail", "")
    except (ValueError, AttributeError):
        detail = ""
    if isinstance(detail, list):
        where = [
            ".".join(str(part) for part in error["loc"] if isinstance(part, str))[:80]
            + ":"
            + error["type"]
            for error in detail[:1]
        ]
        return f"{route} {status} {where}"
    return f"{route} {status} {str(detail)[:12]}"


async def send_and_check(client: AppClient, case: Case, found: Findings) -> None:
    """Sends a case and records what is wrong with the answer."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(MAX_RESPONSE_S):
            status, answer = await client.send(case)
    except TimeoutError:
        found.wrong.append(f"no answer within {MAX_RESPONSE_S} s: {described(case)}")
        return
    except Exception as error:  # noqa: BLE001  the application raised past its own handlers
        found.statuses[500] += 1
        found.wrong.append(f"{type(error).__name__}: {str(error)[:300]}: {described(case)}")
        return
    found.slowest_s = max(found.slowest_s, time.monotonic() - began)
    found.statuses[status] += 1
    if status >= 500:
        found.wrong.append(f"{status} {answer[:300]!r}: {described(case)}")
    found.interesting.setdefault(answer_kind(case, status, answer), case)


def described(case: Case) -> str:
    body = base64.b64encode(case.body[:20_000]).decode()
    return f"{case.method} {case.path} ({case.content_type}, {case.encoding or 'plain'}) {body}"


async def fuzz(
    client: AppClient, *, bodies: int, seed: int, progress: Callable[[str], None] | None = None
) -> Findings:
    """Sends this many bodies, one at a time."""
    found = Findings()
    bugs = _ErrorLog(found)
    logging.getLogger("tinkex").addHandler(bugs)
    try:
        await _send_all(client, found, bodies=bodies, seed=seed, progress=progress)
    finally:
        logging.getLogger("tinkex").removeHandler(bugs)
    return found


class _ErrorLog(logging.Handler):
    """Records errors that the server logs, such as failures of accepted work."""

    def __init__(self, found: Findings) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.wrong.append(f"log: {record.getMessage()[:500]} {record.exc_info}")


async def _send_all(
    client: AppClient,
    found: Findings,
    *,
    bodies: int,
    seed: int,
    progress: Callable[[str], None] | None,
) -> None:
    supply = BodyGenerator(seed)
    began = time.monotonic()
    ids: Mapping[str, str] = {}
    for number in range(bodies):
        if number % NEW_SESSION_EVERY == 0:
            ids = await create_resources(client)
        await send_and_check(client, supply.next(ids), found)
        if number % MEMORY_EVERY == MEMORY_EVERY - 1 or number == bodies - 1:
            found.memory.append(resident_bytes())
        if progress and number % 5_000 == 4_999:
            progress(
                f"{number + 1} bodies, {len(found.wrong)} wrong, {time.monotonic() - began:.0f} s"
            )
    found.elapsed_s = time.monotonic() - began


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# -- the corpus ----------------------------------------------------------------------------------


def _placeholder(name: str, value: str) -> str:
    """A placeholder as long as the id, because protobuf contains lengths."""
    return ("{" + name + "}").ljust(len(value), "~")


def corpus_line(case: Case, ids: Mapping[str, str]) -> str:
    """A case as a line of the corpus, with placeholders instead of ids."""
    path, body = case.path, case.body
    for name, value in sorted(ids.items(), key=lambda item: -len(item[1])):
        path = path.replace(value, _placeholder(name, value))
        body = body.replace(value.encode(), _placeholder(name, value).encode())
    return json.dumps(
        {
            "method": case.method,
            "path": path,
            "content_type": case.content_type,
            "encoding": case.encoding,
            "body": base64.b64encode(body).decode(),
        }
    )


def corpus(ids: Mapping[str, str]) -> list[Case]:
    """The cases of the corpus with the ids of this run."""
    cases = []
    for text in CORPUS.read_text().splitlines():
        raw = json.loads(text)
        path, body = raw["path"], base64.b64decode(raw["body"])
        for name, value in ids.items():
            path = path.replace(_placeholder(name, value), value)
            body = body.replace(_placeholder(name, value).encode(), value.encode())
        cases.append(Case(path, body, raw["content_type"], raw["encoding"], raw["method"]))
    return cases
