"""All Python blocks of the README and the docs run, page by page from top to bottom."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked_shell import WITH_TOKENIZERS, ForkedShell
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
def shell(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedShell]:
    """
    Runs pages, and the server that they use with `base_url="local"`.

    It serves the tiny model under the name of the embedded one, and runs until the last page is done.
    """
    settings = {
        "TINKEX_LOCAL_DATA": str(tmp_path_factory.mktemp("local")),
        "TINKEX_LOCAL_ARGS": "--threads 1",
        "TINKEX_LOCAL_MODEL": f"HuggingFaceTB/SmolLM2-135M-Instruct={tiny_model}",
    }
    held = attach(LocalSettings.from_env({**os.environ, **settings}))
    with ForkedShell(settings, ROOT, WITH_TOKENIZERS, strict=True) as shell:
        yield shell
    held.release()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_the_page_runs(page: Path, shell: ForkedShell, tmp_path: Path) -> None:
    done = shell.run_program(as_program(page), tmp_path)
    assert done.code == 0, f"{name(page)}\n{done.out}\n{done.err}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_are_valid(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_the_readme_shows_make_demo_and_make_test() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
