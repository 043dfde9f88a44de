"""Commands that talk to a service, run against a real server."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import tinkex
from serving import TINY, Server
from tinkex import types
from tinkex.cli.command_group import command


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs `tinkex ...` for one service, in this process because that is faster."""

    def __init__(self, url: str) -> None:
        self.env = {"TINKER_BASE_URL": url, "TINKEX_FIRST_CONTACT_S": "2"}

    def __call__(self, *args: str, stdin: str = "", env: dict[str, str] | None = None) -> Ran:
        done = CliRunner().invoke(
            command, args, input=stdin, env=self.env | (env or {}), prog_name="tinkex"
        )
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return Ran(done.exit_code, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def shell(server: Server) -> Shell:
    return Shell(server.url)


@dataclass
class Saved:
    run_id: str
    session_id: str
    state: str
    sampler: str


@pytest.fixture(scope="module")
def saved(server: Server) -> Iterator[Saved]:
    """A run with a training and a sampler checkpoint."""
    with tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(
            TINY, rank=4, user_metadata={"purpose": "shell"}
        )
        training.forward_backward(
            [
                types.Datum(
                    model_input=types.ModelInput.from_ints([1, 2, 3]),
                    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
                )
            ],
            "cross_entropy",
        )
        training.optim_step(types.AdamParams())
        state = training.save_state("one").result().path
        sampler = training.save_weights_for_sampler("two", ttl_seconds=7200).result().path
        assert service.holder.session_id
        yield Saved(training.model_id, service.holder.session_id, state, sampler)


def test_models_are_listed_and_filtered(shell: Shell) -> None:
    assert TINY in shell("model", "list").out
    models = shell("-f", "json", "model", "list", "TINY").json["models"]
    assert [model["model_name"] for model in models] == [TINY]
    none = shell("model", "list", "banana")
    assert none.code == 1
    assert TINY in none.err


def test_runs_are_listed_with_the_columns_asked_for(shell: Shell, saved: Saved) -> None:
    listed = shell("run", "list", "--limit", "0", "--columns", "id,checkpoint,owner")
    line = next(line for line in listed.out.splitlines() if line.startswith(saved.run_id))
    assert "weights/one" in line
    assert listed.out.splitlines()[0].split() == ["Run", "Last", "checkpoint", "Owner"]
    as_json = shell("run", "list", "--limit", "1", "-f", "json").json
    assert as_json["shown"] == 1
    assert as_json["total"] >= 1


def test_an_unknown_column_is_reported_with_the_known_ones(shell: Shell) -> None:
    wrong = shell("run", "list", "-c", "id,banana")
    assert wrong.code == 2
    assert "unknown column 'banana'" in wrong.err
    assert "checkpoint_time" in wrong.err


def test_a_run_is_shown_with_its_metadata_and_iso_times(shell: Shell, saved: Saved) -> None:
    assert "shell" in shell("run", "info", saved.run_id).out
    run = shell("-f", "json", "run", "info", saved.run_id).json
    assert run["user_metadata"] == {"purpose": "shell"}
    assert "T" in run["last_request_time"]


def test_a_missing_object_exits_with_1_and_says_so(shell: Shell) -> None:
    missing = shell("run", "info", "nobody:train:0")
    assert missing.code == 1
    assert missing.err.startswith("error: there is no")
    assert "GET /api" not in missing.err
    assert missing.out == ""
    details = shell("run", "info", "nobody:train:0", "-v")
    assert details.err.startswith(missing.err)
    assert "GET /api/v1/training_runs/nobody" in details.err
    assert "404" in details.err


def test_checkpoints_are_listed_and_shown(shell: Shell, saved: Saved) -> None:
    of_run = shell("-f", "json", "checkpoint", "list", "--run-id", saved.run_id).json
    assert of_run["run_id"] == saved.run_id
    assert {c["tinker_path"] for c in of_run["checkpoints"]} >= {saved.state, saved.sampler}
    assert saved.sampler in shell("checkpoint", "list", "--limit", "0").out
    info = shell("-f", "json", "checkpoint", "info", saved.sampler).json
    assert info["is_lora"] is True
    assert info["lora_rank"] == 4
    assert info["expires_at"]
    assert "rank" in shell("checkpoint", "info", saved.state).out


def test_publishing_and_expiry_report_the_new_state(shell: Shell, saved: Saved) -> None:
    assert "readable by everyone" in shell("checkpoint", "publish", saved.sampler).err
    assert shell("-f", "json", "checkpoint", "info", saved.sampler).json["public"] is True
    assert shell("-f", "json", "checkpoint", "unpublish", saved.sampler).json == {
        "tinker_path": saved.sampler,
        "public": False,
    }
    assert shell("-f", "json", "checkpoint", "set-ttl", saved.sampler, "--remove").json == {
        "tinker_path": saved.sampler,
        "ttl_seconds": None,
    }
    assert shell("-f", "json", "checkpoint", "info", saved.sampler).json["expires_at"] is None
    # Restore the state for the other tests.
    assert "7200 seconds" in shell("checkpoint", "set-ttl", saved.sampler, "--ttl", "7200").err
    for options in ([], ["--remove", "--ttl", "7200"]):
        assert shell("checkpoint", "set-ttl", saved.sampler, *options).code == 2


def test_deletion_asks_deletes_and_reports_failures(
    shell: Shell, saved: Saved, server: Server
) -> None:
    with tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(TINY, rank=4)
        paths = [training.save_state(f"old-{i}").result().path for i in range(3)]
    no = shell("checkpoint", "delete", paths[0], stdin="n\n")
    assert no.code == 1
    assert paths[0] in no.err
    assert "nothing was deleted" in no.err
    some = shell("-f", "json", "checkpoint", "delete", "-y", paths[0], paths[0] + "-not-there")
    assert some.code == 1
    assert some.json["deleted_count"] == 1
    assert some.json["failed"][0]["tinker_path"] == paths[0] + "-not-there"
    run_id = training.model_id
    for options, deleted in (
        (["--before", "2020-01-01"], 0),
        (["--type", "sampler"], 0),
        (["--after", "2020-01-01"], 2),
    ):
        done = shell("-f", "json", "checkpoint", "delete", "--run-id", run_id, "-y", *options)
        assert done.code == 0, done.err
        assert done.json == {"deleted_count": deleted, "failed": []}


@pytest.mark.parametrize(
    "args",
    [
        ["delete"],
        ["delete", "tinker://a/weights/b", "--run-id", "a"],
        ["delete", "tinker://a/weights/b", "--type", "sampler"],
        ["delete", "--run-id", "a", "--before", "banana"],
        ["delete", "--run-id", "a", "--type", "banana"],
    ],
)
def test_a_deletion_that_is_unclear_is_refused_before_anything_is_sent(args: list[str]) -> None:
    assert Shell("http://127.0.0.1:9")("checkpoint", *args).code == 2


def test_a_checkpoint_is_downloaded_once_and_whole(
    shell: Shell, saved: Saved, tmp_path: Path
) -> None:
    for path in (saved.state, saved.sampler):
        got = shell("-f", "json", "checkpoint", "download", path, "-o", str(tmp_path)).json
        folder = Path(got["destination"])
        assert folder.parent == tmp_path
        files = {file.name: file.stat().st_size for file in folder.iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json"} <= set(files)
        assert got["file_size_bytes"] == sum(files.values())
    again = shell("checkpoint", "download", saved.state, "-o", str(tmp_path))
    assert again.code == 1
    assert "--force" in again.err
    assert shell("checkpoint", "download", saved.state, "-o", str(tmp_path), "--force").code == 0


def test_pushing_without_a_login_on_the_hub_says_how_to_get_one(
    shell: Shell, saved: Saved, tmp_path: Path
) -> None:
    refused = shell(
        "checkpoint", "push-hf", saved.sampler, env={"HF_TOKEN_PATH": str(tmp_path / "none")}
    )
    assert refused.code == 1
    assert "hf auth login" in refused.err


def test_a_trace_is_exported_or_linked(shell: Shell, saved: Saved, tmp_path: Path) -> None:
    url = shell("session", "export-trace", saved.session_id, "--url-only").out.strip()
    assert url.startswith("http")
    file = tmp_path / "it.pftrace"
    assert shell("session", "export-trace", saved.session_id, "-o", str(file)).code == 0
    assert file.stat().st_size > 0


def test_usage_comes_as_table_json_and_csv(shell: Shell, saved: Saved, tmp_path: Path) -> None:
    # Usage is counted when a step has run, in the current hour.
    hour = time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime())
    after = time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime(time.time() + 3600))
    usage = shell("-f", "json", "billing", "usage", hour, after).json
    assert any(event["event_info"]["type"] == "training" for event in usage["data"])
    assert "training" in shell("billing", "usage", hour, after).out
    rows = shell("billing", "usage", hour, after, "--csv", "-").out.splitlines()
    assert rows[0].startswith("bucket_start,bucket_end,type,base_model")
    assert len(rows) == 1 + len(usage["data"])
    sessions = tmp_path / "sessions.csv"
    shell("billing", "usage", hour, after, "--sessions-csv", str(sessions))
    assert sessions.read_text().startswith("session_id,user_metadata\n")
    storage = shell("-f", "json", "billing", "checkpoint-storage").json
    assert sum(item["checkpoint_count"] for item in storage["data"]) >= 2
    assert "checkpoint_count" in shell("billing", "checkpoint-storage", "--csv", "-").out
    wrong = shell("billing", "usage", "banana", after)
    assert wrong.code == 1
    assert "banana" in wrong.err


def test_a_prompt_is_answered(shell: Shell, saved: Saved, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("the ship sails")
    options = ("--plain", "--max-tokens", "4", "--temperature", "0", "--path", saved.sampler)
    answer = shell("-f", "json", "sample", "--prompt-file", str(file), *options, "-n", "2").json
    assert [len(one["tokens"]) for one in answer["sequences"]] == [4, 4]
    plain = shell("sample", "the ship sails", *options)
    assert plain.out == answer["sequences"][0]["text"] + "\n"
    assert shell("sample", "a", "--prompt-file", str(file)).code == 2


def test_an_unreachable_service_and_a_missing_key_are_reported() -> None:
    started = time.monotonic()
    away = Shell("http://127.0.0.1:9")("run", "list")
    assert away.code == 1
    assert away.err.count("\n") == 2
    assert "hint: " in away.err
    assert time.monotonic() - started < 20
    keyless = Shell("https://tinker.example")("run", "list", env={"HOME": "/nonexistent"})
    assert keyless.code == 1
    assert "No API key" in keyless.err
