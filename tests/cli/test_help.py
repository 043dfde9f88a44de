"""`--help` of every command: examples that work, and quick."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tinkex.cli.command_group import SECTIONS, command

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "command-line.md"


def commands(
    group: click.Group = command, path: str = "tinkex"
) -> Iterator[tuple[str, click.Command]]:
    """All commands that do something, with their paths."""
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        found = group.get_command(ctx, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from commands(found, f"{path} {name}")
        else:
            yield f"{path} {name}", found


ALL = dict(commands())


def parse(args: list[str]) -> click.Context:
    """Parse as a shell would, without running anything."""
    ctx = command.make_context("tinkex", list(args))
    while isinstance(ctx.command, click.Group):
        rest = [*getattr(ctx, "_protected_args", []), *ctx.args]
        name, found, rest = ctx.command.resolve_command(ctx, rest)
        assert found is not None
        ctx = found.make_context(name, rest, parent=ctx)
    return ctx


def lines_of(epilog: str | None) -> list[str]:
    title, *lines = (epilog or "\b").removeprefix("\b\n").splitlines()
    assert title == "Examples:"
    return lines


@pytest.mark.parametrize("path", ALL)
def test_a_command_has_examples_that_parse(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "question.txt").write_text("Who are you?")
    backup = tmp_path / "backup"
    backup.mkdir()
    lines = lines_of(ALL[path].epilog)
    assert lines
    for line in lines:
        assert len(line) <= 76, f"click indents it by two columns: {line}"
        for part in line.replace("/mnt/backups/2027-01-31 --data", f"{backup} --data").split("&&"):
            words = shlex.split(part.replace('eval "$(', "").replace(')"', ""), comments=True)
            words = words[: words.index("|")] if "|" in words else words
            assert words[0] == "tinkex", line
            ctx = parse(words[1:])
            ctx.close()  # files
            if part is line:
                assert ctx.command_path == path, line


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("where", ["before", "after"])
def test_every_command_takes_the_common_options(path: str, where: str) -> None:
    """Without running it: whether they have an effect is in the golden outputs."""
    names = path.split()[1:]
    options = {name for param in ALL[path].params for name in param.opts}
    if path == "tinkex logs":  # its lines have one format, and -f follows them, as elsewhere
        assert {"-f", "--follow", "-v", "--verbose"} <= options
        return
    assert {"-f", "--format", "-v", "--verbose"} <= options
    given = ["-f", "json", "-v"]
    words = [*given, *names, "--help"] if where == "before" else [*names, *given, "--help"]
    with pytest.raises(click.exceptions.Exit):
        parse(words)


def test_the_root_lists_all_commands_by_what_people_do() -> None:
    text = command.get_help(click.Context(command, info_name="tinkex"))
    for section, entries in SECTIONS.items():
        assert f"\n{section}:\n" in text
        assert all(f"\n  {name} " in text for name in entries)
    assert lines_of(command.epilog)


def test_every_command_is_in_the_guide() -> None:
    page = PAGE.read_text()
    missing = [path for path in ALL if path not in page and path.split()[-1] not in page]
    assert missing == []


@pytest.mark.parametrize("args", [["--help"], ["checkpoint", "--help"], ["run", "list", "-h"]])
def test_help_imports_little(args: list[str]) -> None:
    """Counted, not timed: on a busy machine times say nothing."""
    program = (
        "import sys; before = set(sys.modules)\n"
        "from tinkex.cli.main import main\n"
        "sys.argv = ['tinkex', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.splitlines()[-1].split())
    heavy = {"pydantic", "numpy", "rich", "aiohttp", "torch", "google.protobuf", "asyncio", "ssl"}
    assert imported & heavy == set()
    if args == ["--help"]:
        assert len(imported) < 120, sorted(imported)
        own = {name for name in imported if name.startswith("tinkex.")}
        assert {name.split(".")[1] for name in own} <= {"cli", "wire"}, own
