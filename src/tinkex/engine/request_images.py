"""Decodes the images of requests, before the requests are admitted.

Decoding takes up to seconds, so a thread of its own calls this, not the one that computes.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import NamedTuple

from tinkex.engine.images.image_reader import ImageReader
from tinkex.engine.images.prepared_image import PreparedImage
from tinkex.engine.input_checks import (
    NONE_PREPARED,
    Limits,
    PreparedImages,
    check_kind,
    check_length,
    digest,
)
from tinkex.models.patch_rules import PatchRules
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import ModelInput
from tinkex.wire.prompt_chunks import EncodedTextChunk, ImageChunk
from tinkex.wire.training import ForwardBackwardInput

#: Tokens of the different images of one request, and of all that are decoded at once. Until their
#: requests are done, their patches are in host memory: 24 KB for a token of Qwen3-VL.
MAX_IMAGE_TOKENS = 1 << 17
#: Less on a machine of which they would take more than this part of the free memory.
HOST_FRACTION = 0.25
#: Images that are decoded at once, at most.
MAX_READERS = 4


def most_tokens(rules: PatchRules, free: int) -> int:
    """How many tokens of images may be decoded at once, with so much free host memory."""
    values = 3 * rules.frames * rules.patch**2
    return max(1, min(MAX_IMAGE_TOKENS, int(HOST_FRACTION * free) // (4 * values * rules.merge**2)))


class NamedInput(NamedTuple):
    #: What errors call it.
    where: str
    model_input: ModelInput


def inputs_of(work: ForwardBackwardInput) -> list[NamedInput]:
    return [
        NamedInput(f"data[{index}].model_input", datum.model_input)
        for index, datum in enumerate(work.data)
    ]


def has_images(inputs: Iterable[NamedInput]) -> bool:
    """Whether there is anything but text, so that a check of kinds may take a while."""
    return any(
        not isinstance(chunk, EncodedTextChunk)
        for each in inputs
        for chunk in each.model_input.chunks
    )


class Holder(NamedTuple):
    """A request, and within whom its images are shared."""

    ticket: int
    owner: str


class DecodedImages:
    """
    Decoded images in host memory, each once for an owner, until the requests that read it are done.

    They have at most `max_tokens`, or belong to one request: the decoding of others waits.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._images: dict[tuple[str, bytes], PreparedImage] = {}
        self._tickets: dict[tuple[str, bytes], set[int]] = {}
        #: Tokens that requests may still add, by their tickets.
        self._promised: dict[int, int] = {}
        #: Requests that wait for room.
        self._line: deque[int] = deque()
        self._changed = threading.Condition()

    @property
    def tokens(self) -> int:
        return sum(image.tokens for image in self._images.values())

    def find(self, holder: Holder, digests: Iterable[bytes]) -> dict[bytes, PreparedImage]:
        """Those that are here, from now on also for this request."""
        with self._changed:
            found = {}
            for each in digests:
                image = self._images.get((holder.owner, each))
                if image is not None:
                    self._tickets[holder.owner, each].add(holder.ticket)
                    found[each] = image
            return found

    def wait_for_room(self, holder: Holder, tokens: int) -> None:
        """
        Waits until so many more tokens fit, or until no request has any that could be done before.

        In the order of the calls: a large request is not passed by small ones for ever.
        """
        with self._changed:
            self._line.append(holder.ticket)
            self._changed.wait_for(
                lambda: self._line[0] == holder.ticket and self._fits(holder, tokens)
            )
            self._line.popleft()
            self._promised[holder.ticket] = tokens
            self._changed.notify_all()

    def _fits(self, holder: Holder, tokens: int) -> bool:
        # Those that wait too may hold images that were here, and cannot be done before this one.
        done_later = self._promised.keys() | set().union(*self._tickets.values())
        taken = self.tokens + sum(self._promised.values())
        return taken + tokens <= self._max_tokens or not done_later - set(self._line)

    def add(self, holder: Holder, image: PreparedImage) -> None:
        with self._changed:
            self._images[holder.owner, image.digest] = image
            tickets = self._tickets.setdefault((holder.owner, image.digest), set())
            tickets.add(holder.ticket)
            if holder.ticket in self._promised:
                self._promised[holder.ticket] -= image.tokens

    def release(self, ticket: int) -> None:
        """When the request is done."""
        with self._changed:
            self._promised.pop(ticket, None)
            for key, tickets in list(self._tickets.items()):
                tickets.discard(ticket)
                if not tickets:
                    del self._tickets[key], self._images[key]
            self._changed.notify_all()


def reader_count(cores: int) -> int:
    """How many images are decoded at once. Other cores compute."""
    return max(1, min(MAX_READERS, cores // 4))


class RequestImages:
    """For several threads: they take turns, image by image."""

    def __init__(
        self, readers: Sequence[ImageReader], limits: Limits, *, max_tokens: int = MAX_IMAGE_TOKENS
    ) -> None:
        """Each reader decodes one image at a time."""
        self._readers, self._limits = readers, limits
        self._free: queue.SimpleQueue[ImageReader] = queue.SimpleQueue()
        for reader in readers:
            self._free.put(reader)
        self._threads = ThreadPoolExecutor(len(readers), "tinkex-images")
        self._max_tokens = max_tokens
        self._decoded = DecodedImages(max_tokens)

    def prepare(self, inputs: Sequence[NamedInput], holder: Holder | None = None) -> PreparedImages:
        """
        The images of a request, each once. Raises `UserFailure`.

        All are counted before the first is decoded: whether a request fits shows in their headers.
        With a `holder`, this waits until there is room for them, which they take until `release`.
        """
        if not has_images(inputs):
            return NONE_PREPARED
        chunks = self._check(inputs)
        if holder is None:
            return {image.digest: image for image in self._decode_all(chunks.values())}
        try:
            return self._prepare(chunks, holder)
        except BaseException:
            self.release(holder.ticket)
            raise

    def release(self, ticket: int) -> None:
        self._decoded.release(ticket)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _prepare(
        self, chunks: Mapping[bytes, tuple[str, ImageChunk]], holder: Holder
    ) -> PreparedImages:
        found = self._decoded.find(holder, chunks)
        missing = {key: each for key, each in chunks.items() if key not in found}
        if missing:
            tokens = sum(self._count(*each) for each in missing.values())
            self._decoded.wait_for_room(holder, tokens)
        for image in self._decode_all(missing.values()):
            found[image.digest] = image
            self._decoded.add(holder, image)
        return found

    def _decode_all(self, chunks: Iterable[tuple[str, ImageChunk]]) -> Iterator[PreparedImage]:
        """
        In their order. Nothing is decoded any longer when this has ended.

        Few at a time, so that images of other requests come between them.
        """
        left = iter(chunks)
        waiting: deque[Future[PreparedImage]] = deque()
        try:
            while True:
                for each in islice(left, len(self._readers) - len(waiting)):
                    waiting.append(self._threads.submit(self._decode, *each))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            wait([each for each in waiting if not each.cancel()])

    def _check(self, inputs: Sequence[NamedInput]) -> dict[bytes, tuple[str, ImageChunk]]:
        """The different images of a request, with what errors call them."""
        found: dict[bytes, tuple[str, ImageChunk]] = {}
        total = 0
        for where, model_input in inputs:
            length = 0
            for position, chunk in enumerate(model_input.chunks):
                check_kind(position, chunk, self._limits, where=where)
                if not isinstance(chunk, ImageChunk):
                    length += chunk.length
                    continue
                name = f"{where}.chunks[{position}]"
                tokens = self._count(name, chunk)
                length += tokens
                key = digest(chunk)
                if key not in found:
                    found[key] = name, chunk
                    total += tokens
            check_length(length, self._limits, where=where)
        if total > self._max_tokens:
            raise UserFailure(
                f"the {len(found)} different images of the request have {total} tokens; at most "
                f"{self._max_tokens} are allowed. Send fewer images in one request."
            )
        return found

    def _count(self, where: str, image: ImageChunk) -> int:
        try:
            return self._readers[0].count(image)
        except UserFailure as failure:
            raise UserFailure(f"{where}: {failure}") from None

    def _decode(self, where: str, image: ImageChunk) -> PreparedImage:
        reader = self._free.get()
        try:
            (found,) = reader.prepare([image])
        except UserFailure as failure:
            raise UserFailure(f"{where}: {failure}") from None
        finally:
            self._free.put(reader)
        return found
