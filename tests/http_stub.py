"""An HTTP stub server: a test decides the replies, and the server records the request."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Received:
    method: str
    #: As received: percent-encoded, with the query.
    path: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Close the connection after this many bytes of the body.
    cut_after: int | None = None


def reply_json(value: Any, status: int = 200) -> Reply:
    body = json.dumps(value).encode()
    return Reply(status=status, body=body, headers={"Content-Type": "application/json"})


@dataclass
class StubServer:
    url: str = ""
    requests: list[Received] = field(default_factory=list)


@contextmanager
def stub_server(answer: Callable[[Received], Reply]) -> Iterator[StubServer]:
    """Serves on a free loopback port, one thread per connection, until the block ends."""
    stub = StubServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Received(self.command, self.path, headers, body)
            stub.requests.append(request)
            reply = answer(request)
            self.send_response_only(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.status != 204:
                self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body[: reply.cut_after])
            if reply.cut_after is not None:
                self.close_connection = True

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    host, port = server.server_address[:2]
    stub.url = f"http://{host!s}:{port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
