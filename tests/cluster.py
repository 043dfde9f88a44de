"""Web and worker processes on one database, for tests: started, killed, stopped and continued."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from processes import children
from serving import TINY

_PROGRAMS = Path(__file__).resolve().parent / "server"
#: A worker that notifies nobody of every second thing, and hears every second notification.
FORGETFUL = _PROGRAMS / "forgetful_worker.py"
#: More than a worker has to move its models and to finish its samples.
END_S = 90


@dataclass
class Process:
    """One `tinkex web` or `tinkex worker`."""

    process: subprocess.Popen[str]
    log_file: Path
    #: The address of a web process, or the name of a worker.
    said: str = ""
    command: tuple[str, ...] = ()
    #: Of its data folder.
    folder: str = ""

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def signal(self, number: int) -> None:
        """To the process and its children, which are the web process or the engine."""
        # The parent first when it is stopped, and last when it continues.
        pids = [self.process.pid, *children(self.process.pid)]
        for pid in reversed(pids) if number == signal.SIGCONT else pids:
            os.kill(pid, number)

    def kill(self) -> None:
        """Kill it, as a machine does that loses its power."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.kill()
        assert self.process.stdout
        self.process.stdout.close()
        return self.process.wait()


@dataclass
class Cluster:
    """The processes of one database."""

    db: str
    storage: str
    folder: Path
    model: Path
    env: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    started: list[Process] = field(default_factory=list)

    @property
    def urls(self) -> list[str]:
        """The addresses of the web processes."""
        return list(dict.fromkeys(one.said for one in self.started if one.said.startswith("http")))

    def web(self, *args: str, port: int = 0) -> Process:
        """Start a web process, and wait until it is ready."""
        number = len(self.started)
        command = [sys.executable, "-m", "tinkex.cli.main", "web", "--port", str(port)]
        process = self._start([*command, *args], f"web-{number}")
        line = self.said(process)
        assert line.startswith("tinkex ready at "), process.log
        process.said = line.split()[-1]
        return process

    def named(self, said: str) -> Process:
        """The newest process with this address or name."""
        return next(one for one in reversed(self.started) if one.said == said)

    def restart(self, said: str) -> Process:
        """Stop a process as a rolling restart does, and start it again with its address or name."""
        process = self.named(said)
        status = process.stop()
        assert status == 0, process.log
        port = said.rpartition(":")[2]
        command = [port if one == "0" else one for one in process.command]
        again = self._start(command, process.folder)
        line = self.said(again)
        assert line in (f"tinkex ready at {said}", f"tinkex worker {said} ready"), again.log
        again.said = said
        return again

    def worker(
        self, name: str, *args: str, program: Path | None = None, wait: bool = True
    ) -> Process:
        """Start a worker, or a `program` like it, and wait until it is ready unless told otherwise."""
        command = [sys.executable, "-m", "tinkex.cli.main", "worker"]
        if program is not None:
            command = [sys.executable, str(program)]
        command += [f"{TINY}={self.model}", "--name", name, "--threads", "1", *args]
        process = self._start(command, f"worker-{name}")
        process.said = name
        if wait:
            assert self.said(process) == f"tinkex worker {name} ready", process.log
        return process

    def said(self, process: Process) -> str:
        """The next line on standard output."""
        assert process.process.stdout
        return process.process.stdout.readline().strip()

    def _start(self, command: Sequence[str], name: str) -> Process:
        log = self.folder / f"{name}-{len(self.started)}.log"
        data = self.folder / name
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*command, "--db", self.db, "--storage", self.storage, "--data", str(data)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "XDG_STATE_HOME": str(self.folder / "state"),
                    **self.env,
                },
            )
        self.started.append(Process(process, log, command=tuple(command), folder=name))
        return self.started[-1]


@contextmanager
def cluster(
    db: str, folder: Path, model: Path, *, storage: str = "", env: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A cluster whose processes end with the block. Without a storage, they share a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    running = Cluster(
        db=db,
        storage=storage or str(folder / "storage"),
        folder=folder,
        model=model,
        env={"TINKEX_LONG_POLL_S": "5", "TINKEX_TAKEOVER_S": "3", **(env or {})},
    )
    try:
        yield running
    finally:
        for process in reversed(running.started):
            process.stop()
