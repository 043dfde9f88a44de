"""
An adapter folder on the Hugging Face hub. Needs the extra `hub`.

    folder = tinkex.download_checkpoint(path, "adapter")
    print(push_to_hub(path, folder).url)

Where it goes and what its card says are decided in pure functions; one commit sends all of it.
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
#: Says that an archive of the hosted service is complete; no part of the adapter.
IGNORED_FILES = ("checkpoint_complete",)


class HubError(TinkerError):
    """The adapter was not pushed, and the text says why."""


@dataclass(frozen=True, kw_only=True)
class PushResult:
    repo_id: str
    #: The branch; None is the repository's default.
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
    Push the files of checkpoint `path`, which are in `folder`.

    Without `repo` they go to a repository of the run, on a branch of the checkpoint. A place whose
    card names another checkpoint is left as it is, and that is an error.
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
        raise HubError("The patterns leave no file to push.")
    done = api.create_commit(
        repo_id,
        operations,
        commit_message=commit_message or f"Add {path}",
        revision=branch,
        create_pr=create_pr,
    )
    return PushResult(repo_id=repo_id, revision=branch, url=done.pr_url or done.commit_url)


# -- decisions ---------------------------------------------------------------------------------------


def target_repo(
    path: str, user: str, *, repo: str | None, revision: str | None
) -> tuple[str, str | None]:
    """The repository and the branch: as said, else one for each run and one for each checkpoint."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    if repo is None:
        repo = _slug(f"tinker-{parsed.training_run_id}")
        revision = revision or _slug(parsed.checkpoint_id)
    return (repo if "/" in repo else f"{user}/{repo}"), revision


def _slug(text: str) -> str:
    """In letters that the hub takes in a name: no doubled or outer marks, at most 80."""
    return re.sub(r"([-.])[-.]+", r"\1", re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII))[:80].strip(
        "-."
    )


def adapter_config(folder: Path) -> dict[str, Any]:
    """What a folder's adapter is; an error if there is none."""
    if (folder / f"{CONFIG}.age").is_file():
        raise HubError(
            f"The files in {folder} are locked with age. Unlock them first, if they may be public."
        )
    if not (folder / CONFIG).is_file() or not any((folder / name).is_file() for name in WEIGHTS):
        raise HubError(
            f"{folder} holds no adapter of the PEFT library: {CONFIG} and {' or '.join(WEIGHTS)} "
            "are needed. tinkex.download_checkpoint() makes such a folder."
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise HubError(f"{folder / CONFIG} cannot be read as JSON: {error}.") from None
    return config if isinstance(config, dict) else {}


def card(path: str, config: dict[str, Any]) -> str:
    """What the hub shows about the adapter."""
    base = config.get("base_model_name_or_path")
    # A folder of the training machine helps nobody, and is nobody's business.
    known = isinstance(base, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) is not None
    head = [f"base_model: {json.dumps(base)}"] if known else []
    head += [
        "library_name: peft",
        "tags:",
        "- tinker",
        "- lora",
        f"tinker_path: {json.dumps(path, ensure_ascii=False)}",
    ]
    of = f" over `{base}`" if known else ""
    rank = f" of rank {config['r']}" if isinstance(config.get("r"), int) else ""
    lines = ["---", *head, "---", "", f"# {path.rpartition('/')[2]}", ""]
    lines += [f"A LoRA adapter{rank}{of}, from checkpoint `{path}`.", ""]
    return "\n".join(lines)


def check_card(path: str, text: str | None, where: str) -> None:
    """A place that holds another checkpoint stays that checkpoint's."""
    # Ours says it in a line of its own; others may only mention it.
    ours = re.findall(r'^tinker_path: "(.+)"$', text or "", re.MULTILINE)
    named = ours or re.findall(r"tinker://[^\s\"'`<>()]+", text or "")
    if named and path not in named:
        raise HubError(
            f"The card of {where} names another checkpoint, {named[0]}. Choose another repository "
            "or revision for this one."
        )


def select_files(
    names: Iterable[str], allow: Sequence[str] | None, ignore: Sequence[str] | None
) -> list[str]:
    """The files that the patterns let through; a pattern that ends in `/` means all below it."""
    from fnmatch import fnmatchcase

    def fits(name: str, patterns: Sequence[str]) -> bool:
        return any(
            fnmatchcase(name, f"{each}*" if each.endswith("/") else each) for each in patterns
        )

    return sorted(
        name
        for name in names
        if (not allow or fits(name, allow)) and not fits(name, [*IGNORED_FILES, *(ignore or ())])
    )


# -- the hub -----------------------------------------------------------------------------------------


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
        found = "There is no token of the Hugging Face hub here."
    except HfHubHTTPError as error:
        if error.response.status_code != 401:
            raise
        found = "The Hugging Face hub does not take the token."
    raise HubError(f"{found} Run `hf auth login`, or set HF_TOKEN.")


def _card_of(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    from tempfile import TemporaryDirectory

    with needs("Pushing to the Hugging Face hub"):
        from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    # Not from the cache: what counts is what is there now.
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
