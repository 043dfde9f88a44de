"""
Uploads an adapter folder to the Hugging Face hub. Needs the extra `hub`.

    folder = tinkex.download_checkpoint(path, "adapter")
    print(push_to_hub(path, folder).url)

Pure functions choose the repository and write the model card; one commit uploads everything.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.client.errors import TinkerError
from tinkex.extras import MissingExtra, needs
from tinkex.wire.checkpoints import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
CARD = "README.md"
#: A marker of complete archives in the hosted service, not part of the adapter.
IGNORED_FILES = ("checkpoint_complete",)


class HubError(TinkerError):
    """The adapter was not uploaded; the message says why."""


@dataclass(frozen=True, kw_only=True)
class PushResult:
    repo_id: str
    #: The branch; None means the repository's default.
    revision: str | None
    #: The page of the commit, or of the pull request.
    url: str


def push_to_hub(
    path: str,
    folder: str | Path,
    *,
    repo: str | None = None,
    revision: str | None = None,
    public: bool = False,
    commit_message: str | None = None,
    create_pr: bool = False,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = None,
    model_card: bool = True,
    token: str | None = None,
) -> PushResult:
    """
    Upload the files of checkpoint `path`, which are in `folder`.

    Without `repo` they go to a repository named after the run, on a branch named after the
    checkpoint. If the model card there names another checkpoint, this is an error and nothing is
    changed.
    """
    hub = _hub()
    folder = Path(folder)
    config = adapter_config(folder)
    api = hub.HfApi(
        endpoint=os.environ.get("HF_ENDPOINT") or None, token=token, library_name="tinkex"
    )
    repo_id, branch = target_repo(path, _user(api), repo=repo, revision=revision)
    api.create_repo(repo_id, private=not public, exist_ok=True)
    check_card(path, _card_of(api, repo_id, branch), f"{repo_id}@{branch or 'main'}")
    if branch is not None and not create_pr:
        api.create_branch(repo_id, branch=branch, exist_ok=True)
    names = select_files(_names(folder), allow_patterns, ignore_patterns)
    operations = [
        hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name)
        for name in names
        if not (model_card and name == CARD)
    ]
    if model_card:
        text = card(path, config).encode()
        operations.append(hub.CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=text))
    if not operations:
        raise HubError("No file matches the patterns.")
    done = api.create_commit(
        repo_id,
        operations,
        commit_message=commit_message or f"Add {path}",
        revision=branch,
        create_pr=create_pr,
    )
    return PushResult(repo_id=repo_id, revision=branch, url=done.pr_url or done.commit_url)


# -- decisions -----------------------------------------------------------------------------------


def target_repo(
    path: str, user: str, *, repo: str | None, revision: str | None
) -> tuple[str, str | None]:
    """The repository and branch: as given, else one per run and one per checkpoint."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    if repo is None:
        repo = _slug(f"tinker-{parsed.training_run_id}")
        revision = revision or _slug(parsed.checkpoint_id)
    return (repo if "/" in repo else f"{user}/{repo}"), revision


def _slug(text: str) -> str:
    """A name that the hub accepts: no repeated or outer - and ., at most 80 characters."""
    return re.sub(r"([-.])[-.]+", r"\1", re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII))[:80].strip(
        "-."
    )


def adapter_config(folder: Path) -> dict[str, Any]:
    """The configuration of the adapter in a folder; raises if there is no adapter."""
    if (folder / f"{CONFIG}.age").is_file():
        raise HubError(
            f"The files in {folder} are encrypted with age. Decrypt them first if they may be public."
        )
    if not (folder / CONFIG).is_file() or not any((folder / name).is_file() for name in WEIGHTS):
        raise HubError(
            f"{folder} contains no PEFT adapter: {CONFIG} and {' or '.join(WEIGHTS)} are needed. "
            "tinkex.download_checkpoint() creates such a folder."
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise HubError(f"{folder / CONFIG} is not valid JSON: {error}.") from None
    return config if isinstance(config, dict) else {}


def card(path: str, config: dict[str, Any]) -> str:
    """The model card that the hub shows."""
    hub = _hub()
    base = config.get("base_model_name_or_path")
    # A local folder of the training machine is not published.
    known = isinstance(base, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) is not None
    data = hub.ModelCardData(
        base_model=base if known else None,
        library_name="peft",
        tags=["tinker", "lora"],
        tinker_path=path,
    )
    of = f" over `{base}`" if known else ""
    rank = f" of rank {config['r']}" if isinstance(config.get("r"), int) else ""
    title = path.rpartition("/")[2]
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {title}\n\n"
        f"A LoRA adapter{rank}{of}, from checkpoint `{path}`.\n"
    )


def check_card(path: str, text: str | None, where: str) -> None:
    """Raise if the card names another checkpoint."""
    # Cards from tinkex have it in a line of its own; others may only mention it. Not read as YAML:
    # the card may be anybody's, and broken.
    ours = re.findall(r"^tinker_path: *[\"']?(.+?)[\"']?\s*$", text or "", re.MULTILINE)
    named = ours or re.findall(r"tinker://[^\s\"'`<>()]+", text or "")
    if named and path not in named:
        raise HubError(
            f"The model card of {where} names another checkpoint, {named[0]}. Choose another "
            "repository or revision for this one."
        )


def select_files(
    names: Iterable[str], allow: Sequence[str] | None, ignore: Sequence[str] | None
) -> list[str]:
    """The files that match the patterns; a pattern ending in `/` matches all files below it."""
    with needs("Pushing to the Hugging Face hub"):
        from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    ignored = [*IGNORED_FILES, *(ignore or ())]
    return sorted(
        filter_repo_objects(
            names, allow_patterns=list(allow or ()) or None, ignore_patterns=ignored
        )
    )


# -- the hub -------------------------------------------------------------------------------------


def _hub() -> Any:
    try:
        with needs("Pushing to the Hugging Face hub"):
            import huggingface_hub
    except MissingExtra as error:
        raise HubError(str(error)) from error
    return huggingface_hub


def _user(api: HfApi) -> str:
    with needs("Pushing to the Hugging Face hub"):
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        return str(api.whoami()["name"])
    except LocalTokenNotFoundError:
        found = "No Hugging Face token was found."
    except HfHubHTTPError as error:
        if error.response.status_code != 401:
            raise
        found = "The Hugging Face hub rejected the token."
    raise HubError(f"{found} Run `hf auth login`, or set HF_TOKEN.")


def _card_of(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    from tempfile import TemporaryDirectory

    with needs("Pushing to the Hugging Face hub"):
        from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    # Not from the cache: the current state of the repository counts.
    with TemporaryDirectory() as folder:
        try:
            file = api.hf_hub_download(repo_id, CARD, revision=revision, local_dir=folder)
        except (EntryNotFoundError, RevisionNotFoundError):
            return None
        return Path(str(file)).read_text(encoding="utf-8", errors="replace")


def _names(folder: Path) -> list[str]:
    return [
        str(file.relative_to(folder).as_posix()) for file in folder.rglob("*") if file.is_file()
    ]
