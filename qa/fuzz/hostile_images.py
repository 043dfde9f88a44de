"""
Hostile images for the engine's reader: cut, changed, too large, too small, and wrong in their header.

    python -m qa.fuzz.hostile_images COUNT SEED      prints one line of JSON

Each image must be read, or be refused as a user error of one short line. Findings are other errors,
decoders that take long, a process that did not survive, and memory over the limit.
"""

import io
import json
import random
import resource
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from qa.fuzz.mutations import mutate_bytes
from tinkex.engine.images.image_decoder import DecoderLimits
from tinkex.engine.images.image_reader import ImageReader
from tinkex.wire.errors import UserFailure
from tinkex.wire.prompt_chunks import ImageChunk

Format = Literal["png", "jpeg"]
Made = tuple[bytes, Format]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: Small patches and a low bound of pixels, so that thousands of images take a minute.
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 2**18},
}
#: Bytes that an answer may have.
MAX_MESSAGE_CHARS = 500
#: The engine's own memory may grow by this much: the largest image that is read, a few times.
MAX_GROWTH_BYTES = 200 * 2**20
ODD_SIZES = (0, 1, 2, 3, 15, 16, 17, 255, 65_535, 65_536, 10**6, 2**31 - 1, 2**31, 2**32 - 1)


def write_processor(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


# -- files -----------------------------------------------------------------------------------------


def encoded(image: Image.Image, format: Format, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format.upper(), **options)
    return file.getvalue()


def png_chunk(name: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + check


def png(width: int, height: int, *chunks: bytes, depth: int = 8, color: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"".join((SIGNATURE, png_chunk(b"IHDR", header), *chunks, png_chunk(b"IEND", b"")))


def zeros(size: int) -> bytes:
    """Compressed zeros: a thousandth of their size."""
    packer = zlib.compressobj(9)
    part = bytes(2**20)
    packed = [packer.compress(part) for _ in range(size // len(part))]
    return b"".join((*packed, packer.compress(part[: size % len(part)]), packer.flush()))


def jpeg_segment(marker: int, data: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data


def picture(draw: random.Random, mode: str = "RGB") -> Image.Image:
    size = draw.choice([1, 2, 16, 33, 120]), draw.choice([1, 8, 31, 64])
    wide = draw.randbytes(size[0] * size[1] * 4)
    return Image.frombytes("RGBA", size, wide).convert(mode)


# -- hostile ones ----------------------------------------------------------------------------------


def valid(draw: random.Random) -> Made:
    mode = draw.choice(["1", "L", "LA", "P", "RGB", "RGBA"])
    if draw.random() < 0.5:
        return encoded(picture(draw, mode), "png"), "png"
    mode = draw.choice(["L", "RGB", "CMYK", "YCbCr"])
    return encoded(picture(draw, mode), "jpeg", progressive=draw.random() < 0.5), "jpeg"


def truncated(draw: random.Random) -> Made:
    data, format = valid(draw)
    return data[: draw.randrange(len(data))], format


def changed(draw: random.Random) -> Made:
    data, format = valid(draw)
    return mutate_bytes(data, draw), format


def changed_with_right_sums(draw: random.Random) -> Made:
    """A PNG file of chunks with random contents, whose check sums are right."""
    names = [b"PLTE", b"tRNS", b"gAMA", b"cHRM", b"iCCP", b"zTXt", b"iTXt", b"eXIf", b"acTL"]
    names += [b"fcTL", b"fdAT", b"IDAT", b"IEND", b"pHYs", b"sRGB", b"????"]
    parts = []
    for _ in range(draw.randrange(1, 6)):
        length = draw.choice([0, 1, 4, 26, 300])
        data = draw.choice([draw.randbytes(length), zeros(length), b"a\0\0" + zeros(length)])
        parts.append(png_chunk(draw.choice(names), data))
    pixels = png_chunk(b"IDAT", zeros(3 * 8 * 8 + 8))
    parts.insert(draw.randrange(len(parts) + 1), pixels)
    depth, color = draw.choice([1, 2, 4, 8, 16, 3, 255]), draw.choice([0, 2, 3, 4, 6, 7, 255])
    return png(8, 8, *parts, depth=depth, color=color), "png"


def wrong_size(draw: random.Random) -> Made:
    """A header with another size than the data."""
    data, format = valid(draw)
    found = bytearray(data)
    at = 16
    if format == "jpeg":
        at = next(i for i in range(len(data)) if data[i] == 0xFF and data[i + 1] in (0xC0, 0xC2))
        struct.pack_into(">HH", found, at + 5, *(draw.choice(ODD_SIZES) % 65_536 for _ in range(2)))
        return bytes(found), format
    struct.pack_into(">II", found, at, *(draw.choice(ODD_SIZES) for _ in range(2)))
    struct.pack_into(">I", found, 29, zlib.crc32(bytes(found[12:29])))
    return bytes(found), format


def two_sizes(draw: random.Random) -> Made:
    size = draw.choice([(1, 60_000), (9, 9), (2_000, 3_000)])
    return with_second_size(encoded(picture(draw), "jpeg"), *size), "jpeg"


def with_second_size(jpeg: bytes, height: int, width: int) -> bytes:
    """A JPEG file with another frame header, which comes first."""
    size = struct.pack(">BHHB", 8, height, width, 3)
    frame = jpeg_segment(0xC0, size + bytes([1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0]))
    return jpeg[:2] + frame + jpeg[2:]


def bomb(draw: random.Random) -> Made:
    """A small file that becomes large."""
    match draw.randrange(5):
        case 0:  # as many pixels as are allowed
            side = draw.choice([2_000, 5_700])
            return png(side, side, png_chunk(b"IDAT", zeros(side * (side + 1))), color=0), "png"
        case 1:  # more data than pixels
            return png(8, 8, png_chunk(b"IDAT", zeros(100 * 2**20))), "png"
        case 2:  # a text, or a color profile
            name = draw.choice([b"zTXt", b"iCCP"])
            text = png_chunk(name, b"a\0\0" + zeros(200 * 2**20))
            return png(8, 8, text, png_chunk(b"IDAT", zeros(3 * 64 + 8))), "png"
        case 3:  # many texts
            text = png_chunk(b"zTXt", b"a\0\0" + zeros(2**20 - 1))
            return png(8, 8, *[text] * 500, png_chunk(b"IDAT", zeros(3 * 64 + 8))), "png"
        case _:  # more pixels than are allowed
            return png(40_000, 40_000, png_chunk(b"IDAT", zeros(2**20))), "png"


def many_parts(draw: random.Random) -> Made:
    data = encoded(picture(draw), "jpeg")
    match draw.randrange(4):
        case 0:
            return data[:2] + jpeg_segment(0xFE, b"") * draw.choice([500, 5_000, 10**6]) + data[
                2:
            ], ("jpeg")
        case 1:
            return data[:2] + b"\xff" * draw.choice([10, 10**6]) + data[2:], "jpeg"
        case 2:
            return data[:2] + b"\xff\xd0" * draw.choice([10, 10**6]) + data[2:], "jpeg"
        case _:
            return png(8, 8, png_chunk(b"????", b"") * 100_000), "png"


def many_scans(draw: random.Random) -> Made:
    """A progressive JPEG file with scans that repeat: each costs as much as a whole image."""
    return repeated_scans(draw.choice([64, 2_000]), draw.choice([10, 500, 2_000])), "jpeg"


def repeated_scans(side: int, count: int) -> bytes:
    data = encoded(Image.new("RGB", (side, side), (9, 99, 200)), "jpeg", progressive=True)
    return data[:-2] + data[data.rfind(b"\xff\xda") : -2] * count + data[-2:]


def thin(draw: random.Random) -> Made:
    size = draw.choice([(1, 199), (1, 200), (1, 201), (3_000, 1), (200, 1), (65_000, 2)])
    image = Image.new(draw.choice(["RGB", "L"]), size)
    format: Format = draw.choice(["png", "jpeg"])
    return encoded(image, format), format


def odd_mode(draw: random.Random) -> Made:
    mode = draw.choice(["I;16", "P", "LA", "1", "L"])
    image = Image.new(mode, (31, 17), draw.choice([0, 1]))
    options: dict[str, Any] = {}
    if mode in ("P", "L", "1"):
        options["transparency"] = draw.choice([0, 1])
    if draw.random() < 0.3:
        options |= {"save_all": True, "append_images": [image, image]}  # an animation
    return encoded(image, "png", **options), "png"


def tagged(draw: random.Random) -> Made:
    """With EXIF tags: a turn, which is not applied, or nonsense."""
    tags = Image.Exif()
    tags[0x0112] = draw.choice([1, 3, 6, 8, 255])
    exif = tags.tobytes() if draw.random() < 0.5 else b"Exif\0\0" + draw.randbytes(200)
    return encoded(picture(draw), "jpeg", exif=exif, dpi=(draw.choice([0, 72]), 72)), "jpeg"


def other_format(draw: random.Random) -> Made:
    file = io.BytesIO()
    picture(draw).save(file, draw.choice(["GIF", "BMP", "TIFF", "WEBP", "PPM", "PDF"]))
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
    data = draw.choice([file.getvalue(), svg, b"", b"\0", SIGNATURE, b"\xff\xd8", b"\xff\xd8\xff"])
    return data, draw.choice(["png", "jpeg"])


def wrong_format(draw: random.Random) -> Made:
    data, format = valid(draw)
    return data, "png" if format == "jpeg" else "jpeg"


def noise(draw: random.Random) -> Made:
    start = draw.choice([SIGNATURE, b"\xff\xd8\xff\xe0", SIGNATURE + b"\0\0\0\rIHDR"])
    format: Format = "jpeg" if start.startswith(b"\xff") else "png"
    return start + draw.randbytes(draw.choice([10, 500, 20_000])), format


#: Each kind and how often it comes; bombs and scans take the longest.
KINDS: dict[Callable[[random.Random], Made], int] = {
    valid: 10,
    truncated: 15,
    changed: 25,
    changed_with_right_sums: 15,
    wrong_size: 10,
    two_sizes: 3,
    bomb: 2,
    many_parts: 2,
    many_scans: 1,
    thin: 3,
    odd_mode: 5,
    tagged: 5,
    other_format: 5,
    wrong_format: 3,
    noise: 6,
}


def hostile_image(draw: random.Random) -> tuple[str, ImageChunk]:
    """The kind of an image, and the image."""
    kind = draw.choices(list(KINDS), weights=list(KINDS.values()))[0]
    data, format = kind(draw)
    return kind.__name__, ImageChunk(data=data, format=format)


def check(reader: ImageReader, image: ImageChunk) -> tuple[str, str | None]:
    """What became of an image, and what is wrong with that."""
    began_s = time.monotonic()
    wrong = None
    try:
        tokens = reader.count(image)
        (prepared,) = reader.prepare([image])
        outcome = "read"
        if prepared.tokens != tokens:
            wrong = f"counted {tokens} tokens and placed {prepared.tokens}"
    except UserFailure as refusal:
        outcome, text = "refused", str(refusal)
        if len(text) > MAX_MESSAGE_CHARS or not text.isprintable():
            wrong = f"a message of {len(text)} characters: {text[:900]!r}"
    except Exception as error:  # noqa: BLE001  that is a finding
        outcome, wrong = "failed", f"{type(error).__name__}: {error}"
    if (took_s := time.monotonic() - began_s) > 2 * DecoderLimits().wall_s:
        wrong = f"took {took_s:.0f} seconds"
    return outcome, wrong


def fuzz(count: int, seed: int) -> dict[str, Any]:
    """For a process of its own: it measures its memory and that of all its ended children."""
    draw = random.Random(seed)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        reader = ImageReader(write_processor(Path(folder) / "model"))
        good = ImageChunk(data=encoded(Image.new("RGB", (64, 48), (0, 9, 99)), "png"), format="png")
        (before,) = reader.prepare([good])
        first, bytes_before = reader.decoder_pid, resident_bytes()
        for index in range(count):
            kind, image = hostile_image(draw)
            outcome, finding = check(reader, image)
            outcomes[f"{kind} {outcome}"] += 1
            if finding is not None:
                wrong.append(f"image {index} of seed {seed}, {kind}: {finding}")
        grown = resident_bytes() - bytes_before
        (after,) = reader.prepare([good])
        if not (before.patches == after.patches).all():
            wrong.append("a good image has other patches after the hostile ones")
        if reader.decoder_pid != first:
            wrong.append("the process that starts decoders did not survive")
        reader.close()
    # Of all processes that ended, the largest.
    decoder = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    if grown > MAX_GROWTH_BYTES:
        wrong.append(f"the reader grew by {grown} bytes")
    if decoder > DecoderLimits().memory_bytes:
        wrong.append(f"a decoder had {decoder} bytes")
    return {
        "outcomes": dict(sorted(outcomes.items())),
        "grown_mib": grown // 2**20,
        "decoder_mib": decoder // 2**20,
        "wrong": wrong,
    }


def resident_bytes(process: int | str = "self") -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps(fuzz(int(sys.argv[1]), int(sys.argv[2]))))
