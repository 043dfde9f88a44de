"""All Python blocks of the README and the docs run, page by page from top to bottom."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.client.local_server import LocalSettings, attach

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = [page for page in PAGES if BLOCK.search(page.read_text())]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def as_program(page: Path) -> str:
    """The blocks at their own line numbers, so that a traceback points into the page."""
    text = page.read_text()
    program = ""
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        program += "\n" * (line - program.count("\n")) + block.group(1)
    return program


@pytest.fixture(scope="module")
def local(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """
    Settings of the server that pages use with `base_url="local"`.

    It serves the tiny model under the name of the embedded one, and runs until the last page is done.
    """
    settings = {
        "TINKEX_LOCAL_DATA": str(tmp_path_factory.mktemp("local")),
        "TINKEX_LOCAL_ARGS": "--threads 1",
        "TINKEX_LOCAL_MODEL": f"HuggingFaceTB/SmolLM2-135M-Instruct={tiny_model}",
    }
    held = attach(LocalSettings.from_env({**os.environ, **settings}))
    yield settings
    held.release()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_the_page_runs(page: Path, local: dict[str, str], tmp_path: Path) -> None:
    environment = {**os.environ, **local}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", as_program(page)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, f"{name(page)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_are_valid(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_the_readme_shows_make_demo_and_make_test() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
