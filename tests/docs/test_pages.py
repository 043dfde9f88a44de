"""
The blocks of the README and the docs run, page by page, on a server with a tiny model.

- Untitled Python blocks of a page are one program. Blocks with a title are files in its folder.
- Commands run in their order, in the same folder: before the program if the page begins with them.
- Long runs are shortened: `steps=20` and `--steps 20` become 2, and `[:64]` becomes `[:4]`. What stands for something of the
  reader's (RUN, DIR, tinker://RUN/weights/final, http://127.0.0.1:8000) is replaced.
- What cannot run here is listed with the reason, and so is what follows `export TINKEX_DB=`: it needs
  PostgreSQL (tests/together/test_fleet.py). `test_names.py` checks that all commands exist.
"""

import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import tinkex
from doc_pages import PAGES, ROOT, Block, blocks, commands, name
from forked_shell import WITH_TOKENIZERS, WITH_TORCH, ForkedShell
from numerics.pictures import write_image_model
from tinkex import types
from tinkex.client.local_server import LocalSettings, attach

#: A model that reads images; a tiny one takes its place.
IMAGE_MODEL = "Qwen/Qwen3-VL-2B-Instruct"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
#: Pages whose commands `make newcomer` runs in a fresh clone, and `test_newcomer.py` checks.
NEWCOMER = ("README.md", "docs/quickstart.md")
#: The beginnings of commands that are not run, and why.
NOT_RUN = {
    "make": "`make newcomer` runs those of a reader",
    "git ": "`make newcomer` clones",
    "pip ": "`make newcomer` installs",
    "python3 -m venv": "`make newcomer` installs",
    "/opt/tinkex/bin/": "`make newcomer` installs and serves",
    "sudo": "changes the machine",
    "pg_restore": "tests/server/store start PostgreSQL",
    "tinkex doctor --db": "tests/server/cluster start a cluster",
    "pg_dump": "tests/server/store start PostgreSQL",
    "aws ": "is another program",
    "createdb": "tests/server/store start PostgreSQL",
    "ray ": "tests/server/fleet start Ray",
    "(umask 077": "tests/server/fleet start Ray",
    "ollama": "is another program",
    "llama-cli": "is another program; `make gguf` reads the file with it",
    "jupyter": "is another program; the notebook runs below",
    "python examples/": "test_examples.py runs them",
    "python -m tinkex.as_tinker": "tests/client/test_as_tinker.py runs programs",
    "pytest --pyargs": "tests/conformance run it",
    "tinkex conformance": "tests/conformance run it",
    "tinkex serve": "tests/cli/test_serve.py starts servers",
    "tinkex stop": "tests/cli/test_servers.py stops servers",
    "tinkex fleet": "tests/server/fleet run them",
    "tinkex move-data": "needs PostgreSQL and S3: tests/server/store",
    "tinkex import": "needs the folder of an earlier version: tests/cli/test_golden.py imports one",
    "tinkex auth log": "in and out; needs a server with keys: tests/cli/test_auth.py",
}
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
LONG = {
    r"(\bsteps ?= ?|\bSTEPS = |--steps )\d+": r"\g<1>2",
    r"\[:64\]": "[:4]",
}
CHECKPOINT = re.compile(r"tinker://[\w:-]+/(weights|sampler_weights)/[\w-]+")


@dataclass
class World:
    """A server with the tiny model under the name of the embedded one, and two runs."""

    shell: ForkedShell
    url: str
    data: Path
    model: Path
    runs: list[str]
    #: A folder, which the local server loads when a program names it.
    image_model: Path

    def replaced_paths(self, code: str) -> str:
        """Code of a page, with the paths of a checkpoint here."""
        code = code.replace(IMAGE_MODEL, str(self.image_model))
        return CHECKPOINT.sub(lambda path: f"tinker://{self.runs[0]}/{path[1]}/final", code)

    def replaced(self, command: str) -> str:
        """A command of a page, for this server."""
        home = self.shell.env["HOME"]
        command = self.replaced_paths(command)
        for theirs, ours in {
            "http://127.0.0.1:8000": self.url,
            "/var/lib/tinkex": f"{home}/deployed",
            "~/": f"{home}/",
            "RUN": self.runs[0],
            "OTHER": self.runs[1],
            "DIR": str(self.data),
        }.items():
            command = re.sub(rf"(?<![\w/]){re.escape(theirs)}(?![A-Z])", ours, command)
        return command


@pytest.fixture(scope="module")
def world(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("local")
    image_model = write_image_model(tmp_path_factory.mktemp("images") / "model", "Qwen3VL")
    settings = {
        "TINKEX_LOCAL_DATA": str(data),
        "TINKEX_LOCAL_ARGS": "--threads 1",
        "TINKEX_LOCAL_MODEL": f"{MODEL}={tiny_model}",
        "HOME": str(tmp_path_factory.mktemp("home")),
    }
    held = attach(LocalSettings.from_env({**os.environ, **settings}))
    try:
        with tinkex.ServiceClient(base_url=held.url) as service:
            runs = [a_run(service, run) for run in ("pirate", "other")]
        modules = tuple(dict.fromkeys((*WITH_TOKENIZERS, *WITH_TORCH)))
        with ForkedShell(settings, ROOT, modules, strict=True) as shell:
            yield World(shell, held.url, data, tiny_model, runs, image_model)
    finally:
        held.release()


def a_run(service: tinkex.ServiceClient, run: str) -> str:
    training = service.create_lora_training_client(MODEL, rank=4, user_metadata={"name": run})
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    for _ in range(2):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3))
    training.save_state("final").result()
    training.save_weights_for_sampler("final").result()
    return training.model_id


def as_program(found: list[Block]) -> str:
    """The blocks at their own line numbers, so that a traceback points into the page."""
    program = ""
    for block in found:
        program += "\n" * (block.line - program.count("\n")) + block.text
    return shorter(program)


def shorter(program: str) -> str:
    for long, short in LONG.items():
        program = re.sub(long, short, program)
    return program


def program_of(page: Path) -> str:
    return as_program([one for one in blocks(page) if one.language == "python" and not one.title])


def commands_of(page: Path) -> list[str]:
    return [] if name(page) in NEWCOMER else commands(page)


RUNNABLE = [page for page in PAGES if program_of(page) or commands_of(page)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_the_page_runs(page: Path, world: World, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    first = next(block for block in blocks(page) if block.language in ("python", "console"))
    if first.language == "python" and not first.title:
        run_program(page, world, tmp_path)
        run_commands(page, world, tmp_path)
    else:
        run_commands(page, world, tmp_path)
        run_program(page, world, tmp_path)


def run_program(page: Path, world: World, folder: Path) -> None:
    if program := program_of(page):
        done = world.shell.run_program(world.replaced_paths(program), folder)
        assert done.code == 0, f"{name(page)}\n{done.out}\n{done.err}"


def run_commands(page: Path, world: World, folder: Path) -> None:
    env = {
        "TINKER_BASE_URL": world.url,
        "TINKER_API_KEY": "tml-local",
        # Keys that a page creates are not for the server of the other pages.
        "TINKEX_DATA": str(folder / "keys" if page.stem == "keys" else world.data),
    }
    for command in commands_of(page):
        words = shlex.split(world.replaced(command))
        if words[0] == "export":
            env |= dict(word.split("=", 1) for word in words[1:])
            continue
        if "TINKEX_DB" in env or not_run(command):
            continue
        assert words[0] == "tinkex", f"{name(page)}: {command} is neither run nor in NOT_RUN"
        done = world.shell(*shortened(words[1:], world), stdin="Hello\n", env=env, folder=folder)
        expected = 1 if f"$ {command}\nerror: " in page.read_text() else 0
        assert done.code == expected, f"{name(page)}: {command}\n{done.out}\n{done.err}"


def not_run(command: str) -> str | None:
    """The entry of NOT_RUN for a command, which may begin with assignments."""
    plain = re.sub(r"^(\w+=\S+ )*", "", command)
    return next((begin for begin in NOT_RUN if plain.startswith(begin)), None)


def test_every_command_that_is_not_run_is_on_a_page() -> None:
    found = {not_run(command) for page in PAGES for command in commands_of(page)}
    assert set(NOT_RUN) <= found


def shortened(words: list[str], world: World) -> list[str]:
    if words[0] == "train":
        words = [*words, "--steps", "2"]  # the last one counts
    if words[0] == "export" and "peft" not in words:
        words = [*words, "--base", str(world.model)]
    return words


@pytest.mark.timeout(120)
def test_the_notebook_runs(world: World) -> None:
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    done = world.shell.run_program(shorter("\n".join(cells)), ROOT / "examples")
    assert done.code == 0, done.err


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_settings_and_data_in_blocks_can_be_parsed(page: Path) -> None:
    parse = {"toml": tomllib.loads, "yaml": yaml.safe_load, "json": json.loads}
    for block in blocks(page):
        assert block.language in {"python", "console", "text", "jsonl", "sh", *parse}, block
        if block.language in parse:
            parse[block.language](block.text)
        if block.language == "sh":
            subprocess.run(["bash", "-n", "-c", block.text], check=True)
        if block.language == "jsonl":
            assert [json.loads(line) for line in block.text.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_are_valid(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_the_readme_shows_make_demo_and_make_test() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
