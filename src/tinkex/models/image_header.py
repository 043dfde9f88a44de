"""
The size of an image, read from the header of its file.

Nothing is decoded here, so any bytes may come. A JPEG file is a list of segments, one of which has
the size; a PNG file begins with it.
"""

from __future__ import annotations

import struct

#: Encoded bytes of one image.
MAX_BYTES = 32 * 2**20
#: Pixels of one image, decoded: 33 million, such as 6,000 x 5,500.
MAX_PIXELS = 2**25
#: Segments of a JPEG file before its size. Cameras write about twenty.
MAX_SEGMENTS = 1_000


class ImageRefused(ValueError):
    """An image that cannot be used, or a model that takes none. The message says what to do."""


_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
#: Length and name of PNG's first chunk, then width and height.
_PNG_HEADER = struct.Struct(">I4sII")
#: Length of a JPEG segment, then, in a frame header: bits, height and width.
_LENGTH = struct.Struct(">H")
_FRAME = struct.Struct(">BHH")
#: Markers of frame headers: all codes C0 to CF, without those of tables and arithmetic coding.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: Markers without a segment.
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_END, _SCAN = 0xD9, 0xDA


def read_size(data: bytes, format: str) -> tuple[int, int]:
    """Height and width in pixels. Raises `ImageRefused` for bytes that are not such an image."""
    if len(data) > MAX_BYTES:
        raise ImageRefused(
            f"the image has {len(data)} bytes; at most {MAX_BYTES} are allowed. Scale it down."
        )
    found = "png" if data.startswith(_PNG) else "jpeg" if data.startswith(_JPEG) else None
    if found != format:
        what = "no PNG or JPEG file" if found is None else f"a {found.upper()} file"
        raise ImageRefused(
            f"the image's format is {format!r}, but its data is {what} (its first bytes are "
            f"{data[:8].hex(' ') or 'missing'}). Send the bytes of a PNG or JPEG file, and its format."
        )
    height, width = _png_size(data) if format == "png" else _jpeg_size(data)
    if not height or not width:
        raise ImageRefused(f"the image has {width} x {height} pixels; it must have at least one.")
    if height * width > MAX_PIXELS:
        raise ImageRefused(
            f"the image has {width} x {height} pixels; at most {MAX_PIXELS} are allowed in all. "
            "Scale it down."
        )
    return height, width


def _png_size(data: bytes) -> tuple[int, int]:
    if len(data) < len(_PNG) + _PNG_HEADER.size:
        raise ImageRefused("the PNG file ends within its header.")
    length, name, width, height = _PNG_HEADER.unpack_from(data, len(_PNG))
    if name != b"IHDR" or length != 13:
        raise ImageRefused("the PNG file does not begin with a header chunk (IHDR).")
    return height, width


def _jpeg_size(data: bytes) -> tuple[int, int]:
    ended = ImageRefused("the JPEG file ends before its size.")
    at = len(_JPEG)
    for _ in range(MAX_SEGMENTS):
        if at >= len(data):
            raise ended
        if data[at] != 0xFF:
            raise ImageRefused(f"the JPEG file has no marker at byte {at}, where one must be.")
        while at < len(data) and data[at] == 0xFF:  # a marker may be preceded by fill bytes
            at += 1
        if at >= len(data):
            raise ended
        marker, at = data[at], at + 1
        if marker in _ALONE:
            continue
        if marker in (_END, _SCAN, 0):
            raise ImageRefused("the JPEG file has no size before its data.")
        if at + _LENGTH.size > len(data):
            raise ended
        (length,) = _LENGTH.unpack_from(data, at)
        if length < _LENGTH.size:
            raise ImageRefused(f"the JPEG file has a segment of {length} bytes at byte {at}.")
        if marker in _FRAMES:
            if at + _LENGTH.size + _FRAME.size > len(data):
                raise ended
            _, height, width = _FRAME.unpack_from(data, at + _LENGTH.size)
            return height, width
        at += length
    raise ImageRefused(f"the JPEG file has no size in its first {MAX_SEGMENTS} segments.")
