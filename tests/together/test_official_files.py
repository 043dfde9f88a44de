"""Downloads of checkpoints with the official SDKs 0.4.1 and 0.36.0."""

from pathlib import Path
from typing import Any

import pytest

from serving import TINY, Server
from together.official_sdk import run_program

PROGRAM = Path(__file__).with_name("files_program.py")

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(120)]


def run(version: str, server: Server, folder: Path) -> dict[str, Any]:
    return run_program(version, PROGRAM, TINY, folder, server=server, timeout_s=100)


def test_the_newest_sdk_exports_and_the_oldest_downloads_an_archive(
    server: Server, tmp_path: Path
) -> None:
    new = run("0.36.0", server, tmp_path)
    assert sorted(new["files"]) == ["adapter_config.json", "adapter_model.safetensors"]
    assert all(new["files"].values())
    assert new["downloaded"][0] == 0, new["downloaded"]
    assert "adapter_model.safetensors" in new["downloaded"][2]
    assert new["copied"].startswith("tinker://")
    assert new["copied"].endswith("/weights/state")
    assert new["loaded"] == TINY
    assert new["kinds"] == ["external", "training"]
    assert new["expires"] == [True]
    assert new["expires_not"] == [False]
    # The server has an export now; the old client can still list checkpoints.
    old = run("0.4.1", server, tmp_path)
    assert sorted(old["sizes"]) == ["adapter_config.json", "adapter_model.safetensors"]
    assert old["sizes"]["adapter_model.safetensors"] > 1000
    assert 0 < old["left_s"] <= 900
    assert old["listed"] >= 2
