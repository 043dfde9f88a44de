"""The console's files: vendored libraries with their sums and licenses, and no markup from text."""

import hashlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "src" / "tinkex" / "server" / "console"
VENDORED = [
    CONSOLE / "vendor",
    ROOT / "tests" / "data" / "axe",
    ROOT / "docs" / "assets" / "vendor",
]
OWN = sorted([*CONSOLE.glob("*.js"), *CONSOLE.glob("*.html"), *CONSOLE.glob("*.css")])


@pytest.mark.parametrize("folder", VENDORED, ids=lambda folder: folder.name)
def test_every_vendored_file_has_its_sum_and_its_license(folder: Path) -> None:
    listed = {"packages.json"}
    for package in json.loads((folder / "packages.json").read_text()):
        assert package["name"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        license_file = folder / package["license_file"]
        assert package["license"].partition("-")[0].lower() in license_file.read_text().lower()
        listed.add(package["license_file"])
        for entry in package["files"]:
            found = hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest()
            assert found == entry["sha256"], f"{entry['file']} is not that of {package['name']}"
            listed.add(entry["file"])
    assert {file.name for file in folder.iterdir()} == listed


def test_text_never_becomes_markup_and_nothing_is_loaded_from_elsewhere() -> None:
    assert len(OWN) > 10
    for file in OWN:
        text = file.read_text()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "dangerouslySet"):
            assert forbidden not in text, file.name
        for forbidden in ("eval(", "new Function", "document.write", "javascript:"):
            assert forbidden not in text, file.name
        elsewhere = re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]{2,}", text)
        assert elsewhere == [], file.name
    index = (CONSOLE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", index) == []
