"""
Runs `tinkex ...` as real processes, on a real terminal or with pipes, many in a second.

Imports take most of the time of a short command. So one process imports everything, and forks a
child for each command. The child is a process of its own with its own terminal, and ends as
`tinkex` does. `run_program` runs a Python program in the same way.

As a program (`python tests/forked_shell.py`), this file is that process: it reads requests from
stdin and writes answers to stdout, one JSON object in each line.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Self

COLUMNS, LINES = 80, 24
#: Imported before the first fork. None of them may start a thread.
PRELOADED = (
    "rich.console",
    "rich.progress",
    "rich.table",
    "aiohttp",
    "numpy",
    "tokenizers",
    "tinkex.cli.command_group",
    "tinkex.cli.completion",
    "tinkex.client.connection",
    "tinkex.client.files.checkpoint_download",
    "tinkex.client.files.huggingface",
    "tinkex.client.rest",
    "tinkex.client.sampling",
    "tinkex.client.service",
    "tinkex.client.training",
    "tinkex.conformance",
    "tinkex.models.tokenizer",
    "tinkex.server.maintenance.backup",
    "tinkex.server.maintenance.doctor",
)
#: In addition, for commands that compute. Forks of such a large process are slower.
WITH_TORCH = (
    *PRELOADED,
    "tinkex.engine.adapters.merge",
    "tinkex.models.resolve",
    "tinkex.models.tiny_model",
    "transformers.generation",
    "transformers.models.llama.modeling_llama",
)
#: For programs that use the tokenizer of a model, without commands.
WITH_TOKENIZERS = (
    "aiohttp",
    "numpy",
    "tinkex.client.service",
    "tinkex.client.training",
    "tinkex.client.sampling",
    "tinkex.models.tokenizer",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
    "transformers.tokenization_utils_tokenizers",
)
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")


@dataclass(frozen=True)
class Ran:
    """What a command printed. On a terminal, without colors."""

    code: int
    out: str
    err: str
    #: What it wrote to stdout, byte for byte.
    raw: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class ForkedShell:
    """Runs commands with one environment, in one folder."""

    def __init__(
        self,
        env: dict[str, str],
        folder: Path,
        modules: tuple[str, ...] = PRELOADED,
        *,
        strict: bool = False,
    ) -> None:
        """With `strict`, warnings are errors: `python -W error`."""
        self.env = env
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, *(("-W", "error") if strict else ()), __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # One thread: a child cannot use the threads that a library started before the fork.
            env={**os.environ, **env, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    def __call__(
        self,
        *args: str,
        terminal: bool = False,
        reader_gone: bool = False,
        stdin: str = "",
        env: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> Ran:
        """Runs `tinkex ARGS`; with `reader_gone`, nobody reads its stdout, as after `| head`."""
        return self._ask(
            args=args,
            terminal=terminal,
            reader_gone=reader_gone,
            stdin=stdin,
            env={**self.env, **(env or {})},
            folder=str(folder or self.folder),
        )

    def run_program(self, program: str, folder: Path, *, env: dict[str, str] | None = None) -> Ran:
        """Runs `python -c PROGRAM` in a folder."""
        return self._ask(program=program, folder=str(folder), env={**self.env, **(env or {})})

    def _ask(self, **request: Any) -> Ran:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        usual = {
            "args": (),
            "program": None,
            "terminal": False,
            "reader_gone": False,
            "stdin": "",
            "env": self.env,
            "folder": str(self.folder),
        }
        print(json.dumps({**usual, **request}), file=self._process.stdin, flush=True)
        code, out, err = json.loads(self._process.stdout.readline())
        shown = ESCAPES.sub("", out).replace("\r\n", "\n") if request.get("terminal") else out
        return Ran(code, shown, err, out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait(20)


# -- the process that forks ------------------------------------------------------------------------


def serve_requests() -> None:
    gc.disable()  # modules make hundreds of thousands of objects, and all of them stay
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # so that the garbage collection of a child does not touch, and copy, all memory
    gc.enable()
    for line in sys.stdin:
        request = json.loads(line)
        out_read, out_write = pty.openpty() if request["terminal"] else os.pipe()
        err_read, err_write = os.pipe()
        if request["reader_gone"]:
            os.close(out_read)
            out_read = os.open(os.devnull, os.O_RDONLY)
        child = os.fork()
        if child == 0:
            os.close(out_read)
            os.close(err_read)
            _become(request, out_write, err_write)
            _run(request["program"])
        os.close(out_write)
        os.close(err_write)
        out, err = _read_all(out_read, err_read)
        _, status = os.waitpid(child, 0)
        answer = json.dumps([os.waitstatus_to_exitcode(status), out, err])
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _run(program: str | None) -> NoReturn:
    """Runs the command and ends without taking the imported modules apart, which takes seconds."""
    code: object = 1
    try:
        if program is None:
            from tinkex.cli.main import main

            main()
        else:
            sys.argv = ["-c"]
            sys.modules["__main__"] = module = ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), module.__dict__)  # noqa: S102 (of tests)
            code = 0
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):  # as the interpreter does
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:  # noqa: BLE001 (as the interpreter does)
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def _become(request: dict[str, Any], out: int, err: int) -> None:
    """Makes this process look as a shell would have started it."""
    os.setsid()
    if request["terminal"]:
        fcntl.ioctl(out, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        fcntl.ioctl(out, termios.TIOCSCTTY, 0)
    given_read, given_write = os.pipe()
    os.write(given_write, request["stdin"].encode())
    for descriptor, number in ((given_read, 0), (out, 1), (err, 2)):
        os.dup2(descriptor, number)
    for descriptor in {given_read, given_write, out, err} - {0, 1, 2}:
        os.close(descriptor)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.argv = ["tinkex", *request["args"]]


def _read_all(*descriptors: int) -> list[str]:
    """Reads until all writers have closed their ends."""
    found = dict.fromkeys(descriptors, b"")
    open_ones = set(descriptors)
    while open_ones:
        for descriptor in select.select(list(open_ones), [], [])[0]:
            data = b""
            with contextlib.suppress(OSError):  # a terminal whose other end was closed
                data = os.read(descriptor, 65536)
            found[descriptor] += data
            if not data:
                open_ones.remove(descriptor)
                os.close(descriptor)
    return [found[descriptor].decode(errors="replace") for descriptor in descriptors]


if __name__ == "__main__":
    serve_requests()
