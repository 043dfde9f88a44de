"""
What a real server says: banner on a terminal, activity lines, log, status page, metrics.

One `tinkex serve` with keys, whose standard output is a pseudo-terminal of 80 columns.
"""

import asyncio
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.hosting import Api, connected
from server.tenants import with_key
from serving import TINY
from tinkex.server.api.metrics import NO_ANSWER
from tinkex.server.app import ROUTERS
from tinkex.server.queued_request import Kind
from tinkex.server.request_metrics import METHODS, NO_ROUTE
from tinkex.server.store.storage_health import KINDS
from tinkex.wire.proto.frames_pb2 import Order
from waiting import until, until_async

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "tinkex.json"
OWNER = "alice-the-owner"


@dataclass
class Terminal:
    """A server whose standard output is a terminal."""

    process: "subprocess.Popen[bytes]"
    data: Path
    key: str
    log: Path
    shown: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        return self.shown.decode().replace("\r\n", "\n")

    @property
    def url(self) -> str:
        found = re.search(r"^tinkex ready at (\S+)$", self.text, re.MULTILINE)
        assert found, (self.text, self.log.read_text())
        return found[1]


@pytest.fixture(scope="module")
def terminal(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    data = tmp_path_factory.mktemp("data")
    command = [sys.executable, "-m", "tinkex.cli.main"]
    made = subprocess.run(
        [*command, "key", "create", "--owner", OWNER, "--data", str(data)],
        capture_output=True,
        text=True,
        check=True,
    )
    (key,) = re.findall(r"tml-\S+", made.stdout)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    log = data / "log"
    serve = ["serve", f"{TINY}={tiny_model}", "--port", "0", "--data", str(data), "--threads", "1"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, *serve],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=stderr,
            env={**os.environ, "TINKEX_ACTIVITY_S": "0.5", "HOME": str(data.parent)},
        )
    os.close(theirs)
    server = Terminal(process, data, key, log)

    def read() -> None:
        try:
            while piece := os.read(ours, 4096):
                server.shown += piece
        except OSError:
            pass  # the other end is closed

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    try:
        until(lambda: b"Ctrl-C" in server.shown or process.poll() is not None, within_s=60)
        yield server
    finally:
        process.terminate()
        process.wait(20)
        reading.join(5)
        os.close(ours)


async def test_a_terminal_shows_what_is_served_and_how_to_connect(terminal: Terminal) -> None:
    text = terminal.text
    assert text.startswith(f"tinkex ready at {terminal.url}\n")
    assert max(map(len, text.splitlines())) <= 80
    assert f"  model   {TINY}\n          cpu, float32, context of " in text
    assert re.search(r"memory: \S+ [GM]B used now, up to \S+ GB of \S+ GB\n", text)
    assert f"  data    ~/{terminal.data.name}\n" in text
    assert "keys    on: clients need a key" in text
    assert f"    export TINKER_BASE_URL={terminal.url}\n" in text
    assert "    export TINKER_API_KEY=tml-..." in text
    assert terminal.key not in text


async def work(api: Api) -> int:
    """Train, save, sample, read, and make mistakes. Returns the number of sampled tokens."""
    model = await api.model()
    passed = await api.forward_backward(model, 1, tokens=30)
    stepped = await api.optim_step(model, 2, learning_rate=1e-2)
    await api.passed(passed)
    await api.result(stepped)
    saved = await api.step("save_weights_for_sampler", model_id=model, seq_id=3, path="kept")
    path = (await api.result(saved))["path"]
    session = model.partition(":")[0]
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = (await api.post("create_sampling_session", body)).json["sampling_session_id"]
    sample = {
        "sampling_session_id": sampler,
        "seq_id": 1,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 5},
    }
    sampled = await api.result(str((await api.post("asample", sample)).json["request_id"]))
    bad = await api.result(await api.forward_backward(model, 4, loss="no_such_loss"))
    assert bad["category"] == "user"
    assert (await api.get(f"/api/v1/training_runs/{model}")).status == 200
    assert (await api.get(f"/api/v1/training_runs/{OWNER}")).status == 404
    assert (await api.get(f"/no/such/{UNKNOWN}")).status == 404
    assert await api.call("PATCH", "optim_step") == 405
    assert await api.call("PATCH", f"training_runs/{OWNER}") == 405
    return sum(len(sequence["tokens"]) for sequence in sampled["sequences"])


#: Part of a path that no route has.
UNKNOWN = "a-path-that-a-client-made-up"


def activity(terminal: Terminal) -> list[str]:
    """The lines about activity in the log so far."""
    lines = terminal.log.read_text().splitlines()
    return [line.partition(" tinkex.server.activity ")[2] for line in lines if ".activity " in line]


def logged_tokens(terminal: Terminal) -> int:
    """The trained tokens of all lines about the end of some work."""
    found = re.findall(
        r"^idle: ([\d,]+) tokens trained", "\n".join(activity(terminal)), re.MULTILINE
    )
    return sum(int(count.replace(",", "")) for count in found)


async def engine_tokens(api: Api) -> Counter[str]:
    """What the engine has trained, sampled and prefilled so far."""
    text = (await api.get("/metrics")).body.decode()
    tokens: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if match := re.fullmatch(r"tinkex_engine_tokens_(\w+)_total", sample.name):
                assert sample.labels["base_model"] == TINY
                tokens[match[1]] += int(sample.value)
    return tokens


async def test_the_log_has_a_line_while_it_is_busy_and_one_when_it_is_idle(
    terminal: Terminal,
) -> None:
    def is_idle() -> bool:
        return not activity(terminal) or activity(terminal)[-1].startswith("idle: ")

    async with connected(terminal.url, TINY) as open_api, with_key(open_api, terminal.key) as api:
        # Work of earlier tests may not be logged yet.
        before = await engine_tokens(api)
        await until_async(lambda: is_idle() and logged_tokens(terminal) == before["trained"])
        earlier = len(activity(terminal))
        sampled = await work(api)
        await until_async(lambda: len(activity(terminal)) > earlier and is_idle())
        *busy, idle = activity(terminal)[earlier:]
        assert any(re.match(r"training 1 run, [\d.,]+ tok/s; ", line) for line in busy), busy
        assert all(re.search(r"; adapters \S+ [kMG]?B of \S+ [MG]B$", line) for line in busy), busy
        # 30 tokens of the pass. A failed pass computes nothing.
        assert idle.startswith(f"idle: 30 tokens trained, {sampled} sampled in the last "), busy
        # An idle server logs nothing.
        await asyncio.sleep(1.2)
        assert activity(terminal)[earlier:] == [*busy, idle]
        # The prompt is computed once for both sequences.
        assert await engine_tokens(api) - before == {
            "trained": 30,
            "sampled": sampled,
            "prefilled": 3,
        }


def allowed_labels() -> dict[str, set[str]]:
    """Every value that each label may have."""
    routes = {getattr(route, "path", "") for router in ROUTERS for route in router.routes}
    (work_field,) = Order.DESCRIPTOR.oneofs
    tasks = {one.name for one in work_field.fields} - {"run_pass"} | {"pass"}
    return {
        "method": {*METHODS, NO_ROUTE},
        "route": routes | {"/", "/docs", "/openapi.json", "/metrics", "/readyz", NO_ROUTE},
        "status": {NO_ANSWER, *(str(status) for status in range(200, 600))},
        "kind": {*(kind.value for kind in Kind), *KINDS},
        "outcome": {"done", "user_error", "server_error"},
        "task": tasks,
        "base_model": {TINY},
        "replica": {"0"},
    }


async def test_labels_take_values_from_closed_sets(terminal: Terminal) -> None:
    async with connected(terminal.url, TINY) as open_api, with_key(open_api, terminal.key) as api:
        await work(api)
        assert (await open_api.get("/api/v1/sessions")).status == 401
        for path in ("/", "/docs", "/openapi.json", "/readyz", "/metrics"):
            assert (await api.get(path)).status == 200
        text = (await api.get("/metrics")).body.decode()
    allowed = allowed_labels()
    counted: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le":
                    assert value in allowed[label], sample
            if sample.name == "tinkex_http_requests_total":
                one = sample.labels
                counted[one["method"], one["route"], one["status"]] = sample.value
    for secret in (OWNER, terminal.key, UNKNOWN, str(terminal.data), ":train:"):
        assert secret not in text
    # Unknown paths and refused keys share a label.
    assert counted["GET", "other", "404"] >= 1
    assert counted["GET", "other", "401"] >= 1
    assert counted["GET", "/api/v1/training_runs/{run}", "200"] >= 1
    assert counted["GET", "/metrics", "200"] >= 1
    assert ("GET", "other", "200") not in counted
    assert counted["GET", "/api/v1/training_runs/{run}", "404"] >= 1
    assert counted["other", "/api/v1/optim_step", "405"] >= 1
    assert counted["other", "/api/v1/training_runs/{run}", "405"] >= 1
    # Polls are apart: the server holds them.
    long = 'tinkex_http_long_request_seconds_count{method="POST",route="/api/v1/retrieve_future"}'
    assert long in text
    assert 'tinkex_http_request_seconds_count{method="POST",route="/api/v1/retrieve_f' not in text
    for kind in ("optim_step", "sample"):
        assert f'tinkex_request_queue_seconds_count{{kind="{kind}"}}' in text
        assert f'tinkex_requests_finished_total{{kind="{kind}",outcome="done"}}' in text
    assert 'finished_total{kind="forward_backward",outcome="user_error"}' in text


async def test_every_metric_of_the_grafana_board_exists(terminal: Terminal) -> None:
    async with connected(terminal.url, TINY) as open_api, with_key(open_api, terminal.key) as api:
        await work(api)
        text = (await api.get("/metrics")).body.decode()
    names = {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }
    board = json.loads(BOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in board["templating"]["list"]]
    wanted = {name for query in queries for name in re.findall(r"tinkex_\w+", query)}
    assert len(wanted) > 15
    assert wanted <= names, wanted - names


async def test_a_browser_gets_a_page_that_shows_no_owner(terminal: Terminal) -> None:
    async with connected(terminal.url) as api:
        answer = await api.get("/")
        page = answer.body.decode()
        assert (answer.status, answer.content_type) == (200, "text/html; charset=utf-8")
        assert f"<code>{TINY}</code>" in page
        assert f"export TINKER_BASE_URL={terminal.url}\n" in page
        assert "Ready." in page
        assert OWNER not in page
        assert str(terminal.data) not in page
        ready = await api.get("/readyz")
        assert (ready.status, ready.json) == (200, {"status": "ready"})
