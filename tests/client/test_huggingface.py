"""Uploads to the Hugging Face hub: repository, card and files, and the requests that are sent."""

import base64
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from http_stub import Received, Reply, StubServer, reply_json, stub_server
from tinkex.client.files.huggingface import (
    HubError,
    adapter_config,
    card,
    check_card,
    push_to_hub,
    select_files,
    target_repo,
)

PATH = "tinker://s-1:train:0/sampler_weights/step 10"
REPO = "somebody/tinker-s-1-train-0"
BRANCH = "sampler_weights-step-10"
COMMIT = "0" * 40

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    (folder / "extra").mkdir(parents=True)
    config = {"base_model_name_or_path": "org/base", "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "checkpoint_complete").touch()
    (folder / "extra" / "notes.txt").write_text("n")
    return folder


# -- decisions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo", "revision", "expected"),
    [
        (None, None, (REPO, BRANCH)),
        (None, "mine", (REPO, "mine")),
        ("mine", None, ("somebody/mine", None)),
        ("org/mine", "v1", ("org/mine", "v1")),
    ],
)
def test_repository_and_branch_have_defaults(
    repo: str | None, revision: str | None, expected: tuple[str, str | None]
) -> None:
    assert target_repo(PATH, "somebody", repo=repo, revision=revision) == expected


def test_default_names_are_valid_on_the_hub() -> None:
    from huggingface_hub.utils import validate_repo_id

    for run in ("a--b..c", "-x-", "ü:ö", "r" * 300, "a:train:0"):
        repo, branch = target_repo(f"tinker://{run}/weights/n", "u", repo=None, revision=None)
        validate_repo_id(repo)
        assert branch == "weights-n"


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path, adapter: Path) -> None:
    assert adapter_config(adapter)["r"] == 8
    with pytest.raises(HubError, match="no PEFT adapter"):
        adapter_config(tmp_path)
    (tmp_path / "adapter_config.json.age").touch()
    with pytest.raises(HubError, match="encrypted with age"):
        adapter_config(tmp_path)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(HubError, match="JSON"):
        adapter_config(adapter)


def test_the_card_names_checkpoint_base_and_rank_and_no_folder_of_the_machine() -> None:
    yaml = pytest.importorskip("yaml")
    text = card(PATH, {"base_model_name_or_path": "org/base", "r": 8})
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == "org/base"
    assert head["library_name"] == "peft"
    assert head["tinker_path"] == PATH
    assert "rank 8 over `org/base`" in text
    hidden = card(PATH, {"base_model_name_or_path": "/home/me/models/base"})
    assert "/home/me" not in hidden
    assert "base_model" not in yaml.safe_load(hidden.split("---")[1])


def test_a_repository_of_another_checkpoint_is_refused() -> None:
    path = "tinker://a/weights/1"
    check_card(path, None, "x")
    check_card(path, "# a card without a checkpoint", "x")
    check_card(path, card(path, {}), "x")
    check_card(PATH, card(PATH, {}), "x")
    with pytest.raises(HubError, match="names another checkpoint, tinker://a/weights/10"):
        check_card(path, "made from `tinker://a/weights/10` by somebody", "x")
    with pytest.raises(HubError, match="names another checkpoint, tinker://b/weights/1"):
        check_card(path, card("tinker://b/weights/1", {}), "x")


@pytest.mark.parametrize("head", ["a: [1", "- a\n- b", "a: b: c"])
def test_a_card_with_broken_metadata_is_searched_as_text(head: str) -> None:
    check_card("tinker://a/weights/1", f"---\n{head}\n---\n# a card", "x")
    text = f"---\n{head}\ntinker_path: tinker://b/weights/1\n---\nas tinker://a/weights/1"
    check_card("tinker://b/weights/1", text, "x")
    with pytest.raises(HubError, match="names another checkpoint, tinker://b/weights/1"):
        check_card("tinker://a/weights/1", text, "x")


def test_a_repository_without_a_card_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("huggingface_hub")  # it does not propagate
    logger.addHandler(caplog.handler)
    check_card(PATH, None, "x")
    check_card(PATH, "# a card without metadata", "x")
    logger.removeHandler(caplog.handler)
    assert caplog.records == []


def test_patterns_choose_the_files() -> None:
    names = ["a.json", "b.bin", "checkpoint_complete", "extra/c.txt"]
    assert select_files(names, None, None) == ["a.json", "b.bin", "extra/c.txt"]
    assert select_files(names, ["*.json", "extra/"], None) == ["a.json", "extra/c.txt"]
    assert select_files(names, None, ["extra/*", "*.bin"]) == ["a.json"]


def test_without_the_package_the_extra_is_named(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"tinkex\[hub\]"):
        push_to_hub(PATH, adapter)


# -- what a hub hears --------------------------------------------------------------------------------


class Hub:
    """The parts of the hub that one push needs."""

    def __init__(self) -> None:
        self.url = ""
        self.cards: dict[str, str] = {}
        self.token = "hf_right"
        self.branches: list[str] = []
        self.commits: list[tuple[str, dict[str, Any], dict[str, bytes]]] = []

    def __call__(self, request: Received) -> Reply:
        path, _, query = request.path.partition("?")
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return reply_json({"error": "Invalid user token."}, 401)
        if path == "/api/whoami-v2":
            return reply_json({"name": "somebody", "type": "user"})
        if path == "/api/validate-yaml":  # called for every card
            return reply_json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            made = request.json()
            owner = made.get("organization") or "somebody"
            return reply_json({"url": f"{self.url}/{owner}/{made['name']}"})
        if found := re.fullmatch(r"/(.+)/resolve/([^/]+)/README.md", path):
            return self._card(found[1], found[2])
        if found := re.fullmatch(r"/api/models/(.+)/branch/([^/]+)", path):
            self.branches.append(found[2])
            return reply_json({})
        if found := re.fullmatch(r"/api/models/(.+)/preupload/([^/]+)", path):
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in request.json()["files"]
            ]
            return reply_json({"files": files})
        if found := re.fullmatch(r"/api/models/(.+)/commit/([^/]+)", path):
            lines = [json.loads(line) for line in request.body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self.commits.append((found[2], lines[0]["value"], files))
            url = f"{self.url}/{found[1]}"
            pull = {"pullRequestUrl": f"{url}/discussions/1"} if "create_pr=1" in query else {}
            return reply_json({"commitUrl": f"{url}/commit/{COMMIT}", "commitOid": COMMIT, **pull})
        return reply_json({"error": f"nothing at {path}"}, 404)

    def _card(self, repo: str, revision: str) -> Reply:
        text = self.cards.get(f"{repo}@{revision}")
        if text is None:
            error = "EntryNotFound" if revision == "main" else "RevisionNotFound"
            return Reply(status=404, headers={"X-Error-Code": error})
        headers = {"ETag": '"1"', "X-Repo-Commit": COMMIT}
        return Reply(body=text.encode(), headers=headers)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, StubServer]]:
    # The tests of the whole project are offline; this hub is on this machine.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    hub = Hub()
    with stub_server(hub) as running:
        hub.url = running.url
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield hub, running


def test_an_adapter_is_pushed_in_one_commit_with_its_card(
    adapter: Path, hub: tuple[Hub, StubServer]
) -> None:
    service, running = hub
    done = push_to_hub(PATH, adapter, token="hf_right")
    assert (done.repo_id, done.revision) == (REPO, BRANCH)
    assert done.url.endswith(f"/commit/{COMMIT}")
    created = next(each for each in running.requests if each.path == "/api/repos/create").json()
    assert created["name"] == "tinker-s-1-train-0"
    assert created.get("private") is True or created.get("visibility") == "private"
    assert service.branches == [BRANCH]
    [(revision, head, files)] = service.commits
    assert (revision, head["summary"]) == (BRANCH, f"Add {PATH}")
    assert sorted(files) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "extra/notes.txt",
    ]
    assert files["adapter_model.safetensors"] == b"weights"
    assert PATH in files["README.md"].decode()


def test_the_same_checkpoint_may_be_pushed_again_and_another_may_not(
    adapter: Path, hub: tuple[Hub, StubServer]
) -> None:
    service, _ = hub
    service.cards["org/mine@main"] = card(PATH, {})
    push_to_hub(
        PATH,
        adapter,
        repo="org/mine",
        public=True,
        commit_message="again",
        model_card=False,
        ignore_patterns=["extra/*"],
        token="hf_right",
    )
    [(revision, head, files)] = service.commits
    assert (revision, head["summary"]) == ("main", "again")
    assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors"]
    other = PATH.replace("10", "11")
    with pytest.raises(HubError, match="names another checkpoint"):
        push_to_hub(other, adapter, repo="org/mine", token="hf_right")
    assert len(service.commits) == 1
    assert service.branches == []


def test_a_pull_request_makes_no_branch(adapter: Path, hub: tuple[Hub, StubServer]) -> None:
    service, _ = hub
    done = push_to_hub(PATH, adapter, repo="mine", create_pr=True, token="hf_right")
    assert done.repo_id == "somebody/mine"
    assert done.url.endswith("/discussions/1")
    assert service.branches == []


def test_without_a_login_nothing_is_pushed(
    adapter: Path, hub: tuple[Hub, StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _ = hub
    with pytest.raises(HubError, match="hf auth login"):
        push_to_hub(PATH, adapter, token="hf_wrong")
    with pytest.raises(HubError, match="No file matches the patterns"):
        push_to_hub(PATH, adapter, allow_patterns=["x"], model_card=False, token="hf_right")
    assert service.commits == []
