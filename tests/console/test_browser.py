"""The console in a real browser, on a real server with a tiny model."""

import asyncio
import contextlib
import json
import queue
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import pytest

import tinkex
from chromium import browser_path, chromium
from processes import children, stopped
from server.echo import EchoExecutor
from server.hosting import hosted
from server.tenants import new_key
from serving import TINY, Server, serving
from tinkex import types

pytest.importorskip("playwright")
# Processes of a server and of a browser start once, in the first test.
pytestmark = pytest.mark.timeout(180)
if browser_path() is None:
    pytest.skip("Chromium is not installed (Debian: apt install chromium)", allow_module_level=True)

from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

T = TypeVar("T")

AXE = Path(__file__).parents[1] / "data" / "axe" / "axe.min.js"
FIRST_LOAD_BYTES = 150_000
RUNS = 10_000
MAX_ROW_NODES = 200

SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
#: Turns the direction of the text around, and would turn that of what follows it.
BIDI = "\u202egnp.exe\u202d \u2066admin\u2069"
MEGABYTE = "long " * 200_000
#: The longest name that a server accepts.
LONG = "long " * 3_276
#: Pages, with a text that each shows.
PAGES = {
    "training_runs": "first try",
    "checkpoints": "sampler-1",
    "playground": "Playground",
    "sessions": "console test",
    "samplers": "sampler-1",
    "server": "Memory plan",
    "usage": "Tokens by day",
    "keys": "laptop",
}
WATCH_POLICY = """
document.addEventListener('securitypolicyviolation', (event) => {
  console.error(`violates ${event.violatedDirective}: ${event.blockedURI}`);
});
"""

SET_HIDDEN = """(hidden) => {
  Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
}"""


@dataclass
class World:
    """A server with owners who have keys, and something of everything of one of them."""

    server: Server
    keys: dict[str, str]
    run: str
    #: A run without steps.
    untrained: str
    session: str
    sampler: str
    state: str
    context: BrowserContext
    #: What the console of the browser reported in all pages.
    problems: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url

    def page(self, context: BrowserContext | None = None, **size: int) -> Page:
        page = (context or self.context).new_page()
        if size:
            page.set_viewport_size({"width": size["width"], "height": size["height"]})
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on(
            "console",
            lambda said: self.problems.append(said.text) if "violates" in said.text else None,
        )
        return page


def away(work: Callable[..., T], *arguments: Any) -> T:
    """Run something in another thread: in this one, Playwright's event loop runs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work, *arguments).result(60)


def datum(first: int) -> types.Datum:
    tokens = [first, first + 1, first + 2, first + 3]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0, 1.0, 1.0]},
    )


def train(training: tinkex.TrainingClient, steps: int) -> None:
    for _ in range(steps):
        training.forward_backward([datum(20)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def new_run(service: tinkex.ServiceClient, name: str) -> tinkex.TrainingClient:
    return service.create_lora_training_client(TINY, rank=4, user_metadata={"name": name})


@contextlib.contextmanager
def client(world: "World", owner: str) -> Iterator[tinkex.ServiceClient]:
    service = tinkex.ServiceClient(base_url=world.url, api_key=world.keys[owner])
    try:
        yield service
    finally:
        away(lambda: service.close("success").result())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def world(
    browser: Browser, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    data = tmp_path_factory.mktemp("console")

    keys = {
        "alice": created_key(data, "alice", name="laptop", is_admin=True),
        "bob": created_key(data, "bob"),
        "crowd": created_key(data, "crowd"),
    }
    with serving(f"{TINY}={tiny_model}", data=data) as server:
        context = browser.new_context(reduced_motion="reduce")
        context.add_init_script(WATCH_POLICY)
        made = away(something_of_everything, server.url, keys["alice"])
        found = World(server=server, keys=keys, context=context, **made)
        sign_in(found, found.page(), "alice").close()
        yield found
        context.close()


def created_key(data: Path, owner: str, **options: object) -> str:
    secret: str = away(lambda: asyncio.run(new_key(data, owner, **options)))
    return secret


def something_of_everything(url: str, key: str) -> dict[str, str]:
    with tinkex.ServiceClient(base_url=url, api_key=key, display_name="console test") as service:
        training = service.create_lora_training_client(
            TINY, rank=4, user_metadata={"name": "first try"}
        )
        train(training, 3)
        state = training.save_state("state-1").result().path
        sampler = training.save_weights_for_sampler("sampler-1").result().path
        service.create_sampling_client(model_path=sampler)
        training.save_weights_and_get_sampling_client()
        for name in (SCRIPT, BIDI, LONG):
            untrained = new_run(service, name)
        with pytest.raises(tinkex.RequestFailedError):
            untrained.forward_backward([datum(10_000)], "cross_entropy").result()
        return {
            "run": training.model_id,
            "untrained": untrained.model_id,
            "session": service.holder.session_id or "",
            "sampler": sampler,
            "state": state,
        }


def sign_in(world: World, page: Page, owner: str) -> Page:
    page.goto(world.url)
    page.get_by_label("API key").fill(world.keys[owner])
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Training runs")).to_be_visible()
    return page


@contextlib.contextmanager
def signed_in(world: World, owner: str) -> Iterator[Page]:
    """A page of another browser, with another person's key."""
    browser = world.context.browser
    assert browser is not None
    context = browser.new_context()
    context.add_init_script(WATCH_POLICY)
    try:
        yield sign_in(world, world.page(context), owner)
    finally:
        context.close()


def test_every_page_shows_its_data_and_nothing_is_blocked_or_fails(world: World) -> None:
    page = world.page()
    for path, text in PAGES.items():
        page.goto(f"{world.url}/{path}")
        expect(page.locator("main")).to_contain_text(text)
    for path, text in {
        f"training_runs/{quote(world.run)}": "Gradient norm",
        f"training_runs/{quote(world.run)}?tab=requests": "forward_backward",
        f"training_runs/{quote(world.run)}?tab=checkpoints": "state-1",
        f"sessions/{world.session}": world.run,
        f"checkpoints/{quote(world.run)}/weights%2Fstate-1": "tinker://",
        f"playground?mode=checkpoint&checkpoint={quote(world.sampler, safe='')}": "sampler-1",
        "training_runs/%E0": "Not found",
    }.items():
        page.goto(f"{world.url}/{path}")
        expect(page.locator("main")).to_contain_text(text)
    page.close()
    assert world.problems == []


def test_what_a_sampler_samples_from_is_a_page_that_exists(world: World) -> None:
    page = world.page()
    for what, heading in {"sampler-1": "sampler-1", "unnamed weights of": "first try"}.items():
        page.goto(f"{world.url}/samplers")
        page.get_by_role("link", name=what).click()
        expect(page.get_by_role("heading", name=heading)).to_be_visible()
    page.close()


def test_the_first_load_is_small(world: World) -> None:
    with signed_in(world, "bob") as page:
        expect(page.locator(".live")).to_have_text("Live")
        sizes = page.evaluate(
            "['navigation', 'resource'].flatMap((kind) => performance.getEntriesByType(kind))"
            ".map((one) => [one.name, one.encodedBodySize])"
        )
        total = sum(size for _, size in sizes)
        assert len(sizes) > 8
        assert 20_000 < total < FIRST_LOAD_BYTES, sizes


def points(page: Page) -> int:
    """How many points the large chart has, by what it tells to people who cannot see it."""
    label = page.locator(".chart .plot").get_attribute("aria-label") or ""
    return int(label.rsplit(" ", 2)[-2])


def test_curves_move_while_a_run_goes_on(world: World) -> None:
    page = world.page()
    with client(world, "alice") as service:
        training = away(new_run, service, "moving")
        away(train, training, 1)
        page.goto(training.get_console_url())
        expect(page.locator(".chart .plot")).to_have_attribute(
            "aria-label", "loss of moving, 1 points"
        )
        seen = {points(page)}
        for _ in range(3):
            before = points(page)
            away(train, training, 1)
            page.wait_for_function(
                "(before) => Number(document.querySelector('.chart .plot')"
                ".getAttribute('aria-label').split(' ').at(-2)) > before",
                arg=before,
            )
            seen.add(points(page))
        assert len(seen) == 4
        expect(page.locator(".facts")).to_contain_text("Steps4")
        # A hidden page is disconnected. Then it asks for what follows the steps that it has.
        page.evaluate(SET_HIDDEN, True)
        with page.expect_request("**/console/live?*") as asked:
            page.evaluate(SET_HIDDEN, False)
        assert asked.value.url.endswith("&after=4")
        # In the list, too, and beside another run, with all metrics of both.
        page.goto(f"{world.url}/training_runs?compare={training.model_id},{world.run}")
        expect(page.get_by_role("img", name="grad_norm of 2 runs")).to_be_visible()
        page.get_by_label("Curves").get_by_text("last").wait_for()
        page.locator(".chart .u-over").hover(position={"x": 3, "y": 60})
        expect(page.locator(".legend .where")).to_have_text("step 1")
        row = page.get_by_role("row").filter(has_text="moving")
        expect(row).to_contain_text("running")
        away(train, training, 1)
        expect(row.locator("[role=cell]").nth(5)).to_have_text("5")
        expect(page.locator(".chart .legend .swatch")).to_have_count(2)
    page.close()


def test_a_curve_that_became_long_is_loaded_again(world: World) -> None:
    page = world.page()
    point = {"steps": 1, "time": "2026-01-01T00:00:00Z", "metrics": {"loss": 1.0}}
    long = [{**point, "step": 3 - number} for number in reversed(range(1201))]
    asked: list[str] = []

    def answer(route: Route) -> None:
        asked.append(route.request.url)
        if len(asked) == 1:
            route.fulfill(json={"points": long})
        else:
            route.continue_()

    page.route("**/metrics?points=*", answer)
    page.goto(f"{world.url}/training_runs/{world.run}")
    expect(page.locator(".chart .plot")).to_have_attribute(
        "aria-label", "loss of first try, 3 points"
    )
    assert len(asked) == 2
    page.close()


def test_a_chart_is_saved_as_a_picture_and_a_table_and_can_be_zoomed(world: World) -> None:
    page = world.page()
    page.goto(f"{world.url}/training_runs/{world.run}")
    chart = page.locator(".chart")
    with page.expect_download() as csv:
        chart.get_by_role("button", name="CSV").click()
    lines = Path(csv.value.path()).read_text().splitlines()
    assert lines[0].startswith('run,step,steps,time,"loss"')
    assert len(lines) == 4
    with page.expect_download() as png:
        chart.get_by_role("button", name="PNG").click()
    assert Path(png.value.path()).read_bytes().startswith(b"\x89PNG")
    canvas = chart.locator("canvas")

    def picture() -> str:
        drawn: str = canvas.evaluate("(canvas) => canvas.toDataURL()")
        return drawn

    for outliers in ("with", "without"):
        whole = picture()
        for change in ("Zoom in", "Reset"):
            chart.get_by_role("button", name=change).click()
            page.wait_for_function(
                "([whole, same]) => (document.querySelector('.chart canvas').toDataURL() === whole) === same",
                arg=[whole, change == "Reset"],
            )
        chart.get_by_label("no outliers").set_checked(outliers == "with")
    chart.get_by_label("log", exact=True).check()
    page.wait_for_function(
        "(whole) => document.querySelector('.chart canvas').toDataURL() !== whole", arg=whole
    )
    chart.get_by_label("log", exact=True).uncheck()
    page.close()


def test_the_playground_streams_two_models_side_by_side(world: World) -> None:
    page = world.page()
    page.goto(f"{world.url}/playground?mode=checkpoint&checkpoint={quote(world.sampler, safe='')}")
    page.get_by_role("button", name="Prompt", exact=True).click()
    page.get_by_label("Tokens").fill("300")
    page.get_by_label("Temperature").fill("0")  # at random, the tiny model may end soon
    page.get_by_label("Prompt", exact=True).fill("Once upon a time")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.keyboard.press("Control+Enter")
    growing = page.locator(".answer.busy .token").first
    growing.wait_for()
    answers = page.locator(".side")
    expect(answers).to_have_count(2)
    expect(page.locator(".answer.busy")).to_have_count(0, timeout=30_000)
    for answer in answers.all():
        expect(answer).to_contain_text("mean logprob")
        assert answer.locator(".token").count() > 3
    assert "logprob" in (page.locator(".answer .token").first.get_attribute("title") or "")
    page.close()


def test_the_key_is_in_no_address_and_no_script_reads_the_cookie(world: World) -> None:
    addresses: list[str] = []
    browser = world.context.browser
    assert browser is not None
    context = browser.new_context()
    page = world.page(context)
    page.on("request", lambda request: addresses.append(request.url))
    page.goto(world.url)
    page.get_by_label("API key").fill("tml-wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not known on this server")
    page.get_by_label("API key").fill(world.keys["bob"])
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Training runs")).to_be_visible()
    assert page.evaluate("document.cookie") == ""
    assert not [one for one in addresses if "tml-" in one]
    assert world.keys["bob"] not in page.content()
    (cookie,) = context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    page.goto(f"{world.url}/keys")
    expect(page.get_by_label("API key")).to_be_visible()
    context.close()


def test_usage_is_added_up_by_key(world: World) -> None:
    world.keys["cluster"] = created_key(world.server.data, "bob", name="cluster")
    with client(world, "cluster") as service:
        away(train, away(new_run, service, "of the cluster"), 2)
    page = world.page()
    page.goto(f"{world.url}/usage")
    table = page.locator("section").filter(has=page.get_by_role("heading", name="By key"))
    laptop = table.get_by_role("row").filter(has_text="laptop")
    expect(laptop).to_contain_text(world.keys["alice"][:8])
    cluster = table.get_by_role("row").filter(has_text="cluster")
    expect(cluster).to_contain_text("bob")
    expect(cluster).to_contain_text(TINY)
    page.close()
    # Others see their own keys.
    with signed_in(world, "bob") as page:
        page.goto(f"{world.url}/usage")
        expect(page.get_by_role("row").filter(has_text="cluster")).to_contain_text("6")
        expect(page.get_by_text("laptop")).to_have_count(0)


def test_lists_without_live_events_are_loaded_again(world: World) -> None:
    page = world.page()
    page.clock.install()
    for path in ("checkpoints", "samplers", "sessions", "keys", "usage"):
        page.goto(f"{world.url}/{path}")
        expect(page.locator("main")).to_contain_text(PAGES[path])
        with page.expect_response(lambda one: "/api/v1/" in one.url and one.ok):
            page.clock.fast_forward(61_000)
    page.close()


def test_another_owners_run_is_not_found(world: World) -> None:
    with signed_in(world, "bob") as page:
        # None, or the one that another test made for him.
        own = re.compile("No training runs yet|1 run.*of the cluster")
        expect(page.locator("main")).to_contain_text(own)
        for path in (
            f"training_runs/{world.run}",
            f"sessions/{world.session}",
            f"checkpoints/{quote(world.run)}/weights%2Fstate-1",
        ):
            page.goto(f"{world.url}/{path}")
            expect(page.get_by_role("alert")).to_contain_text("Not found")
            assert "first try" not in page.content()
        live = page.request.get(f"{world.url}/api/v1/console/live?run={world.run}")
        assert live.status == 404


def test_a_revoked_key_signs_its_browsers_out(world: World) -> None:
    world.keys["dave"] = created_key(world.server.data, "dave")
    page = world.page()
    with signed_in(world, "dave") as other:
        # Its row in the page of keys, which an administrator sees.
        page.goto(f"{world.url}/keys")
        row = page.get_by_role("row").filter(has_text="dave")
        row.get_by_role("button", name="Revoke").click()
        page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        expect(row).to_contain_text("revoked")
        # The open page ends by itself.
        expect(other.get_by_label("API key")).to_be_visible(timeout=15_000)
        expect(other.get_by_role("alert")).to_contain_text("revoked")
    page.close()


def test_an_administrator_creates_a_key_that_is_shown_once(world: World) -> None:
    page = world.page()
    page.goto(f"{world.url}/keys")
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Owner", exact=True).fill("erin")
    page.get_by_role("button", name="Create").click()
    secret = page.get_by_role("dialog").locator("code").inner_text()
    assert secret.startswith("tml-")
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("row").filter(has_text="erin")).to_contain_text("active")
    assert secret not in page.content()
    world.keys["erin"] = secret
    with client(world, "erin") as service:
        assert away(service.get_server_capabilities).supported_models
    page.close()


def hostile_answer() -> str:
    """What a model might say; a tiny one does not say it when it is asked to."""
    tops = [{"token": SCRIPT, "logprob": -1.0}]
    events = []
    for part in (SCRIPT, BIDI, MEGABYTE, "the end"):
        logprobs = {"content": [{"token": part, "logprob": -0.5, "top_logprobs": tops}]}
        choice = {"index": 0, "delta": {"content": part}, "logprobs": logprobs}
        events.append(f"data: {json.dumps({'choices': [choice]})}\n\n")
    return "".join(events)


def test_hostile_names_and_samples_are_shown_as_text(world: World) -> None:
    page = world.page()
    page.goto(f"{world.url}/training_runs")
    expect(page.get_by_role("link", name="<script>window.hacked")).to_be_visible()
    bidi = page.get_by_role("link", name="gnp.exe")
    assert bidi.inner_text().startswith(r"\u202egnp.exe"), "the character is shown, not obeyed"
    long = page.get_by_role("link", name="long long long")
    assert len(long.inner_text()) < 200
    page.get_by_role("link", name="<script>window.hacked").click()
    expect(page.get_by_role("heading", name="<script>window.hacked")).to_be_visible()

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=hostile_answer())

    page.route("**/v1/chat/completions", answer)
    page.goto(f"{world.url}/playground")
    page.get_by_role("button", name="Chat").click()
    page.get_by_label("Message").fill(SCRIPT)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer").first).to_contain_text("the end")
    expect(page.locator(".answer").first).to_contain_text("<script>window.hacked")
    expect(page.locator(".question")).to_contain_text("<script>window.hacked")
    assert page.locator("main script, main img").count() == 0
    assert page.evaluate("window.hacked") is None
    page.close()


def test_a_checkpoint_is_downloaded_published_kept_for_a_while_and_deleted(world: World) -> None:
    with client(world, "alice") as service:
        training = away(new_run, service, "saved")
        saved = away(lambda: training.save_weights_for_sampler("short-lived").result())
        page = world.page()
        page.goto(saved.get_console_url())
        with page.expect_download() as download:
            page.get_by_role("link", name="Download").click()
        assert download.value.suggested_filename.endswith(".tar")
        page.get_by_role("button", name="Publish…").click()
        page.get_by_role("dialog").get_by_role("button", name="Publish").click()
        expect(page.get_by_role("button", name="Unpublish")).to_be_visible()
        page.get_by_label("Expires in").fill("2")
        page.get_by_role("button", name="Set").click()
        expect(page.locator(".facts")).to_contain_text("in 1 d 23 h")
        page.get_by_role("button", name="Delete…").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("cannot be undone")
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        expect(page.get_by_role("button", name="Delete…")).to_be_visible()
        page.get_by_role("button", name="Delete…").click()
        dialog.get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("button", name="Delete…")).to_be_focused()
        page.keyboard.press("Enter")
        dialog.get_by_role("button", name="Delete").click()
        expect(page.get_by_role("alert")).to_contain_text("Not found")
        page.close()


def test_the_checkpoints_of_a_run_show_a_change(world: World) -> None:
    page = world.page()
    page.goto(f"{world.url}/training_runs/{quote(world.run)}?tab=checkpoints")
    row = page.get_by_role("row").filter(has_text="state-1")
    for change in ("Publish…", "Unpublish"):
        row.get_by_role("button", name="Actions").click()
        page.get_by_role("dialog").get_by_role("button", name=change).click()
        if change == "Publish…":
            confirm = page.get_by_role("dialog", name="Publish this checkpoint?")
            confirm.get_by_role("button", name="Publish").click()
        expect(row.locator(".badge.public")).to_have_count(1 if change == "Publish…" else 0)
        expect(row.get_by_role("button", name="Actions")).to_be_focused()
    page.close()


def test_a_sign_out_that_fails_is_not_shown_as_one(world: World) -> None:
    with signed_in(world, "bob") as page:
        page.route("**/console/sign_out", lambda route: route.abort())
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("alert")).to_contain_text("You are still signed in")
        page.get_by_role("button", name="Try again").click()
        expect(page.get_by_role("heading", name="Training runs")).to_be_visible()


def test_a_playground_that_is_left_samples_nothing_more(world: World) -> None:
    page = world.page()
    page.goto(f"{world.url}/playground")
    page.get_by_role("button", name="Prompt", exact=True).click()
    page.get_by_label("Prompt", exact=True).fill("Once upon a time")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    (web,) = children(world.server.process.pid)
    (engine,) = children(web)
    with stopped(engine):  # the tiny model would be done before the click
        page.keyboard.press("Control+Enter")
        page.locator(".answer.busy").first.wait_for()
        with page.expect_event("requestfailed") as ended:
            page.get_by_role("link", name="Usage").click()
    assert ended.value.url.endswith("/v1/completions")
    page.close()


def test_people_who_use_the_keyboard_reach_everything(world: World) -> None:
    page = world.page()
    page.goto(f"{world.url}/training_runs")
    expect(page.get_by_role("link", name="first try").first).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("/")
    expect(page.get_by_label("Search runs")).to_be_focused()
    page.keyboard.type("first")
    expect(page.get_by_text("1 found")).to_be_visible()
    rows = page.locator(".list-body [data-index]")  # not the one that says that it loads
    expect(rows).to_have_count(1)
    page.locator(".list-body").focus()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("link", name="first try").last).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="first try")).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("c")
    expect(page.get_by_role("heading", name="Checkpoints")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="first try")).to_be_visible()
    page.close()


def test_pages_have_no_serious_barrier_and_fit_a_phone(world: World) -> None:
    page = world.page()
    source = AXE.read_text()
    # On a phone, the other colors change the contrast, and nothing else.
    forms: dict[Any, tuple[int, int, dict[str, Any]]] = {
        "light": (1280, 720, {}),
        "dark": (390, 844, {"runOnly": ["color-contrast"]}),
    }
    found: dict[str, Any] = {}
    for path in [
        *PAGES,
        f"training_runs/{world.run}",
        f"training_runs/{world.untrained}",
        f"checkpoints/{world.run}/weights%2Fstate-1",
    ]:
        page.goto(f"{world.url}/{path}")
        expect(page.locator("main h1")).to_be_visible()
        if path in PAGES:
            expect(page.locator("main")).to_contain_text(PAGES[path])
        page.evaluate(source)
        for scheme, (width, height, rules) in forms.items():
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=scheme)
            expect(page.locator("html")).to_have_attribute("data-theme", scheme)
            options = {"resultTypes": ["violations"], **rules}
            result = page.evaluate("(options) => axe.run(document, options)", options)
            for one in result["violations"]:
                if one["impact"] in ("serious", "critical"):
                    nodes = [node["html"][:200] for node in one["nodes"][:3]]
                    found[f"{path}, {scheme}: {one['id']}"] = nodes
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{path} is {wide} pixels wider than the screen"
    assert found == {}
    page.close()


def test_the_whole_error_of_a_request_can_be_read_on_a_phone(world: World) -> None:
    page = world.page(width=390, height=844)
    page.goto(f"{world.url}/training_runs/{world.untrained}?tab=requests")
    page.get_by_role("button", name="data[0].model_input").click()
    dialog = page.get_by_role("dialog", name="Request 1 failed: forward_backward")
    expect(dialog).to_contain_text("token 10000 at position 0 is outside the vocabulary")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.close()


def test_a_phone_shows_the_names_of_runs(world: World) -> None:
    page = world.page(width=390, height=844)
    page.goto(f"{world.url}/training_runs?search=first")
    name = page.get_by_role("link", name="first try").last
    expect(name).to_be_visible()
    assert name.evaluate("(one) => one.clientWidth >= 120 || one.scrollWidth <= one.clientWidth")
    page.close()


def test_a_list_without_entries_shows_its_whole_text(world: World) -> None:
    page = world.page()
    page.goto(f"{world.url}/training_runs/{world.untrained}")
    expect(page.get_by_text("No steps yet")).to_be_visible()
    hidden = "(body) => body.scrollHeight - body.clientHeight"
    assert page.locator(".list-body").evaluate(hidden) == 0
    page.close()


def add_runs(world: World, owner: str) -> None:
    """As many runs as years of work would leave."""
    now_s = time.time()
    session = "c" * 32
    with contextlib.closing(sqlite3.connect(world.server.data / "tinkex.db", timeout=30)) as rows:
        rows.execute(
            "INSERT INTO sessions (session_id, owner, tags, user_metadata, created_s, seen_s) "
            "VALUES (?, ?, '[]', '{}', ?, ?)",
            (session, owner, now_s, now_s),
        )
        rows.executemany(
            "INSERT INTO models (model_id, owner, session_id, model_seq_id, base_model, lora_config, "
            "optimizer_config, user_metadata, created_s) VALUES (?, ?, ?, ?, ?, ?, '{}', ?, ?)",
            [
                (
                    f"{session}:train:{number}",
                    owner,
                    session,
                    number,
                    TINY,
                    '{"rank": 8}',
                    json.dumps({"name": f"run number {number}"}),
                    now_s - RUNS + number,
                )
                for number in range(RUNS)
            ],
        )
        rows.commit()


def test_ten_thousand_runs_are_a_few_rows_and_one_request_for_a_scroll(world: World) -> None:
    add_runs(world, "crowd")
    with signed_in(world, "crowd") as page:
        asked: list[str] = []
        page.on(
            "request",
            lambda one: (
                asked.append(one.url) if urlsplit(one.url).path == "/api/v1/training_runs" else None
            ),
        )
        expect(page.locator(".page-head")).to_contain_text("10,000 runs")
        expect(page.get_by_role("link", name=f"run number {RUNS - 1}")).to_be_visible()
        rows = page.locator("[role=row]")
        body = page.locator(".list-body")
        asked.clear()
        for index, part in enumerate((0.5, 0.25, 1.0), 1):
            body.evaluate("(box, part) => { box.scrollTop = part * box.scrollHeight; }", part)
            number = min(RUNS - 1, int(part * RUNS))
            expect(
                page.get_by_role("link", name=f"run number {RUNS - 1 - number}", exact=True)
            ).to_be_visible()
            expect(page.locator(".pending")).to_have_count(0)
            assert rows.count() <= MAX_ROW_NODES
            assert len(asked) == index, asked
        page.get_by_label("Search runs").fill("number 1234")
        expect(page.locator(".page-head")).to_contain_text("1 found")


@contextlib.contextmanager
def without_keys(folder: Path) -> Iterator[str]:
    """The address of a server in this process, whose engine is a stand-in."""
    addresses: queue.Queue[str] = queue.Queue()
    over = threading.Event()

    async def serve() -> None:
        async with hosted(EchoExecutor(), folder) as api:
            addresses.put(str(api.http._base_url).rstrip("/"))
            await asyncio.to_thread(over.wait)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: asyncio.run(serve()))
        try:
            yield addresses.get(timeout=30)
        finally:
            over.set()
            running.result(30)


def test_a_server_without_keys_needs_no_sign_in(world: World, tmp_path: Path) -> None:
    with without_keys(tmp_path) as url:
        page = world.page()
        page.goto(f"{url}/keys")
        expect(page.locator("main")).to_contain_text("This server has no keys")
        page.goto(f"{url}/usage")
        expect(page.get_by_role("heading", name="Usage")).to_be_visible()
        expect(page.get_by_role("heading", name="By key")).to_have_count(0)
        # A link of an earlier client.
        page.goto(f"{url}/#/server")
        expect(page.get_by_role("heading", name="Server", exact=True)).to_be_visible()
        page.close()
