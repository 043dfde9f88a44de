"""
Decodes images in another process (`decoder_process`), which it starts with the first image.

Whatever an image does to its decoder, the answer is a `UserFailure` and the next image is decoded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from tinkex.engine.images import decoder_process
from tinkex.engine.images.decoder_process import PIXELS, READY, REFUSED, REQUEST, STATUS
from tinkex.wire.errors import UserFailure

log = logging.getLogger(__name__)

#: Wall-clock time of the start: an interpreter and Pillow.
START_S = 120.0
#: Environment variables that the process gets; the others may hold keys.
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH")
INSTALL = "The operator can run `pip install 'tinkex[images]'`."


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLimits:
    """What one image may take."""

    #: Address space. The largest allowed image needs 0.6 GB.
    memory_bytes: int = 2**30
    #: CPU time. The largest allowed image takes a second; a slow machine needs more.
    cpu_s: int = 5
    #: Wall-clock time, which other programs may make longer.
    wall_s: float = 60


class _Ended(Exception):
    """A process was ended from outside."""


class ImageDecoder:
    """Decodes one image at a time; any thread may call it."""

    def __init__(self, limits: DecoderLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def decode(
        self,
        data: bytes,
        *,
        is_png: bool,
        size: tuple[int, int],
        to: tuple[int, int],
        resample: int,
    ) -> bytes:
        """The RGB pixels of an image, scaled `to` width and height. Raises `UserFailure`."""
        request = REQUEST.pack(is_png, *size, *to, resample, len(data))
        with self._lock:
            for _ in range(2):
                try:
                    return self._answer(request, data, 3 * to[0] * to[1])
                except _Ended:
                    # Short of memory, a machine ends any process: the image is not to blame yet.
                    log.warning("the process that decodes images was ended; a new one starts")
                    self._stop()
        raise UserFailure(
            "the decoder of the image was ended twice, by the machine's lack of memory or by the "
            "image. Scale it down, or send another one."
        )

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _answer(self, request: bytes, data: bytes, expected: int) -> bytes:
        """`_Ended` if the decoder was ended from outside."""
        control = self._started()
        deadline = time.monotonic() + self._limits.wall_s
        ours, theirs = socket.socketpair()
        try:
            with ours:
                with theirs:
                    socket.send_fds(control, [b"\0"], [theirs.fileno()])
                # A decoder that died has closed its end; why, its exit status says.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    _send(ours, request, deadline)
                    _send(ours, data, deadline)
                answer = _receive(ours, expected + 2, deadline)
            said = _receive(control, STATUS.size, deadline)
        except TimeoutError:
            self._stop()
            raise UserFailure(
                f"the image was not decoded in {self._limits.wall_s:g} seconds. Scale it down, or send "
                "another one."
            ) from None
        except OSError:
            said = b""
        status = STATUS.unpack(said)[0] if len(said) == STATUS.size else None
        if status is None or status == -signal.SIGKILL:
            raise _Ended
        if status:
            raise UserFailure(
                f"decoding the image ended its decoder ({self._end_of(status)}). The file is damaged or "
                "made to do this; send another one."
            )
        if answer[:1] == REFUSED:
            reason = answer[1 : 1 + decoder_process.MAX_REASON_CHARS].decode(errors="replace")
            shown = "".join(each if each.isprintable() else "?" for each in reason)
            raise UserFailure(f"the image cannot be decoded: {shown}. Send another file.")
        if answer[:1] != PIXELS or len(answer) != expected + 1:
            raise UserFailure("the image's decoder gave no image. Send another file.")
        return answer[1:]

    def _started(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._stop()
        limits = (str(self._limits.memory_bytes), str(self._limits.cpu_s))
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*(sys.executable, "-P", "-m", decoder_process.__name__), *limits],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                cwd="/",
                # A group of its own, which ends with its forks.
                start_new_session=True,
            )
        self._control = ours
        ours.settimeout(START_S)
        try:
            said = ours.recv(1 + decoder_process.MAX_REASON_CHARS)
        except OSError:
            said = b""
        if said != READY:
            self._stop()
            reason = f"{said[1:].decode(errors='replace')}. {INSTALL}"
            raise UserFailure(
                f"this server cannot read images: {reason if said else 'its decoder ended at once.'}"
            )
        return ours

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _end_of(self, status: int) -> str:
        if status == -signal.SIGXCPU:
            return f"it used more than {self._limits.cpu_s} seconds of CPU time"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"signal {signal.Signals(-status).name}"
        return f"exit status {status}"


def _send(to: socket.socket, data: bytes, deadline: float) -> None:
    to.settimeout(max(0.001, deadline - time.monotonic()))
    to.sendall(data)


def _receive(sender: socket.socket, most: int, deadline: float) -> bytes:
    """Bytes up to the end, or `most` of them."""
    found = bytearray()
    while len(found) < most:
        sender.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            got = sender.recv(min(2**20, most - len(found)))
        except ConnectionResetError:
            break
        if not got:
            break
        found += got
    return bytes(found)
