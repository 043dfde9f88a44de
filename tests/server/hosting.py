"""The real application on a real socket with a given executor, and a plain client."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI

from server.echo import BASE
from tinkex.server.app import create_app
from tinkex.server.engine_process import LocalExecutor
from tinkex.server.executor import Executor, ServedModel
from tinkex.server.settings import Settings
from tinkex.server.store import open_store
from tinkex.server.web_process import uvicorn_config
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.protobuf import decode_forward_backward_output, encode_forward_backward_request
from tinkex.wire.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
)


def local_executor(
    folder: Path, *names: str, idle_s: float = 0.0, deterministic: bool = False
) -> LocalExecutor:
    """Real engines on one thread, which serve this model under these names."""
    return LocalExecutor(
        [ServedModel(name=name, folder=folder) for name in names],
        [
            EngineSettings(name=name, folder=folder, threads=1, deterministic=deterministic)
            for name in names
        ],
        idle_s=idle_s,
    )


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    content_type: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Api:
    """A client that implements only the protocol."""

    http: aiohttp.ClientSession
    base_model: str = BASE
    #: The application, if it runs in this process.
    app: FastAPI | None = None
    server: uvicorn.Server | None = None

    async def clean_up(self) -> None:
        """One cleanup pass, once."""
        assert self.app is not None
        await self.app.state.cleanup.run_once()

    async def call(self, method: str, path: str, body: Any = None) -> int:
        """The status of a call whose answer has no content."""
        async with self.http.request(method, f"/api/v1/{path}", json=body) as got:
            return got.status

    async def post(self, path: str, body: Any, *, headers: dict[str, str] | None = None) -> Answer:
        is_bytes = isinstance(body, bytes)
        sent = {"Content-Type": "application/json", **(headers or {})}
        data = body if is_bytes else json.dumps(body).encode()
        url = path if path.startswith("/") else f"/api/v1/{path}"
        async with self.http.post(url, data=data, headers=sent) as got:
            return Answer(got.status, await got.read(), got.headers.get("Content-Type", ""))

    async def get(self, path: str) -> Answer:
        async with self.http.get(path) as got:
            return Answer(got.status, await got.read(), got.headers.get("Content-Type", ""))

    async def session(self, sdk_version: str = "0.36.0") -> str:
        answer = await self.post(
            "create_session", {"tags": [], "user_metadata": {}, "sdk_version": sdk_version}
        )
        assert answer.status == 200, answer
        session_id: str = answer.json["session_id"]
        return session_id

    async def model(self, session_id: str | None = None, *, number: int = 0) -> str:
        """A model whose creation has finished."""
        session_id = session_id or await self.session()
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": self.base_model,
            "lora_config": {"rank": 8},
        }
        answer = await self.post("create_model", body)
        assert answer.status == 200, answer
        assert await self.result(answer.json["request_id"]) == {
            "model_id": f"{session_id}:train:{number}",
            "type": "create_model",
        }
        model_id: str = answer.json["model_id"]
        return model_id

    async def forward_backward(
        self, model_id: str, seq_id: int | None, tokens: int = 3, loss: str = "cross_entropy"
    ) -> str:
        """Submit a pass with this many tokens; return its request id."""
        answer = await self.post(
            "forward_backward", pass_body(model_id, seq_id, tokens, loss), headers=PROTOBUF
        )
        assert answer.status == 200, answer
        return str(answer.json["request_id"])

    async def custom(self, model_id: str, seq_id: int, config: dict[str, float | str]) -> str:
        """Submit a pass with a custom loss; return its request id."""
        body = pass_body(model_id, seq_id, loss="custom", config=config)
        answer = await self.post("forward_backward", body, headers=PROTOBUF)
        assert answer.status == 200, answer
        return str(answer.json["request_id"])

    async def optim_step(self, model_id: str, seq_id: int, **params: Any) -> str:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": params}
        answer = await self.post("optim_step", body)
        assert answer.status == 200, answer
        return str(answer.json["request_id"])

    async def step(self, route: str, /, **body: Any) -> str:
        """Submit any other step; return its request id."""
        answer = await self.post(route, body)
        assert answer.status == 200, answer
        return str(answer.json["request_id"])

    async def poll(
        self, request_id: str, *, metadata_only: bool = False, accept: str = "application/json"
    ) -> Answer:
        body = {"request_id": request_id, "allow_metadata_only": metadata_only}
        return await self.post("retrieve_future", body, headers={"Accept": accept})

    async def result(self, request_id: str) -> Any:
        """Wait for a result as JSON."""
        while (answer := await self.poll(request_id)).status == 408:
            pass
        assert answer.status == 200, answer
        return answer.json

    async def passed(self, request_id: str) -> ForwardBackwardOutput:
        """Wait for the output of a pass."""
        while (answer := await self.poll(request_id, accept=PROTOBUF_TYPE)).status == 408:
            pass
        assert answer.content_type == PROTOBUF_TYPE, answer
        return decode_forward_backward_output(answer.body)

    async def value(self, request_id: str) -> float:
        """The value of an echo model after a step."""
        result = await self.result(request_id)
        value: float = result["metrics"]["value:sum"]
        return value


PROTOBUF = {"Content-Type": PROTOBUF_TYPE}


def pass_body(
    model_id: str,
    seq_id: int | None,
    tokens: int = 3,
    loss: str = "cross_entropy",
    *,
    forward_only: bool = False,
    config: dict[str, float | str] | None = None,
) -> bytes:
    inputs = {"target_tokens": [1] * tokens, "weights": [1.0] * tokens}
    datum = Datum(model_input=ModelInput.from_ints([5] * tokens), loss_fn_inputs=inputs)
    work = ForwardBackwardInput._of([datum], loss, config)
    request = ForwardBackwardRequest(forward_backward_input=work, model_id=model_id, seq_id=seq_id)
    return encode_forward_backward_request(request, forward_only=forward_only)


@asynccontextmanager
async def connected(url: str, base_model: str = BASE) -> AsyncIterator[Api]:
    """A client of any server."""
    # No connection limit: many polls are open at the same time.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as http:
        yield Api(http=http, base_model=base_model)


@asynccontextmanager
async def hosted(
    executor: Executor,
    folder: Path,
    *,
    at_port: int = 0,
    last_status: int = -signal.SIGKILL,
    **settings: Any,
) -> AsyncIterator[Api]:
    """Run the application on a free port, or the given one, until the block ends."""
    chosen = Settings(data=str(folder), **settings)
    store = open_store(db_url=chosen.db_url, storage_url=chosen.storage_url, folder=chosen.folder)
    app = create_app(chosen, executor, store, last_status=last_status)
    try:
        async with listening(app, chosen, at_port=at_port) as api:
            yield api
    finally:
        store.close()


class HostedServer(uvicorn.Server):
    """A server that the test ends, not a signal."""

    def capture_signals(self) -> AbstractContextManager[None]:
        # Uvicorn puts the handlers back that it found. Of two servers that overlap, the second would
        # put back the handlers of the first, which has ended by then.
        return nullcontext()


@asynccontextmanager
async def listening(app: FastAPI, settings: Settings, *, at_port: int = 0) -> AsyncIterator[Api]:
    """Run an application until the block ends."""
    config = uvicorn_config(app, settings)
    config.port = at_port
    server = HostedServer(config)
    started = asyncio.create_task(server.serve())
    try:
        while not server.started:
            assert not started.done(), started.result()
            await asyncio.sleep(0.005)
        host, port = server.servers[0].sockets[0].getsockname()
        url = f"http://{host}:{port}"
        async with connected(url) as api:
            api.app, api.server = app, server
            yield api
    finally:
        if server.started:
            app.state.context.futures.release()
        server.should_exit = True
        await started
