"""Every command, option, make target, setting and name that a page mentions exists."""

import importlib
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import click
import pytest

import tinkex
from doc_pages import PAGES, ROOT, blocks, commands, inline, name
from tinkex.cli.command_group import SUBCOMMANDS
from tinkex.cli.command_group import command as tinkex_command
from tinkex.server.fleet.plan import WorkerGroup
from tinkex.server.settings import Settings

#: Of other programs: Ray, Prometheus, PostgreSQL, vLLM, the modules of DeepSeek in transformers.
OTHERS = {"--node-ip-address", "--include-dashboard", "http_headers", "synchronous_standby_names"}
OTHERS |= {"--max-lora-rank"}
OTHERS |= {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
#: Names of metrics that the source puts together.
COMPOSED = {"operations_cancelled", "compute_seconds", "tinkex.requests", "tinkex.retries"}
MAKE = re.compile(r"\bmake ([a-z][\w-]*)")
VARIABLE = re.compile(r"\bTINK(?:EX|ER)_[A-Z][A-Z_]*[A-Z]\b")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b")
SNAKE = re.compile(r"\b_?[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b")
#: Not names of files.
DOTTED = re.compile(r"tinkex(?:\.\w+)*\.(?!db\b|toml\b)\w+")
#: What `prometheus_client` adds to the names in the source.
METRIC = re.compile(r"^(?:tinkex_engine)?_|_total$")
#: Perhaps after assignments, after another command, or in a virtual environment.
COMMAND = re.compile(r"(?:^(?:\w+=\S+ )*|&& |bin/)(tinkex (?!ready )[a-z-][^`\n]*)")
#: In a cron table, a start file of a shell, or a drawing: after other words.
WITHIN = re.compile(r"(?:^|[\s(`/])(tinkex ([a-z][a-z-]*)[^`\n)]*)", re.MULTILINE)
#: In outputs, `tinkex ready at URL`, and as one of two packages in a drawing.
NO_COMMANDS = {"ready", "or"}
#: A module, or a file, and what follows.
PROGRAM = re.compile(r"\bpython3? (?:-m ([\w.]+)|([\w./]+\.py))([^`\n]*)")
#: Of other packages, and files of the reader's own.
OTHER_PROGRAMS = ("venv", "pytest", "tinker_cookbook.", "tutorials/")
READERS_FILES = {"quickstart.py", "your_training_loop.py"}
FILE = re.compile(r"(?:tests|qa|benchmarks|examples|deploy|docs|src)/[\w./-]*\w")
SOURCES = ("src", "tests", "qa", "benchmarks", "examples", "deploy")


@cache
def context() -> click.Context:
    return click.Context(tinkex_command)


@cache
def all_options() -> frozenset[str]:
    """Those of all commands, and of the programs in examples, benchmarks and qa."""
    found = set(OTHERS)

    def add(command: click.Command) -> None:
        for parameter in command.params:
            found.update(parameter.opts, parameter.secondary_opts)
        if isinstance(command, click.Group):
            for each in command.list_commands(context()):
                if one := command.get_command(context(), each):
                    add(one)

    add(tinkex_command)
    for folder in ("examples", "benchmarks", "qa", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            found.update(re.findall(r'add_argument\(\s*"(--[\w-]+)"', file.read_text()))
    return frozenset(found)


@cache
def words() -> frozenset[str]:
    """All identifiers of the source, and the names of files."""
    found = OTHERS | COMPOSED
    for folder in SOURCES:
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".py", ".pyi", ".proto", ".js", ".toml", ".yaml", ".json", ".conf"}:
                found.add(file.stem)
                found.update(re.findall(r"\w+", file.read_text(errors="ignore")))
    return frozenset(found)


@cache
def loggers() -> frozenset[str]:
    """Names in the source that are written like modules."""
    files = (ROOT / "src").rglob("*.py")
    return frozenset(
        each for file in files for each in re.findall(r'"(tinkex\.[\w.]+)"', file.read_text())
    )


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def resolved(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the first words name, and the other words."""
    command: click.Command = tinkex_command
    rest = list(arguments)
    while isinstance(command, click.Group) and rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]):
        found = command.get_command(context(), rest[0])
        assert found is not None, f"tinkex {' '.join(arguments)}: there is no {rest[0]!r}"
        command, rest = found, rest[1:]
    return command, rest


def check_command(text: str) -> None:
    """A `tinkex` command, as it is pasted or as it is described: `tinkex run info RUN`."""
    plain = re.sub(r"[\[\]]|\.\.\.$", " ", text)
    try:
        arguments = shlex.split(plain)
    except ValueError:  # an apostrophe in a description
        arguments = plain.split()
    command, rest = resolved(arguments[1:])
    known = {option for each in (command, tinkex_command) for p in each.params for option in p.opts}
    known |= {option for p in command.params for option in p.secondary_opts}
    for word in rest:
        if word in ("|", "&", "&&", "2>", ">", "<"):
            break
        if word.startswith("-") and not re.fullmatch(r"-|-\d+", word):
            option = word.partition("=")[0]
            assert option in known | {"--help", "-h"}, f"{text}: no option {option}"


def named(page: Path) -> Iterator[str]:
    """Code in the text, and the commands of the page without their comments."""
    yield from inline(page)
    yield from commands(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_exists_with_its_options(page: Path) -> None:
    for text in named(page):
        for found in COMMAND.finditer(text):
            check_command(found[1])
    for block in blocks(page):
        if block.language in ("sh", "text", "toml", "yaml"):
            for found in WITHIN.finditer(block.text.replace("\\\n", " ")):
                if found[2] not in NO_COMMANDS:
                    check_command(found[1])


def test_every_command_is_on_the_page_of_commands() -> None:
    """Groups share the code that names them: `tinkex auth login`, `logout`, ..."""
    page = ROOT / "docs" / "guides" / "command-line.md"
    found = {word for text in inline(page) for word in re.findall(r"[a-z][a-z-]*", text)}
    for name_ in SUBCOMMANDS:
        command = tinkex_command.get_command(context(), name_)
        parts = command.list_commands(context()) if isinstance(command, click.Group) else []
        assert {name_, *parts} <= found, f"{page}: tinkex {name_} {parts}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_python_program_exists_with_its_options(page: Path) -> None:
    for module, file, rest in PROGRAM.findall(page.read_text()):
        if (module or file).startswith(OTHER_PROGRAMS) or file in READERS_FILES:
            continue
        code = module_file(module) if module else ROOT / file
        assert code is not None, f"there is no module {module}"
        assert code.exists(), f"there is no {file}"
        if module != "tinkex.as_tinker":  # the options are those of the program that it runs
            for option in OPTION.findall(rest):
                assert f'"{option}"' in code.read_text(), f"{code.name} has no option {option}"


def module_file(module: str) -> Path | None:
    """Of tinkex, or of a folder of the repository."""
    path = module.replace(".", "/")
    places = [
        ROOT / base / f"{path}{end}" for base in ("src", "") for end in (".py", "/__main__.py")
    ]
    return next((place for place in places if place.exists()), None)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_make_target_exists(page: Path) -> None:
    for text in named(page):
        if text.startswith("make "):
            assert MAKE.match(text), text
            assert {word for word in text.split()[1:] if "=" not in word} <= targets(), text


def test_every_make_target_is_in_the_help_and_in_contributing() -> None:
    text = (ROOT / "Makefile").read_text()
    helped = set(re.findall(r'^\t@echo "make ([a-z]+)', text, re.MULTILINE))
    assert helped == targets() - {"help"}
    phony = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == targets()
    written = MAKE.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert targets() - {"help", "clean", "dist"} <= set(written)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_option_exists(page: Path) -> None:
    for text in inline(page):
        if text.startswith("--"):
            for option in OPTION.findall(text):
                assert option in all_options(), f"{option} is an option of no command"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_setting_exists(page: Path) -> None:
    settings = {f"TINKEX_{field.name.upper()}" for field in fields(Settings)}
    client = [field.name.upper() for field in fields(tinkex.Settings)]
    settings |= {f"{brand}_{field}" for brand in ("TINKEX", "TINKER") for field in client}
    for variable in VARIABLE.findall(page.read_text()):
        assert variable in settings | words(), f"{variable} is read nowhere"
    for block in blocks(page):
        if block.language == "toml":
            for table, allowed in server_tables(tomllib.loads(block.text)):
                assert table <= allowed, f"{sorted(table - allowed)} are no settings"


def server_tables(content: dict[str, object]) -> Iterator[tuple[set[str], set[str]]]:
    """The names in a TOML file, with those that are allowed there."""
    workers = content.pop("workers", [])
    assert isinstance(workers, list)
    for each in workers:
        yield set(each), set(inspect.signature(WorkerGroup).parameters)
        yield set(each.get("settings", {})), {field.name for field in fields(Settings)}
    yield set(content), {field.name for field in fields(Settings)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_name_in_code_exists(page: Path) -> None:
    """Also of settings, metrics, fields and functions, which are written like names in Python."""
    known = words() | {word for block in blocks(page) for word in re.findall(r"\w+", block.text)}
    for text in inline(page):
        if re.fullmatch(r"[\w.]+(\(.*\))?", text):
            found = {METRIC.sub("", each) for each in SNAKE.findall(text.partition("(")[0])}
            missing = {each for each in found if "_" in each} - known
            assert not missing, f"`{text}`: {missing} is nowhere in the source"
        if dotted := DOTTED.fullmatch(text.partition("(")[0]):
            assert dotted[0] in loggers() | COMPOSED or importable(dotted[0]), (
                f"`{text}` does not exist"
            )


def importable(path: str) -> bool:
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for attribute in parts[count:]:
            if not hasattr(thing, attribute):
                return False
            thing = getattr(thing, attribute)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_of_the_repository_exists(page: Path) -> None:
    for text in inline(page):
        if FILE.fullmatch(text.rstrip("/")):
            assert list(ROOT.glob(text.rstrip("/"))) or "*" in text, f"there is no {text}"


def test_what_does_not_exist_is_noticed() -> None:
    for text in ("tinkex no-such", "tinkex run no-such RUN", "tinkex serve --no-such"):
        with pytest.raises(AssertionError, match="no-such"):
            check_command(text)
    check_command("tinkex checkpoint delete PATH... --yes")
    assert not importable("tinkex.recipes.no_such")
    assert "no-such" not in targets()
    assert module_file("qa.no_such") is None
