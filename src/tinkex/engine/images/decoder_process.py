"""
The process that decodes images: python -P -m tinkex.engine.images.decoder_process BYTES SECONDS

It gets one socket, its standard input. For each image arrives a byte with a socket of its own, and a
fork of this process reads the image from there, answers there and exits. So an image that damages
the memory of its decoder damages no other image, and this process never reads foreign bytes.
A fork cannot open files or sockets. The arguments limit its address
space and its CPU time.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as AnyImage

#: Of an image: whether it is a PNG, its width and height, width and height to scale it to, Pillow's
#: filter, and its bytes, which follow.
REQUEST = struct.Struct(">?IIIIII")
#: The first byte of an answer: RGB pixels follow, or the reason why there are none.
PIXELS, REFUSED = b"\0", b"\1"
MAX_REASON_CHARS = 200
#: Exit status of a fork, negative for a signal.
STATUS = struct.Struct(">i")
READY = b"\0"


def main() -> None:
    memory_bytes, cpu_s = map(int, sys.argv[1:])
    control = socket.socket(fileno=sys.stdin.fileno())
    # A service manager sends SIGTERM to all processes at once, while the engine finishes its work.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform != "darwin":  # macOS has no limit of the address space
        _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    try:
        _load()
    except ImportError as error:
        control.sendall(REFUSED + str(error)[:MAX_REASON_CHARS].encode())
        return
    control.sendall(READY)
    while True:
        said, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not said:
            return
        child = os.fork()
        if child == 0:
            control.close()
            # SIGXCPU comes first; the SIGKILL of the higher limit could be the machine's, too.
            _limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
            answer(socket.socket(fileno=descriptors[0]))
            os._exit(0)
        for each in descriptors:
            os.close(each)
        _, status = os.waitpid(child, 0)
        control.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    resource.setrlimit(kind, (soft, soft if hard is None else hard))


def _load() -> None:
    """Imports what decoding needs: a fork cannot open the files of modules."""
    from PIL import Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin

    del JpegImagePlugin, TiffImagePlugin  # JPEG files have tags in the form of TIFF
    # The pixels are limited where their number is read, before this process gets the image.
    Image.MAX_IMAGE_PIXELS = None
    for mode in ("P", "LA", "I;16", "1"):  # what Pillow imports when it is needed first
        file = io.BytesIO()
        Image.new(mode, (2, 2)).save(file, "PNG")
        file.seek(0)
        to_rgb(PngImagePlugin.PngImageFile(file)).resize((4, 4), 3)


def answer(connection: socket.socket) -> None:
    """Reads one image and writes its pixels or the reason why there are none."""
    _limit(resource.RLIMIT_NOFILE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    try:
        is_png, width, height, *rest = REQUEST.unpack(_read(connection, REQUEST.size))
        *to, resample, size = rest
        pixels = decode(_read(connection, size), is_png, (width, height), (to[0], to[1]), resample)
        connection.sendall(PIXELS + pixels)
    except MemoryError:
        _refuse(connection, "it needs more memory than a decoder may have")
    except Exception as error:  # noqa: BLE001  decoders raise errors of any type
        _refuse(connection, str(error) or type(error).__name__)


def _refuse(connection: socket.socket, reason: str) -> None:
    connection.sendall(REFUSED + reason.encode(errors="replace")[:MAX_REASON_CHARS])


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = connection.recv_into(view[at:])
        if not got:
            raise EOFError("the image was not sent whole")
        at += got
    return bytes(data)


def decode(
    data: bytes, is_png: bool, size: tuple[int, int], to: tuple[int, int], resample: int
) -> bytes:
    """The RGB pixels of an image, scaled. A turn that its EXIF tags ask for is not applied."""
    from PIL import Image
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile

    # Not by Image.open, which would try more formats.
    reader = PngImageFile if is_png else JpegImageFile
    try:
        image = reader(io.BytesIO(data))
    except SyntaxError as error:  # Pillow's word for another format
        raise ValueError(str(error)) from None
    if image.size != size:
        raise ValueError(f"it has {image.size} pixels in its data, and {size} in its header")
    return to_rgb(image).resize(to, Image.Resampling(resample)).tobytes()


def to_rgb(image: AnyImage) -> AnyImage:
    """As transformers does: transparent parts show a white background."""
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    background = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(background, image).convert("RGB")


if __name__ == "__main__":
    main()
