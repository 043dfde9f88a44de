"""What `make dist` builds: the files, and a server that runs from the wheel alone."""

import re
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

from qa import dist
from serving import TINY, serving

ROOT = dist.ROOT
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGE = ROOT / "src" / "tinkex"

#: Every file of the package that is not a Python module. Those are compared with the source.
OTHER_FILES = set((ROOT / "tests" / "data" / "package-files.txt").read_text().split())
LICENSES = {
    "LICENSE",
    *(f"src/tinkex/server/console/vendor/LICENSE-{name}" for name in ("htm", "preact", "uplot")),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that was built from it."""
    return dist.build(tmp_path_factory.mktemp("dist"))


def modules() -> set[str]:
    """The Python modules of the package in this tree."""
    return {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")}


def test_the_wheel_has_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    assert [sdist.name, wheel.name] == [
        f"tinkex-{VERSION}.tar.gz",
        f"tinkex-{VERSION}-py3-none-any.whl",
    ]
    info = f"tinkex-{VERSION}.dist-info"
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        metadata = packed.read(f"{info}/METADATA").decode()
    assert len(names) == len(set(names))
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt"}
    assert set(names) == {
        *(f"tinkex/{name}" for name in modules() | OTHER_FILES),
        *(f"{info}/{name}" for name in about),
        *(f"{info}/licenses/{name}" for name in LICENSES),
    }
    assert {"server/store/migrations/env.py", "wire/proto/frames_pb2.py"} <= modules()
    assert set(re.findall(r"^License-File: (.+)$", metadata, re.MULTILINE)) == LICENSES
    assert wheel.stat().st_size < 3_000_000


def test_the_source_distribution_has_what_the_wheel_is_built_from(
    built: tuple[Path, Path],
) -> None:
    sdist, _ = built
    with tarfile.open(sdist) as packed:
        members = packed.getmembers()
    assert all(member.isfile() for member in members)
    top = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
    assert {member.name.partition("/")[2] for member in members} == {
        *(f"src/tinkex/{name}" for name in modules() | OTHER_FILES),
        *top,
    }


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    The Python of an environment with the wheel. What it depends on comes from this one.

    A folder that a `.pth` file adds is searched for packages, but its own `.pth` files have no
    effect: so the editable tinkex of this environment cannot be imported in the other one.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet"]
    arguments = ["install", "--no-index", "--no-deps", "--no-compile", str(built[1])]
    subprocess.run([*pip, *arguments], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    here = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "dependencies.pth").write_text("\n".join(here))
    return python


def test_a_server_runs_from_the_wheel_and_shows_the_console(
    built: tuple[Path, Path], installed: Path, tiny_model: Path, tmp_path: Path
) -> None:
    tinkex = installed.with_name("tinkex")
    said = subprocess.run([tinkex, "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"tinkex, version {VERSION}\n"
    found = (
        "import sys, tinkex.server.web_process as web; print(web.__file__, *sys.path, sep='\\n')"
    )
    where = subprocess.run(
        [installed, "-c", found], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    file, *searched = where.stdout.splitlines()
    assert Path(file).is_relative_to(installed.parents[1])
    assert [path for path in searched if (Path(path) / "tinkex").is_dir()] == [
        str(Path(file).parents[2])
    ]

    data = tmp_path / "data"
    with (
        serving(f"{TINY}={tiny_model}", data=data, python=installed, cwd=tmp_path) as server,
        zipfile.ZipFile(built[1]) as packed,
    ):

        def get(path: str) -> bytes:
            asked = urllib.request.Request(f"{server.url}{path}", headers={"Accept": "text/html"})
            with urllib.request.urlopen(asked, timeout=30) as answer:
                return bytes(answer.read())

        page = get("/")
        assert page == packed.read("tinkex/server/console/index.html")
        shown = re.findall(r'(?:src|href)="(console/[^"]+)"', page.decode())
        assert "console/app.js" in shown
        for path in shown:
            assert get(f"/{path}") == packed.read(f"tinkex/server/{path}")
        sample = [tinkex, "sample", "--base-url", server.url, "--plain", "a", "--max-tokens", "3"]
        subprocess.run(sample, cwd=tmp_path, capture_output=True, check=True)
