"""Clients that hold on to a server without using it: sockets, and half-sent or half-read requests."""

import json
import random
import socket
import struct
import threading
import time
import urllib.request
from contextlib import closing
from urllib.parse import urlsplit

#: How long each of them holds on, at most.
HELD_S = 15.0


class Rude:
    """Does one rude thing after the other, in a thread of its own, until told to stop."""

    def __init__(self, url: str, key: str, base: str, seed: int) -> None:
        place = urlsplit(url)
        self._address = (place.hostname or "", place.port or 80)
        self._url, self._key, self._base = url, key, base
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self._held: list[tuple[float, socket.socket]] = []
        #: How often each was done.
        self.done: dict[str, int] = {}
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(30)
        for _, held in self._held:
            held.close()

    def _run(self) -> None:
        acts = [self._silent, self._half_head, self._half_body, self._slow, self._gone, self._wrong]
        while not self._over.wait(self._rng.uniform(0.5, 1.5)):
            act = self._rng.choice(acts)
            try:
                act()
            except ConnectionError:
                pass  # turned away, as one may be
            except Exception as error:  # noqa: BLE001  told at the end
                self.errors.append(f"{act.__name__}: {type(error).__name__}: {error}")
            name = act.__name__.strip("_")
            self.done[name] = self.done.get(name, 0) + 1
            self._let_go()

    def _silent(self) -> None:
        """A connection that says nothing."""
        self._hold(self._connect())

    def _half_head(self) -> None:
        held = self._connect()
        held.sendall(b"POST /api/v1/asample HTTP/1.1\r\nHost: a\r\n")
        self._hold(held)

    def _half_body(self) -> None:
        held = self._connect()
        held.sendall(self._head("asample", 100_000) + b'{"prompt":')
        self._hold(held)

    def _slow(self) -> None:
        """Asks for a stream and does not read it."""
        held = self._connect(receive_bytes=2048)
        held.sendall(self._asking("stream_sample", most=200))
        held.recv(64)
        self._hold(held)

    def _gone(self) -> None:
        """Asks for a result and is gone, without a goodbye."""
        with closing(self._connect()) as asking:
            asking.sendall(self._asking("asample", most=40))
            answer = b""
            # It comes in one piece or in two, and has no braces before its body.
            while not answer.endswith(b"}"):
                answer += asking.recv(65536)
            answer = answer.partition(b"\r\n\r\n")[2]
        polling = self._connect()
        body = json.dumps({"request_id": json.loads(answer)["request_id"]}).encode()
        polling.sendall(self._head("retrieve_future", len(body)) + body)
        time.sleep(self._rng.uniform(0.0, 0.1))
        # Zero seconds of lingering: the other side gets a reset.
        polling.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        polling.close()

    def _wrong(self) -> None:
        """A key that opens nothing."""
        asked = urllib.request.Request(
            f"{self._url}/api/v1/training_runs", headers={"X-API-Key": "tml-wrong"}
        )
        try:
            urllib.request.urlopen(asked, timeout=30)
        except urllib.error.HTTPError as refused:
            if refused.code != 401:
                raise
        else:
            raise AssertionError("a wrong key was let in")

    def _connect(self, *, receive_bytes: int = 0) -> socket.socket:
        made = socket.socket()
        if receive_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(30)
        made.connect(self._address)
        return made

    def _asking(self, route: str, *, most: int) -> bytes:
        body = json.dumps(
            {
                "base_model": self._base,
                "prompt": {"chunks": [{"tokens": [21, 22, 23]}]},
                "num_samples": 4,
                "sampling_params": {"max_tokens": most, "stop": []},
            }
        ).encode()
        return self._head(route, len(body)) + body

    def _head(self, route: str, length: int) -> bytes:
        return (
            f"POST /api/v1/{route} HTTP/1.1\r\nHost: a\r\nX-API-Key: {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    def _hold(self, held: socket.socket) -> None:
        self._held.append((time.monotonic() + self._rng.uniform(0, HELD_S), held))

    def _let_go(self) -> None:
        now_s = time.monotonic()
        for until_s, held in self._held:
            if until_s <= now_s:
                held.close()
        self._held = [one for one in self._held if one[0] > now_s]
