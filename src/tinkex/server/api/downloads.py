"""Checkpoint downloads: signed links that work without a key, and the files that they return."""

import asyncio
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, quote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinkex.server.api.deps import context_of, json_response, readable_checkpoint
from tinkex.server.api.errors import Refusal
from tinkex.server.api.runs_and_checkpoints import CHECKPOINT
from tinkex.server.scheduler.checkpoints import EXTERNAL
from tinkex.server.store import Version
from tinkex.wire.checkpoints import ExternalWeightsUrlsResponse, tinker_path

router = APIRouter(prefix="/api/v1", tags=["downloads"])

ARCHIVE = "archive.tar"
# Needed only to continue training, and twice the size of the weights.
EXCLUDED = frozenset({"optimizer.safetensors"})
PIECE_BYTES = 1024 * 1024


@router.get(f"{CHECKPOINT}/archive", status_code=302)
async def get_archive(request: Request, run: str, kind: str, name: str) -> Response:
    """Redirects to a tar archive of the adapter files."""
    version, _ = await readable_checkpoint(
        request, context_of(request), tinker_path(run, kind, name)
    )
    location, expires = _link(request, version, ARCHIVE)
    # The oldest clients read only this date format.
    headers = {"Location": location, "Expires": format_datetime(expires, usegmt=True)}
    return Response(status_code=302, headers=headers)


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(request: Request, run: str, kind: str, name: str) -> Response:
    """A signed link for each file."""
    context = context_of(request)
    path = tinker_path(run, kind, name)
    version, _ = await readable_checkpoint(request, context, path)
    if version.kind != EXTERNAL:
        raise Refusal(
            400, f"{path} is not an external checkpoint. Save it with save_weights_external."
        )
    folder = await context.store.checkpoints.open(version.version_id)
    names = sorted(await asyncio.to_thread(os.listdir, folder))
    links = {name: _link(request, version, name) for name in names}
    return json_response(
        ExternalWeightsUrlsResponse(
            urls={name: link for name, (link, _) in links.items()},
            expires=min(expires for _, expires in links.values()),
        )
    )


@router.get("/downloads/{version_id}/{file}")
async def download(
    request: Request, version_id: str, file: str, expires: str, signature: str
) -> Response:
    """The file or archive behind a signed link; needs no key."""
    context = context_of(request)
    if not context.signer.verifies(_path(version_id, file), expires, signature):
        raise Refusal(
            403, "this link has expired, or was not made by this server. Request a new one."
        )
    version = await context.store.checkpoints.version(version_id)
    if version is None:
        raise Refusal(
            404, "the checkpoint of this link was deleted. Save it again, or download another one."
        )
    folder = await context.store.checkpoints.open(version_id)
    if file != ARCHIVE:
        return FileResponse(
            f"{folder}/{file}", media_type="application/octet-stream", filename=file
        )
    files = await asyncio.to_thread(_adapter_files, Path(folder))
    members = await asyncio.to_thread(_opened, files, int(version.created_s))
    parts = _tar_parts(members)
    size = sum(length for _, length in parts)
    tag = f'"{version_id}"'
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": tag,
        "Content-Disposition": f'attachment; filename="{version_id}.tar"',
    }
    # A version never changes, so an interrupted download can always be resumed.
    wanted = None
    if request.headers.get("if-range", tag) == tag:
        wanted = _range(request.headers.get("range", ""), size)
    start, stop = wanted or (0, size)
    if start >= size:
        for _, member in members:
            member.close()
        return Response(status_code=416, headers={"Content-Range": f"bytes */{size}"})
    headers["Content-Length"] = str(stop - start)
    if wanted:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return _Archive(
        _pieces(parts, start, stop),
        files=[file for _, file in members],
        status_code=206 if wanted else 200,
        media_type="application/x-tar",
        headers=headers,
    )


class _Archive(StreamingResponse):
    """Closes its files when the response ends, also after an error or a disconnect."""

    def __init__(
        self,
        pieces: Iterator[bytes],
        *,
        files: Sequence[BinaryIO],
        status_code: int,
        media_type: str,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(pieces, status_code=status_code, media_type=media_type, headers=headers)
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            for file in self._files:
                stack.enter_context(file)
            await super().__call__(scope, receive, send)


END_BYTES = 2 * tarfile.BLOCKSIZE
#: Files of a usual archive are smaller: their size has 11 octal digits.
USTAR_BYTES = 8**11

RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")


def _range(header: str, size: int) -> tuple[int, int] | None:
    """Start and end of a single byte range; None (the whole archive) for anything else."""
    found = RANGE.fullmatch(header.strip())
    if found is None:
        return None
    start, last = int(found[1]), int(found[2] or size - 1)
    return None if last < start < size else (start, min(last + 1, size))


def _adapter_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name not in EXCLUDED)


def _opened(files: Sequence[Path], saved_s: int) -> list[tuple[tarfile.TarInfo, BinaryIO]]:
    """Open all files at the start: a checkpoint deleted during the download still arrives whole."""
    members: list[tuple[tarfile.TarInfo, BinaryIO]] = []
    with ExitStack() as stack:
        for file in files:
            opened = stack.enter_context(file.open("rb"))
            info = tarfile.TarInfo(file.name)
            # The time of the save, not of the file, so that the archive is always identical.
            info.size, info.mtime, info.mode = file.stat().st_size, saved_s, 0o644
            members.append((info, opened))
        stack.pop_all()
    return members


Part = tuple[bytes | BinaryIO, int]


def _tar_parts(members: Sequence[tuple[tarfile.TarInfo, BinaryIO]]) -> list[Part]:
    """The parts of the archive, each with its length."""
    parts: list[Part] = []
    for info, file in members:
        # Both forms of a head have one block. The usual one has no room for larger sizes.
        large = info.size >= USTAR_BYTES
        head = info.tobuf(tarfile.GNU_FORMAT if large else tarfile.USTAR_FORMAT)
        fill = bytes(_padded(info.size) - info.size)
        parts += [(head, len(head)), (file, info.size), (fill, len(fill))]
    return [*parts, (bytes(END_BYTES), END_BYTES)]


def _pieces(parts: Sequence[Part], start: int, stop: int) -> Iterator[bytes]:
    """Bytes `start` to `stop` of the archive, with at most one piece in memory."""
    offset = 0
    for part, size in parts:
        first, last = max(start - offset, 0), min(stop - offset, size)
        offset += size
        if first >= last:
            continue
        if isinstance(part, bytes):
            yield part[first:last]
        else:
            part.seek(first)
            while first < last and (piece := part.read(min(PIECE_BYTES, last - first))):
                first += len(piece)
                yield piece


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _path(version_id: str, file: str) -> str:
    return f"/api/v1/downloads/{version_id}/{quote(file)}"


def _link(request: Request, version: Version, file: str) -> tuple[str, datetime]:
    """A signed URL, with the address that this client uses, and its expiry."""
    context = context_of(request)
    path = _path(version.version_id, file)
    query = context.signer.sign(path, lasts_s=context.settings.link_s)
    base = context.settings.public_url.rstrip("/") or str(request.base_url).rstrip("/")
    expires = datetime.fromtimestamp(int(parse_qs(query)["expires"][0]), UTC)
    return f"{base}{path}?{query}", expires
