"""
A newcomer's first hour, as a program: python -m qa.newcomer.run (`make newcomer`)

Clones the last commit into a temporary folder, and runs the commands of README.md and of
docs/quickstart.md there, copied from the pages, in a shell on a terminal of 80 columns, with an
empty home folder. Every command is checked; one that has no check fails the run. So does a command
that the demo suggests and that does not find what the demo made.

Shared with this user, to save time: pip's settings and cache, the cache of models, and port 8000
must be free. What a reader brings is made first: two small models and a program for the official SDK.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qa.newcomer import pages
from qa.newcomer.terminal import Failed, Terminal

MINUTES = 60.0
URL = "http://127.0.0.1:8000"
#: The reader's own program, for `python your_training_loop.py`.
READERS_PROGRAM = """\
import tinker

service = tinker.ServiceClient()
model = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(base_model=model, rank=8)
datum = tinker.types.Datum(
    model_input=tinker.types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={
        "target_tokens": tinker.types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3]),
        "weights": tinker.types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3]),
    },
)
print("loss", training.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
"""


@dataclass
class Newcomer:
    """One reader: a clone, a home folder, and terminals in the clone."""

    clone: Path
    home: Path
    env: Mapping[str, str]
    log: Path
    #: The page that is read. Each has a terminal of its own.
    page: str = ""
    #: The checkpoint that the demo saved, for later checks.
    pirate: str = ""
    terminals: list[Terminal] = field(default_factory=list)
    servers: list[Terminal] = field(default_factory=list)

    def terminal(self, name: str) -> Terminal:
        """The terminal of this name; a new one starts in the clone."""
        for each in self.terminals:
            if each.name == name:
                return each
        made = Terminal(name, self.clone, self.env, self.log)
        self.terminals.append(made)
        return made

    def stop_servers(self) -> None:
        for server in self.servers:
            server.interrupt()
        self.servers.clear()

    def close(self) -> None:
        for each in self.terminals:
            each.close()
        # A local server stays for minutes after its last program.
        tinkex = self.clone / ".venv" / "bin" / "tinkex"
        if tinkex.exists():
            subprocess.run([tinkex, "stop"], env=self.env, capture_output=True, check=False)


Check = Callable[[Newcomer, str], str]


def expect(condition: bool, problem: str, output: str) -> None:
    if not condition:
        raise Failed(f"{problem}\n{output[-3000:]}")


def succeeds(*words: str, limit_s: float = 2 * MINUTES) -> Check:
    """The command ends with 0, and its output has these words."""

    def check(reader: Newcomer, command: str) -> str:
        status, output = reader.terminal(reader.page).run(command, limit_s=limit_s)
        expect(status == 0, f"exit status {status}", output)
        for word in words:
            expect(word in output, f"no {word!r} in its output", output)
        return output

    return check


def demo(reader: Newcomer, command: str) -> str:
    """`make demo` succeeds, and each command that it suggests works as it stands."""
    output = succeeds("Next steps", "Pirate answers", limit_s=20 * MINUTES)(reader, command)
    found = [line.split()[-1] for line in output.splitlines() if "sampler weights" in line]
    expect(bool(found), "no path of the sampler weights", output)
    reader.pirate = found[0]
    suggested = pages.suggested(output)
    expect(len(suggested) == len(SUGGESTED), f"{len(suggested)} suggested commands", output)
    for text, (part, check) in zip(suggested, SUGGESTED.items(), strict=True):
        expect(part in text, f"{part!r} was expected, not {text!r}", output)
        timed(reader, text, check, indent="  ")
    return output


def finds_the_pirate(reader: Newcomer, command: str) -> str:
    output = succeeds()(reader, command)
    expect(reader.pirate in "".join(output.split()), f"no {reader.pirate}", output)
    return output


def talks_like_a_pirate(reader: Newcomer, command: str) -> str:
    return succeeds("Arr")(reader, command)


def serves(words: str = "", *, check: Check | None = None) -> Check:
    """A server starts in a terminal of its own. The next server, or the end, stops it."""

    def run(reader: Newcomer, command: str) -> str:
        reader.stop_servers()
        server = reader.terminal(f"server {len(reader.terminals)}")
        status, _ = server.run("[ -e .venv/bin/activate ] && . .venv/bin/activate", limit_s=10)
        output = server.start(command, f"tinkex ready at {URL}\\s", limit_s=3 * MINUTES)
        expect(status == 0 and words in output, f"no {words!r} in its output", output)
        reader.servers.append(server)
        if check is not None:
            check(reader, f".venv/bin/tinkex checkpoint list --base-url {URL}")
        return output

    return run


def quickstart(reader: Newcomer, command: str) -> str:
    """The Python blocks of the page, saved as the page says."""
    (reader.clone / "quickstart.py").write_text(pages.program("docs/quickstart.md"))
    return succeeds("Butterscotch. stop", "/weights/mars", limit_s=5 * MINUTES)(reader, command)


def clones(reader: Newcomer, command: str) -> str:
    """The line works with the address of a repository. The next lines go on in the first clone."""
    terminal = reader.terminal("another clone")
    address = shlex.quote(str(pages.ROOT))
    status, output = terminal.run(command.replace("ADDRESS", address), limit_s=2 * MINUTES)
    expect(status == 0, f"exit status {status}", output)
    status, output = terminal.run("ls", limit_s=10)
    expect("README.md" in output, "no README.md in the clone", output)
    return output


def not_run(reason: str) -> Check:
    def check(reader: Newcomer, command: str) -> str:
        return f"not run: {reason}"

    return check


def official(reader: Newcomer, command: str) -> str:
    """The reader's program, with the official SDK as its `python`."""
    (reader.clone / "your_training_loop.py").write_text(READERS_PROGRAM)
    official = reader.clone / "official" / "bin"
    return succeeds("loss ")(reader, f"PATH={official}:$PATH {command}")


#: What the demo suggests, in its order: a part of each command, and its check.
SUGGESTED: Mapping[str, Check] = {
    "tinkex sample": talks_like_a_pirate,
    "tinkex checkpoint list": finds_the_pirate,
    "examples/fine_tune.py": succeeds("saved as tinker://", limit_s=10 * MINUTES),
    "tinkex serve": serves(check=finds_the_pirate),
}

CAPABILITIES = "import tinker; print(tinker.ServiceClient().get_server_capabilities())"
EXPORT = "export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local"
#: Every command of the pages, and its check. They run page by page, in the order of the page.
CHECKS: Mapping[tuple[str, str], Check] = {
    ("README.md", "make demo"): demo,
    ("README.md", "make test"): not_run("it takes a quarter of an hour, and every change runs it"),
    ("README.md", "git clone ADDRESS tinkex && cd tinkex"): clones,
    ("README.md", "make setup"): succeeds(),
    ("README.md", "source .venv/bin/activate"): succeeds(),
    ("README.md", "tinkex version"): succeeds("tinkex "),
    ("README.md", "tinkex serve"): serves(),
    ("README.md", "tinkex serve ~/models/Qwen3-0.6B"): serves("Qwen3-0.6B"),
    ("README.md", "tinkex serve Qwen/Qwen3-8B=~/models/small"): serves("Qwen/Qwen3-8B"),
    ("README.md", EXPORT): succeeds(),
    ("README.md", "python your_training_loop.py"): official,
    ("docs/quickstart.md", "make setup"): succeeds(limit_s=10 * MINUTES),
    ("docs/quickstart.md", "source .venv/bin/activate"): succeeds(),
    ("docs/quickstart.md", "tinkex version"): succeeds("tinkex "),
    ("docs/quickstart.md", "pip install '.[server,engine,cli]'"): succeeds(limit_s=10 * MINUTES),
    ("docs/quickstart.md", "python quickstart.py"): quickstart,
    ("docs/quickstart.md", "tinkex checkpoint list --base-url local"): succeeds("/weights/mars"),
    ("docs/quickstart.md", "tinkex serve"): serves(),
    (
        "docs/quickstart.md",
        "python3 -m venv official && official/bin/pip install --quiet tinker==0.36.0",
    ): succeeds(limit_s=10 * MINUTES),
    ("docs/quickstart.md", EXPORT): succeeds(),
    ("docs/quickstart.md", f"official/bin/python -c '{CAPABILITIES}'"): succeeds("SmolLM2-135M"),
}

#: The quickstart installs the official SDK, which the end of the README uses.
ORDER = ("docs/quickstart.md", "README.md")


def unchecked() -> set[tuple[str, str]]:
    """Commands of the pages without a check, and checks without a command."""
    found = {(each.page, each.text) for page in pages.PAGES for each in pages.commands(page)}
    return found ^ set(CHECKS)


def timed(reader: Newcomer, command: str, check: Check, indent: str = "") -> None:
    started = time.monotonic()
    print(f"{indent}$ {command}", flush=True)
    try:
        said = check(reader, command)
    except Failed as problem:
        raise Failed(f"$ {command}\n{problem}") from None
    note = said if said.startswith("not run") else f"{time.monotonic() - started:.0f} s"
    print(f"{indent}  ok, {note}", flush=True)


def newcomer(folder: Path) -> Newcomer:
    clone, home = folder / "tinkex", folder / "home"
    subprocess.run(["git", "clone", "--quiet", str(pages.ROOT), str(clone)], check=True)
    home.mkdir()
    tiny = [sys.executable, "-m", "tinkex.cli", "tiny-model"]
    for name in ("Qwen3-0.6B", "small"):
        model = str(home / "models" / name)
        subprocess.run([*tiny, model], check=True, stdout=subprocess.DEVNULL)
    return Newcomer(clone, home, dict(environment(home)), folder / "terminal.log")


def environment(home: Path) -> Iterator[tuple[str, str]]:
    """What a new user of this machine has, and the shared caches."""
    yield "HOME", str(home)
    yield "PATH", "/usr/local/bin:/usr/bin:/bin"
    yield "TERM", "xterm"
    yield "LANG", "C.UTF-8"
    yield "SHELL", "/bin/bash"
    yield "VIRTUAL_ENV_DISABLE_PROMPT", "1"
    yield from ((name, value) for name, value in os.environ.items() if name.startswith("PIP_"))
    own = Path.home()
    if (settings := own / ".config" / "pip" / "pip.conf").is_file():
        yield "PIP_CONFIG_FILE", str(settings)
    yield "PIP_CACHE_DIR", str(own / ".cache" / "pip")
    yield "TINKEX_CACHE", os.environ.get("TINKEX_CACHE") or str(own / ".cache" / "tinkex")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="an empty folder for the clone, which is kept")
    parser.add_argument("--page", choices=pages.PAGES, action="append", help="only these pages")
    options = parser.parse_args()
    if missing := unchecked():
        print(
            "Without a check in qa/newcomer/run.py, or no longer on the page:", *missing, sep="\n"
        )
        return 1
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            print("Port 8000 is in use, and the pages need it. Stop the program that has it.")
            return 1
    folder = options.keep or Path(tempfile.mkdtemp(prefix="tinkex-newcomer-"))
    folder.mkdir(parents=True, exist_ok=True)
    reader = newcomer(folder)
    try:
        for page in options.page or ORDER:
            print(f"== {page}", flush=True)
            reader.page = page
            for command in pages.commands(page):
                timed(reader, command.text, CHECKS[page, command.text])
            reader.stop_servers()
    except Failed as problem:
        print(f"FAILED {problem}\nThe terminals are in {reader.log}")
        return 1
    finally:
        reader.close()
    print("Every command of the pages works.")
    if options.keep is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
