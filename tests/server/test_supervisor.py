"""Real processes: supervisor, web process and engine on the tiny model, killed and restarted."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from processes import children
from server.api.test_custom_losses import NODES, loss
from server.hosting import Api, connected
from server.tenants import is_private
from serving import TINY, Server, serving
from tinkex.models.resolve import ModelSource, resolve
from tinkex.server.registration import Administration
from tinkex.server.settings import Settings
from tinkex.server.supervisor import Supervisor
from tinkex.server.web_process import parser
from waiting import until_async

pytestmark = pytest.mark.anyio


@contextmanager
def umask_of_nothing() -> Iterator[None]:
    """A umask of 0: files are readable by all unless their mode is set."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def own_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for tests that kill processes; without a umask, and with a settings file."""
    data = tmp_path_factory.mktemp("data")
    (data / "tinkex.toml").write_text("drain_s = 5.0\n")
    (data / "tinkex.toml").chmod(0o644)
    with ExitStack() as stack:
        with umask_of_nothing():
            server = stack.enter_context(serving(f"{TINY}={tiny_model}", data=data))
        yield server


def mapped(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def web_process(server: Server) -> int:
    (web,) = children(server.process.pid)
    return web


def engine_process(server: Server) -> int:
    (engine,) = children(web_process(server))
    return engine


async def trained(api: Api, model: str, *, first: int) -> float:
    """Run a step; return the loss before it."""
    passed = await api.forward_backward(model, first, tokens=8)
    stepped = await api.optim_step(model, first + 1, learning_rate=1e-2)
    loss = (await api.passed(passed)).metrics["loss:sum"]
    assert "metrics" in await api.result(stepped)
    return loss


async def test_a_killed_engine_is_restarted_with_the_same_model_state(
    own_server: Server,
) -> None:
    async with connected(own_server.url, TINY) as api:
        session = await api.session()
        one, two = await api.model(session), await api.model(session, number=1)
        for model in (one, two):
            await trained(api, model, first=1)
            await api.passed(await api.forward_backward(model, 3, tokens=5))
        undisturbed = await api.optim_step(one, 4)
        await api.result(undisturbed)
        before = await trained(api, one, first=5)
        third = await api.model(session, number=2)
        made = await api.result(await api.step("create_custom_loss", **loss(session)))
        custom = {"loss_id": made["loss_id"]}
        own = await api.passed(await api.custom(third, 1, custom))
        assert own.metrics["loss:sum"] == own.metrics["custom/s:sum"] < 0
        os.kill(engine_process(own_server), signal.SIGKILL)
        await api.result(await api.optim_step(two, 4))
        after = await trained(api, two, first=5)
        again = await api.passed(await api.custom(third, 2, custom))
        assert again.metrics == pytest.approx(own.metrics)
    # Only the seeds of the two models differ; the base and the data are the same. A model that
    # had lost its steps or its gradient would have the untrained loss again.
    untrained = await _untrained_loss(own_server)
    assert before < untrained * 0.9
    assert after < untrained * 0.9
    await until_async(lambda: any("died (SIGKILL: " in line for line in own_server.log))


async def test_accepted_work_survives_a_killed_web_process(
    own_server: Server,
) -> None:
    async with connected(own_server.url, TINY) as api:
        model = await api.model()
        engine = engine_process(own_server)
        passed = await api.forward_backward(model, 1, tokens=8)
        stepped = await api.optim_step(model, 2)
        os.kill(web_process(own_server), signal.SIGKILL)
    async with connected(own_server.url, TINY) as api:
        # The connection waited in the supervisor's socket until the web process was up again.
        assert "metrics" in await api.result(stepped)
        assert (await api.passed(passed)).metrics["loss:sum"] > 0
        assert await api.optim_step(model, 2) == stepped
    # The engine of the dead web process has exited too.
    assert not is_alive(engine)


async def test_a_loss_the_engine_does_not_know_is_a_user_failure(own_server: Server) -> None:
    async with connected(own_server.url, TINY) as api:
        model = await api.model()
        bad = await api.result(await api.forward_backward(model, 1, loss="no_such_loss"))
    assert bad["category"] == "user"
    assert "no_such_loss" in bad["error"]


async def test_a_custom_loss_stays_in_its_session(own_server: Server) -> None:
    """That it survives an engine: the test of a killed engine."""
    async with connected(own_server.url, TINY) as api:
        session = await api.session()
        other = await api.model()
        made = await api.result(await api.step("create_custom_loss", **loss(session)))
        foreign = await api.result(await api.custom(other, 1, {"loss_id": made["loss_id"]}))
        assert foreign["category"] == "user"
        assert "there is no custom loss" in foreign["error"]
        bad_nodes = [NODES[0], {**NODES[1], "target": "tolist"}, NODES[2]]
        bad = loss(session, 1, graph={"format": 1, "nodes": bad_nodes})
        refused = await api.result(await api.step("create_custom_loss", **bad))
    assert refused["category"] == "user"
    assert "node 's' (tolist)" in refused["error"]


async def test_the_web_process_never_loads_torch(own_server: Server) -> None:
    async with connected(own_server.url, TINY) as api:
        await api.model()
    web, engine = web_process(own_server), engine_process(own_server)
    assert "libtorch" in mapped(engine)
    assert "libtorch" not in mapped(web)


async def gauge(api: Api, name: str, *, at_least: float = 0.0) -> float:
    """A statistic of the tiny model's engine, once it has reached this value."""
    line = f'tinkex_engine_{name}{{base_model="{TINY}",replica="0"}} '
    while True:
        answer = await api.get("/metrics")
        assert answer.status == 200
        found = [
            float(text.removeprefix(line))
            for text in answer.body.decode().splitlines()
            if text.startswith(line)
        ]
        if found and found[0] >= at_least:
            return found[0]
        await asyncio.sleep(0.02)


async def test_all_files_are_private_whatever_the_umask(own_server: Server, tmp_path: Path) -> None:
    """In the data folder, in a backup, and in a restored backup."""
    data = own_server.data
    target, elsewhere, again = (tmp_path / name for name in ("backup", "elsewhere", "again"))
    async with connected(own_server.url, TINY) as api:
        model = await api.model()
        await trained(api, model, first=1)
        saved = await api.step("save_weights", model_id=model, seq_id=3, path="private")
        assert "path" in await api.result(saved)
    with umask_of_nothing():
        done = await asyncio.to_thread(tinkex, "backup", str(target), "--data", str(data))
        assert done.returncode == 0, done.stderr
        for file in target.rglob("*"):
            file.chmod(0o777)  # as after a copy to another place
        for words in (("restore", str(target)), ("key", "create"), ("backup", str(again))):
            done = await asyncio.to_thread(tinkex, *words, "--data", str(elsewhere))
            assert done.returncode == 0, done.stderr
    for folder in (data, elsewhere, again):
        written = [*folder.rglob("*")]
        assert len(written) > 5
        # The operator's own settings file is unchanged.
        ours = [file for file in written if file != data / "tinkex.toml"]
        assert not [file for file in ours if not is_private(file)]


async def test_engine_statistics_are_among_the_metrics(own_server: Server) -> None:
    async with connected(own_server.url, TINY) as api:
        # Before any model is created; models of earlier tests still exist.
        base = await gauge(api, "base_bytes", at_least=1)
        had = await gauge(api, "adapters_resident")
        await api.model()
        assert await gauge(api, "adapters_resident", at_least=had + 1) == had + 1
        assert await gauge(api, "adapters_resident_bytes") > 0
        assert await gauge(api, "memory_bytes") > base
        assert await gauge(api, "batch_tokens") == 1024
        assert await gauge(api, "training_waiting") == 0
        assert await gauge(api, "adapters_on_disk") == 0


async def test_more_models_than_fit_train_through_the_server(
    tiny_model: Path, tmp_path: Path
) -> None:
    """
    Memory for one adapter: the others are spilled to disk, and no request fails as "not loaded".

    The stopped server leaves no process behind.
    """
    limits = ("--adapter-gb", "0.0004", "--kv-tokens", "512")
    with serving(f"{TINY}={tiny_model}", data=tmp_path, args=limits) as server:
        async with connected(server.url, TINY) as api:
            session = await api.session()
            models = [await api.model(session, number=number) for number in range(4)]
            curves = [
                [await trained(api, model, first=first) for model in models] for first in (1, 3, 5)
            ]
            assert await gauge(api, "adapters_on_disk", at_least=1) == 3
            assert await gauge(api, "adapters_resident") == 1
            assert await gauge(api, "adapter_budget_bytes") == 400_000
        pids = [web_process(server), engine_process(server)]
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
    assert max(curves[2]) < min(curves[0])
    assert not any(is_alive(pid) for pid in pids)
    assert "stopped; accepted requests that are not finished" in server.log[-1]


async def test_engines_keep_the_allocator_s_defaults(own_server: Server) -> None:
    """The single malloc arena is for the threads of the web process only."""
    async with connected(own_server.url, TINY) as api:
        await api.model()
    for pid in (web_process(own_server), engine_process(own_server)):
        assert "MALLOC_ARENA_MAX" not in _environment(pid)


async def test_an_idle_server_uses_no_cpu_time(own_server: Server) -> None:
    async with connected(own_server.url, TINY) as api:
        await api.model()
        pids = [own_server.process.pid, web_process(own_server), engine_process(own_server)]
        # On a busy machine, what follows the last request takes a while.
        for _ in range(10):
            before_s = [_processor_s(pid) for pid in pids]
            await asyncio.sleep(2.0)
            spent_s = [_processor_s(pid) - was_s for pid, was_s in zip(pids, before_s, strict=True)]
            if max(spent_s) <= 0.05:
                break
    assert max(spent_s) <= 0.05


async def test_a_second_server_on_the_same_folder_is_refused(own_server: Server) -> None:
    done = serve("x=/", "--data", str(own_server.data), "--port", "0")
    assert done.returncode == 1
    assert f"process {own_server.process.pid}" in done.stderr
    assert "hint: " in done.stderr


async def test_a_taken_port_is_refused(own_server: Server, tmp_path: Path) -> None:
    port = own_server.url.rpartition(":")[2]
    # The same home as that server, whose fixture started before this test.
    theirs = dict(
        one.split("=", 1) for one in _environment(own_server.process.pid).split("\0") if one
    )
    done = serve("x=/", "--data", str(tmp_path), "--port", port, env=theirs)
    assert done.returncode == 1
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()[-2:]
    assert error == (
        f"error: port {port} is in use by your tinkex server at {own_server.url} (process "
        f"{own_server.process.pid}, data folder {own_server.data.resolve()})."
    )
    assert f"export TINKER_BASE_URL={own_server.url}." in hint
    # Another user does not find it, and asks the port.
    theirs["XDG_STATE_HOME"] = str(tmp_path / "state")
    done = serve("x=/", "--data", str(tmp_path), "--port", port, env=theirs)
    assert f"error: port {port} is in use by another tinkex server." in done.stderr


def test_a_port_of_another_program_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = serve("x=/", "--data", str(tmp_path), "--port", port)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use." in done.stderr


def test_what_an_engine_refuses_ends_the_server_with_one_error_and_a_hint(
    tiny_model: Path, tmp_path: Path
) -> None:
    """What it refuses: tests/engine/test_process.py."""
    options = ("--port", "0", "--memory-gb", "0.0002")
    done = serve(str(tiny_model), "--data", str(tmp_path / "data"), *options)
    assert done.returncode == 1
    assert done.stdout == ""
    error, advice = done.stderr.splitlines()[-2:]
    says = "in float32 it needs at least "
    assert error.startswith(f"error: {tiny_model.name} cannot be loaded: {says}")
    assert advice.startswith("hint: Allow more memory with --memory-gb")
    assert done.stderr.count("cannot be loaded") == 1
    assert "Traceback" not in done.stderr


def test_a_folder_with_a_damaged_config_is_one_error(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "config.json").write_text("{")
    done = serve(str(broken), "--data", str(tmp_path / "data"), "--port", "0")
    assert done.returncode == 1
    error, advice = done.stderr.splitlines()[-2:]
    assert "config.json is not JSON" in error
    assert advice == "hint: Download the model again."
    assert "Traceback" not in done.stderr


def tinkex(
    *arguments: str, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tinkex.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=env)


def serve(
    *arguments: str, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return tinkex("serve", *arguments, env=env)


async def _untrained_loss(server: Server) -> float:
    async with connected(server.url, TINY) as api:
        model = await api.model()
        return (await api.passed(await api.forward_backward(model, 1, tokens=8))).metrics[
            "loss:sum"
        ]


def _environment(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_names_and_folders_may_contain_any_character(tmp_path: Path) -> None:
    sources = [
        ModelSource(name="a=b", folder=Path("/models/a=b")),
        ModelSource(name="org/c", folder=Path("/models/x = y")),
    ]
    with socket.socket() as listening:
        supervisor = Supervisor(
            Settings(data=str(tmp_path)),
            sources,
            listening,
            [],
            administration=Administration(local=False),
        )
        command = supervisor._command(7, 8)
    options = parser().parse_args(command[3:])
    assert options.model == [[source.name, str(source.folder)] for source in sources]


def test_a_folder_with_an_equals_sign_is_served_by_its_name(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lr=3"
    folder.symlink_to(tiny_model)
    assert resolve(f"mine={folder}").folder == tiny_model.resolve()
    assert resolve(str(folder)).folder == tiny_model.resolve()
