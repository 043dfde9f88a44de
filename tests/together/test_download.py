"""Downloads of all kinds of checkpoints from a server."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from serving import TINY, Server
from tinkex import RestClient, types
from tinkex.client.files.file_download import PIECE_BYTES

ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def paths(server: Server) -> dict[str, str]:
    with tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(TINY, rank=8)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([20, 21, 22]),
            loss_fn_inputs={"target_tokens": [21, 22, 23], "weights": [1.0, 1.0, 1.0]},
        )
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        return {
            "training": training.save_state("files").result().path,
            "sampler": training.save_weights_for_sampler("files").result().path,
            "external": training.save_weights_external("files").result().path,
        }


@pytest.fixture
def rest(server: Server) -> Iterator[RestClient]:
    with RestClient(base_url=server.url) as client:
        yield client


def runs(rest: RestClient) -> int:
    return rest.list_training_runs(0).result().cursor.total_count


def test_defect_21_every_kind_is_downloaded_without_creating_a_training_run(
    rest: RestClient, paths: dict[str, str], tmp_path: Path
) -> None:
    before = runs(rest)
    for kind, path in paths.items():
        seen: list[tuple[int, int]] = []

        def show(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        folder = tinkex.download_checkpoint(path, tmp_path / kind, rest=rest, progress=show)
        assert {file.name for file in folder.iterdir()} == ADAPTER
        assert seen[-1][0] == seen[-1][1] > 1000
    assert runs(rest) == before
    weights = {kind: (tmp_path / kind / "adapter_model.safetensors").read_bytes() for kind in paths}
    assert weights["training"] == weights["sampler"] == weights["external"]


@pytest.mark.parametrize("kind", ["training", "sampler", "external"])
def test_defect_21_an_interrupted_download_resumes(
    kind: str,
    rest: RestClient,
    paths: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = tinkex.download_checkpoint(paths[kind], tmp_path / "whole", rest=rest)
    assert PIECE_BYTES > 4096
    monkeypatch.setattr("tinkex.client.files.file_download.PIECE_BYTES", 4096)

    def stop(done: int, total: int) -> None:
        if done > 20_000:
            raise KeyboardInterrupt

    target = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        tinkex.download_checkpoint(paths[kind], target, rest=rest, progress=stop)
    assert not target.exists()
    seen: list[int] = []
    tinkex.download_checkpoint(
        paths[kind], target, rest=rest, progress=lambda done, _: seen.append(done)
    )
    assert seen[0] > 15_000
    assert {file.name: file.read_bytes() for file in target.iterdir()} == {
        file.name: file.read_bytes() for file in whole.iterdir()
    }


class NoArchives(RestClient):
    """A service without archive downloads."""

    def get_checkpoint_archive_url(self, *_: Any) -> Any:
        return self._ask(
            "an archive",
            "GET",
            "no/such/endpoint",
            answer=type(None),
            about="requesting an archive",
        )


def test_without_archives_a_training_checkpoint_is_exported_and_the_export_deleted(
    server: Server, rest: RestClient, paths: dict[str, str], tmp_path: Path
) -> None:
    with NoArchives(base_url=server.url) as bare:
        folder = asyncio.run(
            tinkex.download_checkpoint_async(paths["training"], tmp_path / "a", rest=bare)
        )
        with pytest.raises(tinkex.TinkerError, match="save_weights_external"):
            tinkex.download_checkpoint(paths["sampler"], tmp_path / "b", rest=bare)
    assert {file.name for file in folder.iterdir()} == ADAPTER
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    newest = rest.list_user_checkpoints(20).result().checkpoints
    assert not [each for each in newest if "/download-" in each.tinker_path]


def test_the_default_service_is_used_unless_one_is_given(
    server: Server, paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    folder = tinkex.download_checkpoint(paths["sampler"], str(tmp_path / "a"))
    assert {file.name for file in folder.iterdir()} == ADAPTER
    with pytest.raises(tinkex.NotFoundError):
        tinkex.download_checkpoint(paths["sampler"] + "-not", tmp_path / "b")
