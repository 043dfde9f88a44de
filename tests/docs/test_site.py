"""The documentation builds as a site without a warning, and the site needs no other host."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from doc_pages import DOCS, ROOT, blocks
from qa import docs_site

#: Where a browser loads something without being asked.
LOADS = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("img", "srcset"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("object", "data"),
    ("use", "href"),
}


class Loaded(HTMLParser):
    """The addresses of a page that a browser loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in ("canonical", "prev", "next"):
            return  # for search engines
        self.found += [value for name, value in attrs if (tag, name) in LOADS and value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    assert docs_site.build(target) == 0, "run: make docs"
    return target


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in DOCS:
        path = page.relative_to(ROOT / "docs").with_suffix(".html")
        built = site / (path.with_name("index.html") if path.stem == "README" else path)
        assert built.exists(), page


def test_a_page_loads_nothing_from_another_host_and_nothing_that_is_missing(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        parser = Loaded()
        parser.feed(page.read_text())
        assert len(parser.found) > 5
        for address in parser.found:
            assert not re.match(r"(?:\w+:)?//", address), f"{page} loads {address}"
            if page.name != "404.html":  # it is shown in place of any page: links from the root
                file = page.parent / address.partition("#")[0].partition("?")[0]
                assert file.exists(), f"{page} loads {address}"


def test_style_sheets_load_nothing_from_another_host(site: Path) -> None:
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        text = sheet.read_text()
        assert not re.search(r"@import|url\(\s*[\"']?(?:\w+:)?//", text), sheet


def test_files_outside_docs_that_pages_link_to_are_in_the_site(site: Path) -> None:
    assert (site / "repository" / "CONTRIBUTING.html").exists()
    assert (site / "repository" / "deploy" / "nginx" / "tinkex.conf").exists()
    internals = (site / "internals.html").read_text()
    assert 'href="repository/CONTRIBUTING.html"' in internals


def test_the_index_for_the_search_has_the_text_of_pages(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text()
    assert "TINKEX_FIRST_CONTACT_S" in index


def test_a_warning_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small site with the settings of the real one."""
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    settings = settings.replace("[qa/docs_site.py]", "[]").replace("assets/icon.svg", "x.svg")
    (tmp_path / "mkdocs.yml").write_text(settings)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    (tmp_path / "docs" / "index.md").write_text("# A heading\n\n[A link](#another-heading)\n")
    assert docs_site.build(tmp_path / "site") == 1
    (tmp_path / "docs" / "index.md").write_text("# A heading\n\n[A link](#a-heading)\n")
    assert docs_site.build(tmp_path / "site") == 0


def guides() -> list[Path]:
    """The pages that a reader follows: all of "Learn" and "Run a server"."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    sections = {title: pages for section in navigation for title, pages in section.items()}
    found = yaml.safe_dump([sections["Learn"], sections["Run a server"]])
    return [ROOT / "docs" / page for page in re.findall(r"\S+\.md", found)]


@pytest.mark.parametrize("page", guides(), ids=lambda page: page.stem)
def test_a_guide_begins_with_what_the_reader_will_have_and_a_block(page: Path) -> None:
    beginning = page.read_text().partition("\n## ")[0]
    assert "At the end of this page" in beginning.splitlines()[2]
    first = min(block.line for block in blocks(page) if block.language in ("python", "console"))
    assert first < 25


def test_the_home_page_links_to_all_guides_and_references() -> None:
    home = (ROOT / "docs" / "index.md").read_text()
    for page in DOCS:
        name = str(page.relative_to(ROOT / "docs"))
        if name.startswith(("guides/", "reference/")):
            assert f"]({name})" in home, f"docs/index.md has no link to {name}"
