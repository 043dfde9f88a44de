"""An S3 API for tests: moto's server, in its own process on loopback, in memory."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from ports import free_port

BUCKET = "tinkex-tests"
#: Without these, the AWS libraries look for credentials on the network.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
#: Each line on standard input starts or stops listening; the objects stay.
SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = None
for _ in sys.stdin:
    if server is None:
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False)
        server.start()
    else:
        server.stop()
        server = None
    print("ready", flush=True)
"""


class ObjectStore:
    """An S3 server that a test can kill, start again on the same port (empty), pause and close."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **CREDENTIALS},
        )
        self._toggle()
        self.make_bucket()

    def make_bucket(self, name: str = BUCKET) -> None:
        url = f"http://127.0.0.1:{self.port}/{name}"
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=20):
            pass

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None

    def _toggle(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """The server refuses connections; afterwards it has the same objects."""
        self._toggle()
        try:
            yield
        finally:
            self._toggle()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The server accepts connections and does not respond."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    store = ObjectStore()
    try:
        yield store
    finally:
        store.kill()
