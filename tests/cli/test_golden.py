"""
What every command prints: on a terminal of 80 columns, in a pipe, and as JSON.

The texts are in golden/. After a change that is meant, write them anew and read the difference:

    TINKEX_UPDATE_GOLDEN=1 python -m pytest tests/cli/test_golden.py
    git diff tests/cli/golden
"""

import itertools
import json
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest

import tinkex
from forked_shell import WITH_TORCH, ForkedShell, Ran
from serving import TINY, serving
from tinkex import types
from tinkex.cli.command_group import command as root
from tinkex.testing import write_tiny_model

GOLDEN = Path(__file__).with_name("golden")
UPDATE = os.environ.get("TINKEX_UPDATE_GOLDEN") == "1"

#: Every command with the arguments it is recorded with, in the order in which they run. `{old}`,
#: `{new}`, `{key}` and `{secret}` are others in each run: a checkpoint, a name, a key.
COMMANDS = {
    "version": "version",
    # Early, because the width of a column depends on how long ago something was.
    "checkpoint list": "checkpoint list",
    "key create": "key create --data keys --owner alice --name {new} --expires 20d",
    "key list": "key list --data keys",
    "status": "status",
    "model list": "model list",
    "models": "models --gpu-memory 141GB",
    "run list": "run list",
    "run info": "run info {run}",
    "run plot": "run plot {run}",
    "checkpoint info": "checkpoint info {sampler}",
    "billing usage": "billing usage {today} {tomorrow}",
    "billing checkpoint-storage": "billing checkpoint-storage",
    "sample": "sample --plain 'the ship sails' --max-tokens 4 --temperature 0 -n 2",
    "session export-trace": "session export-trace {session} -o {new}.pftrace",
    "checkpoint publish": "checkpoint publish {sampler}",
    "checkpoint unpublish": "checkpoint unpublish {sampler}",
    "checkpoint set-ttl": "checkpoint set-ttl {sampler} --ttl 7200",
    "checkpoint download": "checkpoint download {state} -o {new}",
    "checkpoint push-hf": "checkpoint push-hf {sampler}",
    "checkpoint delete": "checkpoint delete --yes {old} {old}-not-there",
    "conformance": "conformance {url} --only S5",
    "key revoke": "key revoke {key} --data keys",
    "backup": "backup --data keys {new}",
    "restore": "restore saved --data {new}",
    "doctor": "doctor --data restored",
    "merge": "merge {state} {new} --base tiny --data {data}",
    "export": "export {sampler} --as peft -o {new}",
    "tiny-model": "tiny-model {new}",
    "use": "use http://gpu-box:8000 --name lab",
    "import": "import restored --data {new}",
    "completion": "completion fish",
    # From here on the server has keys.
    "auth login": "auth login --api-key {secret}",
    "auth whoami": "auth whoami",
    "auth status": "auth status",
    "billing keys": "billing keys",
    "auth logout": "auth logout",
}
#: Commands that import torch.
COMPUTING = {"merge", "tiny-model"}
#: Commands that are not recorded here, and why.
ELSEWHERE = {
    "chat": "is a conversation: test_chat.py",
    "serve": "runs until it is stopped: test_serve.py",
    "demo": "trains for minutes: test_demo.py",
    "train": "its loss differs a little between machines: test_train.py",
    "ps": "its columns depend on the machine: test_servers.py",
    "stop": "ends a server: test_servers.py",
    "logs": "prints lines of a server: test_servers.py",
    "web": "runs until it is stopped: tests/together/test_cluster.py",
    "worker": "runs until it is stopped: tests/together/test_cluster.py",
    "fleet up": "needs a Ray cluster: tests/together/test_fleet.py",
    "fleet status": "needs a Ray cluster: tests/together/test_fleet.py",
    "fleet scale": "needs a Ray cluster: tests/together/test_fleet.py",
    "fleet down": "needs a Ray cluster: tests/together/test_fleet.py",
    "move-data": "needs another database: tests/server/storage/test_move_data.py",
}
#: What surrounds a command, for those that need it: before each run.
BEFORE = {"auth login": "auth logout", "auth logout": "auth login --api-key {secret}"}

#: Mistakes, with what is wrong in the environment of some.
MISTAKES: dict[str, tuple[str, dict[str, str]]] = {
    "a command that is nearly right": ("chekpoint list", {}),
    "a command that is elsewhere": ("login", {}),
    "a subcommand that is nearly right": ("run lst", {}),
    "an option that is nearly right": ("run list --frmat json", {}),
    "an argument is missing": ("checkpoint info", {}),
    "a number that is out of range": ("run list --limit -1", {}),
    "a format that does not exist": ("-f yaml run list", {}),
    "options that exclude each other": ("sample Hello --model a --path tinker://a/weights/b", {}),
    "a path that is not one": ("checkpoint info weights/final", {}),
    "a checkpoint that does not exist": ("checkpoint info tinker://nobody:train:0/weights/a", {}),
    "a checkpoint that its run does not have": ("checkpoint publish {state}-no", {}),
    "a run that does not exist": ("run info nobody:train:0", {}),
    "a run that does not exist, with details": ("-v run info nobody:train:0", {}),
    "an expiry that is too short": ("checkpoint set-ttl {state} --ttl 5", {}),
    "a date that is not one": ("billing usage yesterday {tomorrow}", {}),
    "a model that is not served": ("sample Hello --model no/such", {}),
    "a model that nothing matches": ("model list banana", {}),
    "a session that does not exist": ("session export-trace nobody", {}),
    "a folder that exists": ("tiny-model taken", {}),
    "a data folder that does not exist": ("key list --data typo", {}),
    "no server": ("run list", {"TINKER_BASE_URL": "http://127.0.0.1:9"}),
    "no server, when the credentials are checked": (
        "auth status",
        {"TINKER_BASE_URL": "http://127.0.0.1:9"},
    ),
    "not a server": ("run list", {"TINKER_BASE_URL": "banana"}),
    "no service": (
        "run list",
        dict.fromkeys(("XDG_CONFIG_HOME", "XDG_STATE_HOME"), "/nonexistent")
        | {"TINKER_BASE_URL": ""},
    ),
    "no key for the hosted service": ("run list", {"TINKER_BASE_URL": "https://tinker.example"}),
}
WITH_KEYS: dict[str, tuple[str, dict[str, str]]] = {
    "a wrong key": ("run list", {"TINKER_API_KEY": "tml-wrong"}),
    "a key that is not one": ("run list", {"TINKER_API_KEY": "banana"}),
}


@dataclass
class Recorded:
    """How one command went in all forms."""

    terminal: Ran
    pipe: Ran
    json_before: Ran
    json_after: Ran
    reader_gone: Ran

    def golden(self, line: str) -> str:
        parts = [f"$ tinkex {line}    [exit status {self.pipe.code}]"]
        for title, text in (
            ("terminal", re.sub(" +$", "", self.terminal.out, flags=re.MULTILINE)),
            ("pipe", self.pipe.out),
            ("stderr", self.pipe.err),
            ("json", self.json_after.out),
            ("stderr with json", self.json_after.err),
        ):
            if text:
                parts.append(f"──── {title}\n{text.rstrip()}")
        return "\n\n".join(parts) + "\n"


@dataclass
class World:
    """The values that arguments name."""

    shell: ForkedShell
    computing: ForkedShell
    values: dict[str, str]
    old: Iterator[str]
    keys: Iterator[str] = field(default_factory=lambda: map(str, itertools.count(1)))
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(10))

    def args(self, line: str) -> list[str]:
        values = dict(self.values)
        for name, source in (("old", self.old), ("key", self.keys)):
            if f"{{{name}}}" in line:
                values[name] = next(source)
        if "{new}" in line:
            values["new"] = f"new-{next(self.numbers)}"
        return shlex.split(line.format_map(values))

    def record(self, name: str) -> Recorded:
        line = COMMANDS[name]

        def run(*, first: tuple[str, ...] = (), last: tuple[str, ...] = (), **how: bool) -> Ran:
            if name in BEFORE:
                self.shell(*self.args(BEFORE[name]))
            shell = self.computing if name in COMPUTING else self.shell
            return shell(*first, *self.args(line), *last, **how)

        if name == "merge":  # it takes a second, and prints one sentence wherever it goes
            pipe, as_json = run(), run(first=("-f", "json"))
            gone = Ran(141, "", "", "")
            return Recorded(pipe, pipe, as_json, as_json, gone)
        terminal, pipe = run(terminal=True), run()
        return Recorded(
            terminal=terminal,
            pipe=pipe,
            json_before=run(first=("-f", "json")),
            json_after=run(last=("-f", "json")),
            # What prints nothing has no reader. `sample` has its turn when the usage is recorded.
            reader_gone=run(reader_gone=True) if pipe.out and name != "sample" else pipe,
        )


def stable(text: str, values: dict[str, str]) -> str:
    """Replaces what differs between two runs. Ids keep their length, so columns stay aligned."""
    for name in ("url", "data", "folder"):
        text = text.replace(values[name], name.upper())
    text = re.sub(r'("(pid|memory_bytes)": )\w+', r"\g<1>0", text)
    text = text.replace(f"{values['pid']} (serve)", "PID (serve)")
    text = re.sub(r"\d[\d.]* [MG]B$", "1.0 GB", text, flags=re.MULTILINE)
    text = re.sub(r"\d[\d.]* [MGT]B free", "66.0 GB free", text)
    text = re.sub(r"\b(new|old)-\d+", r"\1-00", text)
    text = re.sub(r"\b\d+ minutes? ago\b", "just now", text)
    text = re.sub(r"tml-\w{32}", "tml-" + "0" * 32, text)
    text = re.sub(r"tml-\w{4}(?=…|\")", "tml-0000", text)
    text = text.replace(values["session"], "S" * len(values["session"]))
    text = re.sub(r"\w{22}(?=[:_]train[:_])", "S" * 22, text)
    text = re.sub(r"[0-9a-f]{24,64}", _zeros, text)
    text = re.sub(r"[\d,]+ MiB are free", "66,000 MiB are free", text)
    text = re.sub(r"(?<=request )tinkex-\w+", "REQUEST", text)
    text = re.sub(r"\d{4}-\d\d-\d\d([T ])\d\d:\d\d(:\d\d(\.\d+)?)?(Z|\+00:00| UTC)?", _time, text)
    text = re.sub(r"127\.0\.0\.1:\d{4,5}", "HOST:PORT", text)
    text = re.sub(
        r'("(size_bytes|bytes|seconds|gigabyte_hours|key_id)": )[\d.e-]+', r"\g<1>0", text
    )
    text = re.sub(r"after \d+ attempts in \d+ s", "after 3 attempts in 1 s", text)
    text = re.sub(r"-?\d+\.\d{6,}(e-?\d+)?", "0.123456", text)
    text = re.sub(r"\b\d{1,2}s\b *", lambda found: "0s".ljust(len(found[0])), text)
    return text.replace(tinkex.__version__, "VERSION")


def _zeros(found: re.Match[str]) -> str:
    return re.sub(r"\w", "0", found[0])


def _time(found: re.Match[str]) -> str:
    """A time of the same form; the fraction goes, because it may be zero."""
    seconds, fraction = found[2] or "", found[3] or ""
    shown = found[0].replace(fraction, "") if seconds else found[0]
    return re.sub(r"\d", "0", shown)


# -- what is recorded ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Its path always has the same length: where tables wrap depends on it."""
    with tempfile.TemporaryDirectory(prefix="golden-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Iterator[dict[str, object]]:
    """Everything that the tests compare, recorded in one fixed order: commands see each other."""
    home = folder / "home"
    home.mkdir()
    tiny = write_tiny_model(folder / "tiny", arch="llama")
    env = {
        "HOME": str(home),
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_CONFIG_HOME": str(home / "config"),
        # Where `serving` lets the server write its file.
        "XDG_STATE_HOME": str(folder / "data-state"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_TOKEN_PATH": str(home / "no-token"),
        "TINKEX_FIRST_CONTACT_S": "0.5",
        "TERM": "xterm-256color",
        "COLUMNS": "",
    }
    with (
        ForkedShell(env, folder) as shell,
        ForkedShell(env, folder, WITH_TORCH) as computing,
        serving(f"{TINY}={tiny}", data=folder / "data") as server,
    ):
        shell.env = computing.env = {**env, "TINKER_BASE_URL": server.url}
        world = prepared_world(shell, computing, server.url, folder)
        world.values["pid"] = str(server.process.pid)
        found: dict[str, object] = {}
        for name in COMMANDS:
            if name == "auth login":
                break
            found[name] = world.record(name)
        found.update(mistakes(world, MISTAKES))
        made = shell("key", "create", "--data", str(server.data))
        world.values["secret"] = made.out.strip()
        wait_for_keys(shell)
        for name in COMMANDS:
            if name not in found:
                found[name] = world.record(name)
                if name == "auth login":
                    shell(*world.args("auth login --api-key {secret}"))
                    shell(*world.args("sample --plain ship --max-tokens 4 --temperature 0"))
        found.update(mistakes(world, WITH_KEYS))
        # Whether its tokens are counted depends on when the server notices that it has gone.
        sample = found["sample"]
        assert isinstance(sample, Recorded)
        sample.reader_gone = shell(
            *world.args(COMMANDS["sample"]),
            reader_gone=True,
            env={"TINKER_API_KEY": world.values["secret"]},
        )
        yield {"values": world.values, **found}


def prepared_world(shell: ForkedShell, computing: ForkedShell, url: str, folder: Path) -> World:
    """A run with two checkpoints, others to delete, a backup, and a folder that is taken."""
    with tinkex.ServiceClient(base_url=url) as service:
        training = service.create_lora_training_client(
            TINY, rank=4, seed=1, user_metadata={"name": "pirate"}
        )
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
        )
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3))
        state = training.save_state("final").result().path
        sampler = training.save_weights_for_sampler("final", ttl_seconds=7200).result().path
        session = service.holder.session_id
    assert session
    for args in ("key create --data keys", "backup --data keys saved"):
        assert shell(*args.split()).code == 0
    assert shell("restore", "saved", "--data", "restored").code == 0
    (folder / "taken").mkdir()
    (folder / "taken" / "file").touch()
    values = {
        "url": url,
        "data": str(folder / "data"),
        "folder": str(folder),
        "run": training.model_id,
        "session": session,
        "state": state,
        "sampler": sampler,
        "today": time.strftime("%Y-%m-%d", time.gmtime(time.time() - 86_400)),
        "tomorrow": time.strftime("%Y-%m-%d", time.gmtime(time.time() + 86_400)),
    }

    def old() -> Iterator[str]:
        with tinkex.ServiceClient(base_url=url) as service:
            another = service.create_lora_training_client(TINY, rank=4)
            for number in itertools.count(10):
                yield another.save_state(f"old-{number}").result().path

    return World(shell, computing, values, old())


def wait_for_keys(shell: ForkedShell) -> None:
    """A running server notices its first key within seconds."""
    until = time.monotonic() + 20
    while shell("run", "list", env={"TINKER_API_KEY": "tml-wrong"}).code == 0:
        assert time.monotonic() < until
        time.sleep(0.1)


def mistakes(world: World, cases: dict[str, tuple[str, dict[str, str]]]) -> dict[str, object]:
    return {
        title: (line, world.shell(*world.args(line), env=env))
        for title, (line, env) in cases.items()
    }


# -- the tests -------------------------------------------------------------------------------------


def leaf_commands(group: click.Group | None = None, prefix: str = "") -> Iterator[str]:
    group = group or root
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        found = group.get_command(ctx, name)
        if isinstance(found, click.Group):
            yield from leaf_commands(found, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


def test_every_command_is_recorded() -> None:
    assert set(leaf_commands()) == set(COMMANDS) | set(ELSEWHERE)
    files = {file.stem.replace("_", " ") for file in GOLDEN.glob("*.txt")}
    assert files == {*COMMANDS, "mistakes"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_was_recorded(recorded: dict[str, object], name: str) -> None:
    seen = recorded[name]
    assert isinstance(seen, Recorded)
    values: dict[str, str] = recorded["values"]  # type: ignore[assignment]
    before, after = (stable(run.out, values) for run in (seen.json_before, seen.json_after))
    assert before == after
    assert seen.json_before.code == seen.json_after.code == seen.pipe.code == seen.terminal.code
    if seen.pipe.code == 0:
        json.loads(seen.json_after.out)
    # Colors and lines of boxes are for people; a chart has an axis everywhere.
    assert not re.search("\x1b" if name == "run plot" else "[\x1b│┃─━]", seen.pipe.out)
    file = GOLDEN / f"{name.replace(' ', '_')}.txt"
    text = stable(seen.golden(COMMANDS[name]), values)
    if UPDATE:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"meant? See the docstring of {__file__}"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_silent_if_its_reader_goes_away(
    recorded: dict[str, object], name: str
) -> None:
    seen = recorded[name]
    assert isinstance(seen, Recorded)
    if seen.pipe.out:
        assert seen.reader_gone.code == 141
    assert "roken pipe" not in seen.reader_gone.err
    assert "Error" not in seen.reader_gone.err


@pytest.mark.timeout(180)
def test_mistakes_are_answered_with_a_sentence_and_a_hint(recorded: dict[str, object]) -> None:
    values: dict[str, str] = recorded["values"]  # type: ignore[assignment]
    blocks = []
    for title in {**MISTAKES, **WITH_KEYS}:
        line, ran = recorded[title]  # type: ignore[misc]
        assert ran.code in (1, 2), title
        assert ran.out == "" or line == "auth status", title
        first, *_ = ran.err.splitlines()
        assert first.startswith("error: "), title
        blocks.append(f"# {title}\n$ tinkex {line}    [exit status {ran.code}]\n{ran.err.rstrip()}")
    text = stable("\n\n".join(blocks) + "\n", values)
    file = GOLDEN / "mistakes.txt"
    if UPDATE:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"meant? See the docstring of {__file__}"
