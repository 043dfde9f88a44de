"""
Builds the documentation as a site: python -m qa.docs_site (`make docs`)

MkDocs loads this file as a hook, too (`hooks` in mkdocs.yml). Pages link to files of the repository
that are outside docs/, such as reports of benchmarks and files for deployments. The hook adds
these files to the site, below repository/, and turns the links into links of the site. So a page
has the same links on a file system, in a browser of repositories, and on the site.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
#: Where the site has the files that are not in docs/.
OUTSIDE = "repository/"
ICON = "src/tinkex/server/console/icon.svg"
#: A link to a file, with its anchor. Images are links, too.
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    files.append(File.generated(config, "assets/icon.svg", abs_src_path=str(ROOT / ICON)))
    waiting = [in_repository(page.src_uri) for page in files.documentation_pages()]
    added: set[str] = set()
    while waiting:
        page = waiting.pop()
        for target in map(in_site, linked_files(page)):
            path = in_repository(target)
            # What does not exist is left to MkDocs, which names the page that links to it.
            new = target.startswith(OUTSIDE) and target not in added
            if new and (ROOT / path).is_file():
                added.add(target)
                files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
                if path.endswith(".md"):
                    waiting.append(path)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    here = in_repository(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def relinked(link: re.Match[str]) -> str:
        target = in_site(resolved(here, link[1]))
        return posixpath.relpath(target, folder or ".") + link[2]

    pieces, end = [], 0
    for code in CODE.finditer(markdown):
        pieces += [LINK.sub(relinked, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, LINK.sub(relinked, markdown[end:])])


def linked_files(page: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    text = CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for link in LINK.finditer(text):
        yield resolved(page, link[1])


def resolved(page: str, link: str) -> str:
    """The file that a link leads to. A folder is its README.md, or that of the folder above."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if not (ROOT / path).is_dir():
        return path
    folders = [PurePosixPath(path), *PurePosixPath(path).parents]
    return next(str(each / "README.md") for each in folders if (ROOT / each / "README.md").exists())


def in_site(path: str) -> str:
    """The place in the site of a file of the repository."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path


def in_repository(src_uri: str) -> str:
    """The file of the repository that is at this place in the site."""
    return src_uri.removeprefix(OUTSIDE) if src_uri.startswith(OUTSIDE) else f"docs/{src_uri}"


def build(target: Path) -> int:
    """Build the site into a folder. A warning is a failure."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(target)]
    # The theme prints an advertisement otherwise.
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    # Not with --quiet: it hides warnings from --strict, too.
    built = subprocess.run(command, cwd=ROOT, env=env, check=False, stderr=subprocess.PIPE)
    if built.returncode:
        sys.stderr.write(built.stderr.decode())
    return built.returncode


if __name__ == "__main__":
    status = build(ROOT / "site")
    if status == 0:
        print("The documentation is built. Open site/index.html in a browser.")
    raise SystemExit(status)
