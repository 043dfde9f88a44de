"""
Fetches the JavaScript libraries of the console, of the documentation and of tests from npm: `make vendor` runs it.

Each folder gets the files, the license of each package, and `packages.json`, which says where each
file comes from and what its SHA-256 is. To use a newer version, change it here and run this again.
"""

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Package:
    """A package of npm, and which of its files are used under which names."""

    name: str
    version: str
    license: str
    files: dict[str, str]


CONSOLE = (
    Package(
        "preact",
        "11.2.0",
        "MIT",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "preact-hooks.js"},
    ),
    Package("htm", "3.1.1", "Apache-2.0", {"dist/htm.mjs": "htm.js"}),
    Package(
        "uplot",
        "1.6.32",
        "MIT",
        {"dist/uPlot.iife.min.js": "uplot.js", "dist/uPlot.min.css": "uplot.css"},
    ),
)
#: For the accessibility test only; not part of the package.
TESTS = (Package("axe-core", "4.14.0", "MPL-2.0", {"axe.min.js": "axe.min.js"}),)
#: For the search of the documentation, when the site is opened from a disk.
DOCS = (Package("iframe-worker", "1.0.4", "MIT", {"shim/index.js": "iframe-worker.js"}),)

#: Browsers find modules by their address, so an import by the name of a package becomes one.
REWRITTEN = {b'from"preact"': b'from"./preact.js"'}


def main() -> None:
    vendor(CONSOLE, ROOT / "src/tinkex/server/console/vendor")
    vendor(TESTS, ROOT / "tests/data/axe")
    vendor(DOCS, ROOT / "docs/assets/vendor")


def vendor(packages: tuple[Package, ...], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    listed = [added(package, folder) for package in packages]
    (folder / "packages.json").write_text(json.dumps(listed, indent=2) + "\n")


def added(package: Package, folder: Path) -> dict[str, object]:
    """Copy the files of a package; its entry in `packages.json`."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            ["npm", "pack", "--silent", f"{package.name}@{package.version}"],
            cwd=scratch,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        unpacked = Path(scratch) / "package"
        files = []
        for source, name in package.files.items():
            content = (unpacked / source).read_bytes()
            entry = {"file": name, "source": source}
            for old, new in REWRITTEN.items():
                if old in content:
                    entry["source_sha256"] = hashlib.sha256(content).hexdigest()
                    content = content.replace(old, new)
            (folder / name).write_bytes(content)
            files.append({**entry, "sha256": hashlib.sha256(content).hexdigest()})
        license_file = f"LICENSE-{package.name}"
        shutil.copyfile(unpacked / "LICENSE", folder / license_file)
    return {
        "name": package.name,
        "version": package.version,
        "license": package.license,
        "license_file": license_file,
        "files": files,
    }


if __name__ == "__main__":
    main()
