"""Images of requests: what is counted from the header, and what the child process decodes."""

import contextlib
import io
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from processes import children
from qa.fuzz import hostile_images
from qa.fuzz.hostile_images import encoded, png, png_chunk, zeros
from tinkex.engine.images.decoder_process import READY, REFUSED, REQUEST, STATUS
from tinkex.engine.images.image_decoder import DecoderLimits
from tinkex.engine.images.image_reader import ImageReader
from tinkex.engine.images.prepared_image import PreparedImage
from tinkex.wire.errors import UserFailure
from tinkex.wire.prompt_chunks import ImageChunk
from waiting import until

ROOT = Path(__file__).parents[2]

#: As Qwen publishes them; transformers' names for the two bounds of pixels differ over time.
PUBLISHED = {
    "Qwen2.5-VL": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "Qwen3-VL": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}
#: Height and width. The last is larger than the first model allows after scaling.
SIZES = [
    *((1, 1), (1, 200), (200, 1), (5, 900), (13, 15), (28, 28), (42, 42), (56, 57), (640, 480)),
    *((333, 1000), (768, 1366), (1080, 1920), (2000, 3000), (4096, 4096), (5000, 6000)),
]


def folder_with(folder: Path, processor: Any, name: str = "preprocessor_config.json") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(processor))
    return folder


def chunk(image: Image.Image, format: Any = "png", **options: Any) -> ImageChunk:
    return ImageChunk(data=encoded(image, format, **options), format=format)


def noise(mode: str, width: int, height: int) -> Image.Image:
    values = random.Random(width).randbytes(4 * width * height)
    return Image.frombytes("RGBA", (width, height), values).convert(mode)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageReader]:
    folder = hostile_images.write_processor(tmp_path_factory.mktemp("images") / "model")
    reader = ImageReader(folder)
    yield reader
    reader.close()


def refusal(reader: ImageReader, image: ImageChunk) -> str:
    with pytest.raises(UserFailure) as refused:
        reader.prepare([image])
    return str(refused.value)


# -- as transformers does ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", PUBLISHED)
def test_tokens_are_those_of_the_image_processor(model: str, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    folder = folder_with(tmp_path / "model", PUBLISHED[model])
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    reader = ImageReader(folder)
    for height, width in SIZES:
        expected = processor.get_number_of_image_patches(height, width, {}) // 4
        image = ImageChunk(data=png(width, height), format="png")
        assert reader.count(image) == expected, (height, width)


@pytest.mark.parametrize("model", PUBLISHED)
def test_patches_are_those_of_the_image_processor_bit_for_bit(model: str, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    folder = folder_with(tmp_path / "model", PUBLISHED[model])
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    reader = ImageReader(folder)
    pictures = [
        *(chunk(noise(mode, 90, 61)) for mode in ("RGB", "RGBA", "L", "LA", "P", "1")),
        *(chunk(noise(mode, 61, 300), "jpeg") for mode in ("RGB", "L", "CMYK")),
        chunk(noise("RGB", 300, 200), "jpeg", progressive=True, quality=30),
        chunk(noise("L", 40, 40), transparency=7),
    ]
    try:
        for prepared, picture in zip(reader.prepare(pictures), pictures, strict=True):
            image = Image.open(io.BytesIO(picture.data))
            expected = processor(image, return_tensors="np")
            assert [list(prepared.grid)] == expected["image_grid_thw"].tolist()
            assert prepared.patches.dtype == np.float32
            assert (prepared.patches == expected["pixel_values"]).all()
            assert prepared.tokens == reader.count(picture) == len(prepared.patches) // 4
    finally:
        reader.close()


def test_the_settings_of_transformers_5_are_read_too(tmp_path: Path) -> None:
    """They are in processor_config.json, which goes before the older file."""
    image = ImageChunk(data=png(640, 480), format="png")
    folder = folder_with(tmp_path / "new", PUBLISHED["Qwen2.5-VL"])
    assert ImageReader(folder).count(image) == 391
    new = {"processor_class": "Any", "image_processor": PUBLISHED["Qwen3-VL"]}
    folder_with(folder, new, "processor_config.json")
    assert ImageReader(folder).count(image) == 300
    folder_with(folder, {"processor_class": "Any"}, "processor_config.json")
    assert ImageReader(folder).count(image) == 391


def test_a_turn_in_exif_tags_is_not_applied(reader: ImageReader) -> None:
    tags = Image.Exif()
    tags[0x0112] = 6
    picture = noise("RGB", 64, 32)
    plain, turned = reader.prepare([chunk(picture, "jpeg"), chunk(picture, "jpeg", exif=tags)])
    assert (plain.patches == turned.patches).all()
    assert plain.digest != turned.digest


# -- the header --------------------------------------------------------------------------------------


def test_expected_tokens_are_compared(reader: ImageReader) -> None:
    data = encoded(noise("RGB", 64, 48), "png")
    assert reader.count(ImageChunk(data=data, format="png", expected_tokens=12)) == 12
    wrong = ImageChunk(data=data, format="png", expected_tokens=13)
    with pytest.raises(UserFailure, match=r"expected_tokens is 13.*64 x 48 pixels has 12 tokens"):
        reader.count(wrong)


HEADERS: dict[str, tuple[bytes, str, str]] = {
    "nothing": (b"", "png", "format is 'png', but its data is no PNG or JPEG file.*missing"),
    "a GIF": (b"GIF89a", "png", "its data is no PNG or JPEG file .*47 49 46"),
    "a JPEG as PNG": (b"\xff\xd8\xff\xe0", "png", "format is 'png', but its data is a JPEG file"),
    "a cut PNG": (png(9, 9)[:20], "png", "ends within its header"),
    "a PNG without a header": (
        b"\x89PNG\r\n\x1a\n" + png_chunk(b"CgBI", b"") * 3,
        "png",
        "does not begin with a header chunk",
    ),
    "no pixels": (png(0, 9), "png", "has 0 x 9 pixels; it must have at least one"),
    "too many pixels": (png(2**16, 2**16), "png", "65536 x 65536 pixels; at most 33554432"),
    "too long": (png(9, 9) + bytes(32 * 2**20), "png", "bytes; at most 33554432 are allowed"),
    "too thin": (png(201, 1), "png", "at most 200 times as long"),
    "a cut JPEG": (b"\xff\xd8\xff\xe0\0\x10", "jpeg", "ends before its size"),
    "a JPEG of data": (b"\xff\xd8\xff\xda\0\x02", "jpeg", "has no size before its data"),
    "a JPEG of noise": (b"\xff\xd8\0\1\2\3", "jpeg", "no marker at byte 2"),
    "an empty segment": (b"\xff\xd8\xff\xe0\0\1", "jpeg", "a segment of 1 bytes"),
    "fill bytes": (b"\xff\xd8" + b"\xff" * 10**6, "jpeg", "ends before its size"),
    "many segments": (b"\xff\xd8" + b"\xff\xfe\0\2" * 10**5, "jpeg", "first 1000 segments"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_says_nothing_usable_is_refused(case: str, reader: ImageReader) -> None:
    data, format, message = HEADERS[case]
    before = reader.decoder_pid
    with pytest.raises(UserFailure, match=message):
        reader.count(ImageChunk(data=data, format=format))  # type: ignore[arg-type]
    assert reader.decoder_pid == before


PROCESSORS: dict[str, tuple[Any, str]] = {
    "another processor": ({"image_processor_type": "CLIPImageProcessor"}, "is CLIPImageProcessor"),
    "none": ({}, "image processor is not named; supported is Qwen2VLImageProcessor"),
    "no scaling": ({"do_resize": False}, "has do_resize = false"),
    "patches of nothing": ({"patch_size": 0}, "patch_size = 0; allowed are 1 to 256"),
    "endless pixels": ({"max_pixels": 2**40}, "max_pixels = 1099511627776"),
    "a text": ({"merge_size": "2"}, "merge_size = 2; allowed are"),
    "no deviation": ({"image_std": [1, 0, 1]}, "no deviation of 0"),
    "two colors": ({"image_mean": [0.5, 0.5]}, "image_mean = .*3 finite numbers"),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_a_processor_that_is_not_supported_is_refused(case: str, tmp_path: Path) -> None:
    settings, message = PROCESSORS[case]
    if settings and "image_processor_type" not in settings:
        settings = {"image_processor_type": "Qwen2VLImageProcessor", **settings}
    reader = ImageReader(folder_with(tmp_path / "model", settings))
    with pytest.raises(UserFailure, match=message):
        reader.count(ImageChunk(data=png(9, 9), format="png"))


def test_a_folder_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserFailure, match=r"has no preprocessor_config\.json"):
        ImageReader(tmp_path).count(ImageChunk(data=png(9, 9), format="png"))


# -- the child process -------------------------------------------------------------------------------


def test_damaged_images_are_refused_and_the_next_one_is_read(reader: ImageReader) -> None:
    good = chunk(noise("RGB", 32, 32))
    (first,) = reader.prepare([good])
    before = reader.decoder_pid
    data = encoded(noise("RGB", 99, 99), "jpeg")
    cut = ImageChunk(data=data[: len(data) // 2], format="jpeg")
    assert "cannot be decoded: " in refusal(reader, cut)
    wrong = bytearray(encoded(noise("RGB", 8, 8), "png"))
    struct.pack_into(">I", wrong, 16, 9)
    assert "cannot be decoded: " in refusal(reader, ImageChunk(data=bytes(wrong), format="png"))
    (again,) = reader.prepare([good])
    assert (first.patches == again.patches).all()
    assert reader.decoder_pid == before


def test_a_file_with_two_sizes_is_refused(reader: ImageReader) -> None:
    """The first one was counted; Pillow takes the last one."""
    data = hostile_images.with_second_size(encoded(noise("RGB", 30, 20), "jpeg"), 40, 50)
    assert reader.count(ImageChunk(data=data, format="jpeg")) == 6
    assert "pixels in its data" in refusal(reader, ImageChunk(data=data, format="jpeg"))


def test_memory_is_limited(tmp_path: Path) -> None:
    """The same image is read with a higher limit."""
    folder = hostile_images.write_processor(tmp_path / "model")
    bomb = png(5_000, 5_000, png_chunk(b"IDAT", zeros(5_001 * 5_000)), color=0)
    image = ImageChunk(data=bomb, format="png")
    assert len(bomb) < 30_000
    with contextlib.closing(ImageReader(folder)) as reader:
        (prepared,) = reader.prepare([image])
        assert prepared.grid == (1, 64, 64)
    limits = DecoderLimits(memory_bytes=100 * 2**20)
    with contextlib.closing(ImageReader(folder, limits)) as reader:
        assert "more memory than a decoder may have" in refusal(reader, image)
        assert len(reader.prepare([chunk(noise("RGB", 32, 32))])) == 1


def test_cpu_time_is_limited(tmp_path: Path) -> None:
    """A file of 100 kB that takes as long as dozens of images."""
    data = hostile_images.repeated_scans(3_000, 2_000)
    image = ImageChunk(data=data, format="jpeg")
    folder = hostile_images.write_processor(tmp_path / "model")
    with contextlib.closing(ImageReader(folder, DecoderLimits(cpu_s=1))) as reader:
        assert "more than 1 seconds of CPU time" in refusal(reader, image)
        assert len(reader.prepare([chunk(noise("RGB", 32, 32))])) == 1


def test_a_decoder_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    reader = ImageReader(
        hostile_images.write_processor(tmp_path / "model"), DecoderLimits(wall_s=2)
    )
    good = chunk(noise("RGB", 32, 32))
    try:
        reader.prepare([good])
        pid = reader.decoder_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert "not decoded in 2 seconds" in refusal(reader, good)
        assert len(reader.prepare([good])) == 1
        assert reader.decoder_pid != pid
    finally:
        reader.close()


def test_a_decoder_that_the_machine_ended_is_started_again(reader: ImageReader) -> None:
    good = chunk(noise("RGB", 32, 32))
    (first,) = reader.prepare([good])
    pid = reader.decoder_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    (second,) = reader.prepare([good])
    assert (first.patches == second.patches).all()
    assert reader.decoder_pid not in (None, pid)


def test_a_crash_while_decoding_is_a_failure_of_the_image(reader: ImageReader) -> None:
    slow = ImageChunk(data=hostile_images.repeated_scans(3_000, 2_000), format="jpeg")
    good = chunk(noise("RGB", 32, 32))
    reader.prepare([good])
    pid = reader.decoder_pid
    assert pid is not None
    said: list[str] = []
    asking = threading.Thread(target=lambda: said.append(refusal(reader, slow)))
    asking.start()
    until(lambda: children(pid))
    os.kill(children(pid)[0], signal.SIGSEGV)
    asking.join()
    assert "ended its decoder (signal SIGSEGV)" in said[0]
    assert len(reader.prepare([good])) == 1
    assert reader.decoder_pid == pid


def test_a_decoder_opens_no_files_or_connections() -> None:
    """A program in place of the decoder tries both."""
    program = """
import socket
from tinkex.engine.images import decoder_process

def decode(*_):
    opened = []
    for attempt in (lambda: open("/etc/hostname"), socket.socket, socket.socketpair):
        try:
            opened.append(attempt())
        except OSError as error:
            opened.append(error.strerror)
    raise ValueError(str(opened))

decoder_process.decode = decode
decoder_process.main()
"""
    control, theirs = socket.socketpair()
    with control, theirs:
        limits = (str(2**30), "10")
        command = [sys.executable, "-c", program, *limits]
        process = subprocess.Popen(command, stdin=theirs.fileno())
        theirs.close()
        assert control.recv(1) == READY
        image, theirs = socket.socketpair()
        with image:
            with theirs:
                socket.send_fds(control, [b"\0"], [theirs.fileno()])
            image.sendall(REQUEST.pack(True, 1, 1, 1, 1, 3, 0))
            said = image.makefile("rb").read()
        assert control.recv(STATUS.size) == STATUS.pack(0)
    assert process.wait(20) == 0
    assert said == REFUSED + str(["Too many open files"] * 3).encode()


def test_without_pillow_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "PIL.py").write_text("raise ImportError('there is no Pillow')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reader = ImageReader(hostile_images.write_processor(tmp_path / "model"))
    message = refusal(reader, chunk(noise("RGB", 32, 32)))
    assert "cannot read images: there is no Pillow. The operator can run `pip install" in message
    assert reader.decoder_pid is None


def test_several_threads_may_read_images(reader: ImageReader) -> None:
    pictures = [chunk(noise("RGB", 30 + index, 40)) for index in range(8)]
    found: dict[int, PreparedImage] = {}

    def read(index: int) -> None:
        (found[index],) = reader.prepare([pictures[index]])

    threads = [threading.Thread(target=read, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, prepared in enumerate(reader.prepare(pictures)):
        assert (found[index].patches == prepared.patches).all()


def test_a_closed_reader_leaves_no_process(tmp_path: Path) -> None:
    reader = ImageReader(hostile_images.write_processor(tmp_path / "model"))
    reader.close()
    reader.prepare([chunk(noise("RGB", 32, 32))])
    pid = reader.decoder_pid
    assert pid is not None
    reader.close()
    assert reader.decoder_pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_hostile_images_are_read_or_refused() -> None:
    program = [sys.executable, "-m", hostile_images.__name__, "150", "7"]
    ran = subprocess.run(program, stdout=subprocess.PIPE, cwd=ROOT, check=True)
    found = json.loads(ran.stdout)
    assert not found["wrong"]
    assert sum(count for kind, count in found["outcomes"].items() if "refused" in kind) > 60
    assert sum(count for kind, count in found["outcomes"].items() if "read" in kind) > 20
