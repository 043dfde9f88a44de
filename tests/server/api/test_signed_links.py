"""Signed links and checkpoint names: neither can be turned into access to anything else."""

import asyncio
import io
import tarfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from yarl import URL

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.tenants import new_key, secrets_in, with_key
from tinkex.server.api import downloads
from tinkex.server.api.auth import Signer
from tinkex.server.store.server_secrets import LINKS

pytestmark = pytest.mark.anyio

RUNS = "/api/v1/training_runs"


@dataclass
class Links:
    """Alice's links (an archive, a file of an export, a trace) and a client without a key."""

    nobody: Api
    alice: Api
    bob: Api
    model: str
    session: str
    folder: Path
    all: dict[str, str]


async def location(api: Api, path: str) -> str:
    async with api.http.get(path, allow_redirects=False) as got:
        assert got.status == 302
        return got.headers["Location"]


@pytest.fixture(scope="module")
async def links(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Links]:
    tmp_path = tmp_path_factory.mktemp("links")
    alices, bobs = await new_key(tmp_path, "alice"), await new_key(tmp_path, "bob")
    async with (
        hosted(EchoExecutor(), tmp_path) as nobody,
        with_key(nobody, alices) as alice,
        with_key(nobody, bobs) as bob,
    ):
        session = await alice.session()
        model = await alice.model(session)
        for number, route in enumerate(("save_weights", "save_weights_external"), 1):
            await alice.result(await alice.step(route, model_id=model, seq_id=number, path="a"))
        urls = f"{RUNS}/{model}/checkpoints/external_weights/a/external_weights_urls"
        made = {
            "archive": await location(alice, f"{RUNS}/{model}/checkpoints/weights/a/archive"),
            "file": (await alice.get(urls)).json["urls"]["value"],
            "trace": (await alice.get(f"/api/v1/sessions/{session}/trace_export")).json["url"],
        }
        yield Links(nobody, alice, bob, model, session, tmp_path, made)


async def opened(api: Api, link: str, method: str = "GET") -> int:
    """The URL is sent as it is, without decoding or resolving dots."""
    async with api.http.request(method, URL(link, encoded=True), allow_redirects=False) as got:
        await got.read()
        return got.status


@pytest.mark.parametrize("kind", ["archive", "file", "trace"])
async def test_a_link_works_without_a_key_and_a_changed_link_does_not(
    links: Links, kind: str
) -> None:
    link = links.all[kind]
    assert await opened(links.nobody, link) == 200
    base, _, rest = link.partition("/api/")
    # Any one character of path, expiry and signature.
    for place in range(len(rest)):
        other = "1" if rest[place] != "1" else "2"
        changed = f"{base}/api/{rest[:place]}{other}{rest[place + 1 :]}"
        status = await opened(links.nobody, changed)
        assert status in (401, 403, 404, 422), f"{changed} answered {status}"
    parts = urlsplit(link)
    requested = parse_qs(parts.query)
    expires, signature = requested["expires"][0], requested["signature"][0]
    place = f"{base}{parts.path}"
    for query in (
        "",
        f"expires={expires}",
        f"signature={signature}",
        f"expires={int(expires) + 1}&signature={signature}",
        f"expires={expires}0&signature={signature}",
        f"expires=0{expires}&signature={signature}0",
        f"expires={expires}.0&signature={signature}",
        f"expires=-1&signature={signature}",
        f"expires={expires}&signature=",
        f"expires={expires}&signature={signature.upper()}",
        f"expires={expires}&signature={signature[:-1]}",
        f"expires={expires}&signature={signature}%00",
        f"expires={expires}&signature=%F0%9F%92%A9",
        f"expires=%D9%A1%D9%A2&signature={signature}",
    ):
        status = await opened(links.nobody, f"{place}?{query}")
        assert status in (403, 422), f"{query} answered {status}"


async def test_a_link_is_for_reading_only(links: Links) -> None:
    for link in links.all.values():
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert await opened(links.nobody, link, method) == 405


async def test_a_signature_is_valid_for_one_path_only(links: Links) -> None:
    queries = {kind: link.partition("?")[2] for kind, link in links.all.items()}
    places = {kind: link.partition("?")[0] for kind, link in links.all.items()}
    for kind, place in places.items():
        for other, query in queries.items():
            expected = 200 if kind == other else 403
            assert await opened(links.nobody, f"{place}?{query}") == expected
    # Nor is it valid for a route that needs a key.
    run = f"{places['trace'].partition('/api/')[0]}{RUNS}/{links.model}"
    assert await opened(links.nobody, f"{run}?{queries['archive']}") == 401


async def test_an_expired_link_is_refused(links: Links) -> None:
    base = links.all["archive"].partition("/api/")[0]
    path = urlsplit(links.all["archive"]).path
    assert await opened(links.nobody, f"{base}{path}?{over(links.folder, path)}") == 403
    other = Signer(b"another server's key").sign(path, lasts_s=900)
    assert await opened(links.nobody, f"{base}{path}?{other}") == 403


def over(folder: Path, path: str) -> str:
    """A signature of this server that has expired."""
    query = Signer(secrets_in(folder)[LINKS]).sign(path, lasts_s=-1)
    assert int(parse_qs(query)["expires"][0]) <= time.time()
    return query


async def test_another_owner_gets_no_link(links: Links) -> None:
    for path in (
        f"{RUNS}/{links.model}/checkpoints/weights/a/archive",
        f"{RUNS}/{links.model}/checkpoints/external_weights/a/external_weights_urls",
        f"/api/v1/sessions/{links.session}/trace_export",
    ):
        assert (await links.bob.get(path)).status == 404


#: Path components that would lead out of a folder.
WAYS_OUT = [
    "..",
    "../..",
    "%2e%2e",
    "%2e%2e%2f%2e%2e%2ftokens.key",
    "..%2f..%2ftokens.key",
    "..%5c..%5ctokens.key",
    "%252e%252e%252f",
    "%00",
    "a%00",
    "a%2F..%2Fa",
    "/etc/passwd",
    "%2Fetc%2Fpasswd",
    "%c0%ae%c0%ae",
    "%EF%BC%8E%EF%BC%8E",
    "a%E2%80%AE",
    "C:%5Cwindows",
]


async def test_an_invalid_link_costs_its_owner_nothing(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert links.nobody.app
    context = links.nobody.app.state.context
    read = []
    monkeypatch.setattr(context.store.sessions, "session", read.append)
    async with links.nobody.app.state.report_slots.slot("alice"), asyncio.timeout(10):
        assert await opened(links.nobody, f"{links.all['trace']}0") == 403
    assert read == []


@pytest.mark.parametrize("way", WAYS_OUT)
async def test_no_path_leads_out_of_the_data_folder(links: Links, way: str) -> None:
    base = links.all["archive"].partition("/api/")[0]
    query = links.all["archive"].partition("?")[2]
    for path in (
        f"/api/v1/downloads/{way}/archive.tar?{query}",
        f"/api/v1/downloads/{links.model}/{way}?{query}",
        f"/api/v1/signed/traces/{way}?{query}",
        f"{RUNS}/{links.model}/checkpoints/weights/{way}/archive",
        f"{RUNS}/{way}/checkpoints/weights/a/archive",
        f"{RUNS}/{links.model}/checkpoints/{way}/a/archive",
        f"{RUNS}/{links.model}/checkpoints/weights/{way}",
        f"/api/v1/sessions/{way}",
        f"/api/v1/samplers/{way}",
    ):
        status = await opened(links.alice, f"{base}{path}")
        assert status in (307, 400, 403, 404, 405, 422), f"{path} answered {status}"


#: Names that are refused on any operating system.
BAD_NAMES = [
    *("..", ".", ".hidden", "a/b", "../x", "a\\b", "a\0b", "a\nb", "", "x" * 201, "é" * 101),
    *("a\u202eb", "a\u200bb", "\u2028", "\ufeffa", "/etc/passwd", "..\\x", "\ud800"),
]


def written(folder: Path) -> set[Path]:
    return {file for file in folder.rglob("*") if "checkpoints" in file.parts}


async def test_a_checkpoint_name_that_could_be_a_path_is_refused(links: Links) -> None:
    api, before = links.alice, written(links.folder)
    for name in BAD_NAMES:
        model = await api.model()
        answer = await api.post("save_weights", {"model_id": model, "seq_id": 1, "path": name})
        assert answer.status in (200, 422), f"{name!r}: {answer}"
        if answer.status == 200:
            assert (await api.result(answer.json["request_id"]))["category"] == "user", name
        for path in (f"tinker://{model}/weights/{name}", f"tinker://{name}/weights/a"):
            answer = await api.post("weights_info", {"tinker_path": path})
            assert answer.status in (400, 404, 422), f"{path!r}: {answer}"
    assert written(links.folder) == before


async def test_an_unusual_but_valid_name_can_be_downloaded(links: Links) -> None:
    api = links.alice
    for name in ("a b", "ü", "模型", "a..b", "a.b", "-x", "~", "%2e%2e", "CON"):
        model = await api.model()
        before = written(links.folder)
        await api.result(await api.step("save_weights", model_id=model, seq_id=1, path=name))
        place = URL(f"{RUNS}/{model}/checkpoints/weights") / name / "archive"
        async with api.http.get(place) as got:
            assert got.status == 200
            with tarfile.open(fileobj=io.BytesIO(await got.read())) as archive:
                assert archive.getnames() == ["value"]
        home = links.folder / "checkpoints" / model
        assert all(home in [file, *file.parents] for file in written(links.folder) - before)


def test_an_archive_may_have_files_of_8_gib_and_more(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    with file.open("wb") as sparse:
        sparse.truncate(8**11 + 5)
    ((info, opened),) = downloads._opened([file], 7)
    with opened:
        (head, length), *_ = downloads._tar_parts([(info, opened)])
    assert isinstance(head, bytes)
    assert len(head) == length == tarfile.BLOCKSIZE
    assert tarfile.TarInfo.frombuf(head, "utf-8", "strict").size == 8**11 + 5
