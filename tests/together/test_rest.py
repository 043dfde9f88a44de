"""All methods of RestClient and AdminClient on a server, in both forms."""

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tinkex
from server.echo import EchoExecutor
from server.hosting import hosted
from server.tenants import new_key
from serving import TINY, Server
from tinkex import AdminClient, RestClient, types

Call = Callable[..., Any]


@dataclass(frozen=True)
class Saved:
    session_id: str
    sampler_id: str
    run: str
    state: str
    sampler: str
    export: str


@pytest.fixture(scope="module")
def saved(server: Server) -> Iterator[Saved]:
    """A run with checkpoints of each kind, and a sampler."""
    with tinkex.ServiceClient(
        {"why": "rest"}, "rest-project", base_url=server.url, display_name="rest test"
    ) as service:
        training = service.create_lora_training_client(TINY, rank=4, user_metadata={"k": "v"})
        state = training.save_state("state").result()
        sampler = training.save_weights_for_sampler("sampler").result()
        export = training.save_weights_external("export", ttl_seconds=7200).result()
        sampling = service.create_sampling_client(model_path=sampler.path)
        sampling.sample(
            types.ModelInput.from_ints([20, 21]), 1, types.SamplingParams(max_tokens=1)
        ).result()
        session_id = service.holder.session_id
        assert session_id
        assert service.get_console_url().endswith(f"/sessions/{session_id}")
        assert training.get_console_url().endswith(f"/training_runs/{training.model_id}")
        assert state.get_console_url().endswith("/weights%2Fstate")
        assert sampler.get_playground_url().endswith("%2Fsampler_weights%2Fsampler")
        # Pages of this server, which exist, and never of the hosted service.
        for page in (
            service.get_console_url(),
            training.get_console_url(),
            state.get_console_url(),
            sampler.get_console_url(),
            sampler.get_playground_url(),
        ):
            assert page.startswith(f"{server.url}/")
            with urllib.request.urlopen(page) as answer:
                assert answer.status == 200
        assert service.get_telemetry() is training.get_telemetry() is service.holder.telemetry
        yield Saved(
            session_id=session_id,
            sampler_id=f"{session_id}:sample:0",
            run=training.model_id,
            state=state.path,
            sampler=sampler.path,
            export=export.path,
        )


@pytest.fixture(params=["waited for", "awaited"])
def call(request: pytest.FixtureRequest) -> Call:
    """Calls the blocking or the `_async` form of a method."""

    def wait(client: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if request.param == "waited for":
            return getattr(client, name)(*args, **kwargs).result(20)
        return asyncio.run(getattr(client, f"{name}_async")(*args, **kwargs))

    return wait


@pytest.fixture
def rest(server: Server) -> Iterator[RestClient]:
    with RestClient(base_url=server.url) as client:
        yield client


def test_runs_and_checkpoints_are_listed_and_described(
    rest: RestClient, saved: Saved, call: Call
) -> None:
    run = call(rest, "get_training_run", saved.run)
    assert (run.base_model, run.lora_rank, run.user_metadata) == (TINY, 4, {"k": "v"})
    assert call(rest, "get_training_run_by_tinker_path", saved.state, "accessible") == run
    page = call(rest, "list_training_runs", 50, 0, project_id="rest-project")
    assert saved.run in [each.training_run_id for each in page.training_runs]
    assert call(rest, "list_training_runs", project_id="unknown").training_runs == []
    info = call(rest, "get_weights_info_by_tinker_path", saved.sampler)
    assert (info.base_model, info.is_lora, info.lora_rank) == (TINY, True, 4)
    found = call(rest, "list_checkpoints", saved.run).checkpoints
    assert {each.tinker_path for each in found} >= {saved.state, saved.sampler, saved.export}
    assert {each.checkpoint_type for each in found} == {"training", "sampler", "external"}
    mine = call(rest, "list_user_checkpoints", 1000, 0).checkpoints
    assert {each.tinker_path for each in mine} >= {saved.state, saved.sampler, saved.export}


def test_pagination_returns_everything(rest: RestClient, saved: Saved) -> None:
    assert saved.run in [each.training_run_id for each in rest.all_training_runs()]
    assert saved.session_id in list(rest.all_sessions())
    paths = [each.tinker_path for each in rest.all_user_checkpoints()]
    assert saved.state in paths
    assert len(paths) == len(set(paths))


def test_a_checkpoint_is_published_unpublished_given_a_ttl_copied_and_deleted(
    rest: RestClient, saved: Saved, call: Call
) -> None:
    def described(path: str) -> types.Checkpoint:
        run = types.ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
        found = rest.list_checkpoints(run).result(20).checkpoints
        return next(each for each in found if each.tinker_path == path)

    copied = call(rest, "copy_weights", saved.state, "rest-project", ttl_seconds=7200)
    assert copied != saved.state
    assert described(copied).expires_at is not None
    call(rest, "publish_checkpoint_from_tinker_path", copied)
    assert described(copied).public
    call(rest, "unpublish_checkpoint_from_tinker_path", copied)
    assert not described(copied).public
    call(rest, "set_checkpoint_ttl_from_tinker_path", copied, None)
    assert described(copied).expires_at is None
    call(rest, "delete_checkpoint_from_tinker_path", copied)
    with pytest.raises(tinkex.NotFoundError, match="deleting weights/state"):
        call(rest, "delete_checkpoint", copied.split("/")[2], "weights/state")


def test_files_of_checkpoints_have_download_links(
    rest: RestClient, saved: Saved, call: Call
) -> None:
    links = call(rest, "get_external_weights_urls", saved.export)
    assert sorted(links.urls) == ["adapter_config.json", "adapter_model.safetensors"]
    with urllib.request.urlopen(links.urls["adapter_config.json"]) as answer:
        assert json.load(answer)["r"] == 4
    for path in (saved.state, saved.sampler, saved.export):
        archive = call(rest, "get_checkpoint_archive_url_from_tinker_path", path)
        assert archive.expires > datetime.now(UTC)
        run, checkpoint = path.removeprefix("tinker://").split("/", 1)
        again = call(rest, "get_checkpoint_archive_url", run, checkpoint)
        assert again.url.partition("?")[0] == archive.url.partition("?")[0]
    with pytest.raises(tinkex.NotFoundError):
        call(rest, "get_checkpoint_archive_url", saved.run, "weights/none")


def test_sessions_and_samplers_are_described_moved_found_and_traced(
    rest: RestClient, saved: Saved, call: Call
) -> None:
    session = call(rest, "get_session", saved.session_id)
    assert session.training_run_ids == [saved.run]
    assert saved.sampler_id in session.sampler_ids
    assert saved.session_id in call(rest, "list_sessions", 100).sessions
    sampler = call(rest, "get_sampler", saved.sampler_id)
    assert (sampler.base_model, sampler.model_path) == (TINY, saved.sampler)
    call(rest, "assign_session_project", saved.session_id, "rest-project")
    query = types.SessionSearchRequest(session_id=saved.session_id)
    with pytest.warns(tinkex.ExperimentalWarning):
        found = call(rest, "search_sessions", query).sessions
    assert [(each.session_id, each.display_name) for each in found] == [
        (saved.session_id, "rest test")
    ]
    url = call(rest, "export_session_trace", saved.session_id)
    with urllib.request.urlopen(url) as answer:
        assert json.load(answer)["traceEvents"]
    with pytest.raises(tinkex.NotFoundError, match="no-such-session"):
        call(rest, "get_session", "no-such-session")


def test_whoami_needs_a_jwt(rest: RestClient, call: Call) -> None:
    with pytest.raises(RuntimeError, match="token"):
        call(rest, "whoami")


def test_whoami_with_a_jwt(tmp_path: Path) -> None:
    async def both_forms() -> list[types.WhoamiResponse]:
        key = await new_key(tmp_path, "alice", project_id="vision")
        async with hosted(EchoExecutor(), tmp_path, jwt=True) as api:
            url = str(api.http._base_url).rstrip("/")
            async with RestClient(base_url=url, api_key=key) as rest:
                return [await rest.whoami(), await rest.whoami_async()]

    # As the official client reads the same server's token (see test_official_keys).
    me = types.WhoamiResponse(user_urn="tml:user:alice", org_urn="tml:organization:vision")
    assert [one.model_copy(update={"email": None}) for one in asyncio.run(both_forms())] == [me, me]


def test_the_admin_client_returns_audit_log_and_usage(
    server: Server, rest: RestClient, saved: Saved, call: Call
) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    span = (hour - timedelta(hours=1), (hour + timedelta(hours=1)).isoformat())
    with AdminClient(base_url=server.url) as admin:
        for client in (admin, rest):
            warning: AbstractContextManager[Any] = nullcontext()
            if client is rest:
                warning = pytest.warns(FutureWarning)
            with warning:
                log = call(client, "get_audit_log", "checkpoints", datetime.now(UTC).date())
                assert log.entries
                usage = call(client, "get_billing_usage", *span)
                assert saved.session_id in {each.session_id for each in usage.data}
                stored = call(client, "get_current_checkpoint_storage_usage", "rest-project")
                assert stored.data[0].checkpoint_count >= 3


def test_an_unloaded_model_keeps_its_checkpoints(server: Server, rest: RestClient) -> None:
    with tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(TINY, rank=4)
        path = training.save_state("kept").result().path
        assert training.unload_model().result().model_id == training.model_id
        assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4

        async def twice() -> str:
            other = await service.create_training_client_from_state_async(path)
            export = await (await other.save_weights_external_async("files"))
            unloaded = await (await other.unload_model_async())
            assert unloaded.model_id == other.model_id
            return export.path

        links = rest.get_external_weights_urls(asyncio.run(twice())).result()
        assert "adapter_model.safetensors" in links.urls


def test_an_export_can_be_encrypted_with_age_keys(server: Server, rest: RestClient) -> None:
    pyrage = pytest.importorskip("pyrage")
    identity = pyrage.x25519.Identity.generate()
    with tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(TINY, rank=4)
        path = training.save_weights_external(
            "locked", age_encryption_recipients=[str(identity.to_public())]
        )
        links = rest.get_external_weights_urls(path.result().path).result()
    with urllib.request.urlopen(links.urls["adapter_config.json.age"]) as answer:
        assert json.loads(pyrage.decrypt(answer.read(), [identity]))["r"] == 4
