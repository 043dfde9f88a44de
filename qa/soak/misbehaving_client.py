"""A client that holds idle sockets, sends incomplete requests and does not read responses."""

import json
import random
import socket
import struct
import threading
import time
import urllib.request
from contextlib import closing
from urllib.parse import urlsplit

#: The longest time that a socket is held.
MAX_HELD_S = 15.0


class MisbehavingClient:
    """Performs random actions in its own thread until `stop`."""

    def __init__(self, url: str, key: str, base: str, seed: int) -> None:
        address = urlsplit(url)
        self._address = (address.hostname or "", address.port or 80)
        self._url, self._key, self._base = url, key, base
        self._rng = random.Random(seed)
        self._stopped = threading.Event()
        self._held: list[tuple[float, socket.socket]] = []
        #: Number of actions by name.
        self.done: dict[str, int] = {}
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(30)
        for _, held in self._held:
            held.close()

    def _run(self) -> None:
        actions = [
            self._idle_connection,
            self._incomplete_head,
            self._incomplete_body,
            self._unread_stream,
            self._reset_poll,
            self._wrong_key,
        ]
        while not self._stopped.wait(self._rng.uniform(0.5, 1.5)):
            action = self._rng.choice(actions)
            try:
                action()
            except ConnectionError:
                pass  # the server may refuse the connection
            except Exception as error:  # noqa: BLE001  part of the report
                self.errors.append(f"{action.__name__}: {type(error).__name__}: {error}")
            name = action.__name__.strip("_")
            self.done[name] = self.done.get(name, 0) + 1
            self._release_expired()

    def _idle_connection(self) -> None:
        """A connection that sends nothing."""
        self._hold(self._connect())

    def _incomplete_head(self) -> None:
        held = self._connect()
        held.sendall(b"POST /api/v1/asample HTTP/1.1\r\nHost: a\r\n")
        self._hold(held)

    def _incomplete_body(self) -> None:
        held = self._connect()
        held.sendall(self._head("asample", 100_000) + b'{"prompt":')
        self._hold(held)

    def _unread_stream(self) -> None:
        """Starts a stream and does not read it."""
        held = self._connect(receive_bytes=2048)
        held.sendall(self._request("stream_sample", max_tokens=200))
        held.recv(64)
        self._hold(held)

    def _reset_poll(self) -> None:
        """Polls for a result and resets the connection."""
        with closing(self._connect()) as connection:
            connection.sendall(self._request("asample", max_tokens=40))
            answer = b""
            # The response arrives in one or two pieces; its head has no braces.
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            answer = answer.partition(b"\r\n\r\n")[2]
        poll = self._connect()
        body = json.dumps({"request_id": json.loads(answer)["request_id"]}).encode()
        poll.sendall(self._head("retrieve_future", len(body)) + body)
        time.sleep(self._rng.uniform(0.0, 0.1))
        # SO_LINGER with zero seconds sends a reset.
        poll.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        poll.close()

    def _wrong_key(self) -> None:
        """Sends a wrong key, which must give 401."""
        request = urllib.request.Request(
            f"{self._url}/api/v1/training_runs", headers={"X-API-Key": "tml-wrong"}
        )
        try:
            urllib.request.urlopen(request, timeout=30)
        except urllib.error.HTTPError as refused:
            if refused.code != 401:
                raise
        else:
            raise AssertionError("the server accepted a wrong key")

    def _connect(self, *, receive_bytes: int = 0) -> socket.socket:
        made = socket.socket()
        if receive_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(30)
        made.connect(self._address)
        return made

    def _request(self, route: str, *, max_tokens: int) -> bytes:
        body = json.dumps(
            {
                "base_model": self._base,
                "prompt": {"chunks": [{"tokens": [21, 22, 23]}]},
                "num_samples": 4,
                "sampling_params": {"max_tokens": max_tokens, "stop": []},
            }
        ).encode()
        return self._head(route, len(body)) + body

    def _head(self, route: str, length: int) -> bytes:
        return (
            f"POST /api/v1/{route} HTTP/1.1\r\nHost: a\r\nX-API-Key: {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    def _hold(self, held: socket.socket) -> None:
        self._held.append((time.monotonic() + self._rng.uniform(0, MAX_HELD_S), held))

    def _release_expired(self) -> None:
        now_s = time.monotonic()
        for until_s, held in self._held:
            if until_s <= now_s:
                held.close()
        self._held = [one for one in self._held if one[0] > now_s]
