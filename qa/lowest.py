"""
The client's tests with the oldest releases of its dependencies that pyproject.toml allows.

    python -m qa.lowest [--python PYTHON] [PYTEST ARGUMENT ...]        (`make lowest`)

`make test` runs with the releases of constraints.txt, which are new, so a bound that is too low shows
only here: `>=` is read as `==`. transformers is not installed, because it asks for newer releases of
some of these packages; tests that need it are left out. The environment is in `.cache/lowest`.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from qa.install import run

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".cache" / "lowest"
EXTRAS = ("cli", "tokenizer", "server", "guided", "images", "zstd", "otel", "tensorboard")
#: What tests use themselves, in new releases; torch in the one of constraints.txt.
TOOLS = (
    *("pytest", "pytest-timeout", "pytest-randomly", "pytest-xdist", "anyio", "hypothesis"),
    *("opentelemetry-sdk", "safetensors", "matplotlib", "openai", "pyrage", "torch"),
)
TESTS = ("tests/wire", "tests/client", "tests/data")
#: Tests that need transformers or Jupyter, and the hub's client, whose oldest release needs newer
#: tokenizers than ours.
LEFT_OUT = (
    "tests/client/test_huggingface.py",
    "tests/client/test_notebook.py",
    "tests/client/test_tokenizer.py",
    "tests/client/test_data.py::test_the_tokenizer_of_transformers_gives_the_same",
)


def lowest(requirement: str) -> str | None:
    """`name==version` of the oldest release that a requirement allows."""
    found = re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\d.]+)", requirement)
    return None if found is None else f"{found[1]}=={found[2]}"


def pins() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(one for extra in EXTRAS for one in optional[extra])]
    [torch] = re.findall("^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return [torch, *(pin for one in requirements if (pin := lowest(one)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="for example python3.13")
    options, arguments = parser.parse_known_args()
    python = VENV / "bin" / "python"
    subprocess.run([options.python, "-m", "venv", "--clear", VENV], check=True)
    constraints = VENV / "lowest.txt"
    constraints.write_text("\n".join(pins()) + "\n")
    pip = [str(python), "-m", "pip", "install", "--editable", f".[{','.join(EXTRAS)}]", *TOOLS]
    run("the oldest releases", [*pip, "--constraint", str(constraints)])
    left_out = [f"--deselect={one}" if "::" in one else f"--ignore={one}" for one in LEFT_OUT]
    tests = [str(python), "-m", "pytest", "-n", "2", "-q", *left_out, *(arguments or TESTS)]
    # Old releases of aiohttp leave it to the garbage collector to close some connections.
    tests += [
        "-W",
        "ignore::ResourceWarning",
        "-W",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    ]
    sys.exit(subprocess.run(tests, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
