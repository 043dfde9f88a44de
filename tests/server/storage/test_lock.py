"""One server for each data folder: a second one says who has it."""

import os
from pathlib import Path

import pytest

from server.storage.commands import tinkex
from serving import TINY, Server
from tinkex.server.run import hold_folder, holder_of
from tinkex.server.settings import SettingsError

pytestmark = pytest.mark.anyio


async def test_a_second_server_is_refused_and_told_who_has_the_folder(
    server: Server, tiny_model: Path
) -> None:
    spec = f"{TINY}={tiny_model}"
    done = await tinkex("serve", spec, "--port", "0", "--data", str(server.data))
    assert done.returncode == 1
    assert done.stdout == ""
    holder = f"another server (process {server.process.pid}) holds the data folder {server.data}"
    assert holder in done.stderr
    assert "hint: Use that one, stop it, or choose another folder" in done.stderr
    repair = await tinkex("doctor", "--repair", "--data", str(server.data))
    assert repair.returncode == 1
    assert holder in repair.stderr


def test_the_folder_is_free_again_however_its_holder_ended(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None
    with hold_folder(tmp_path):
        assert holder_of(tmp_path) == str(os.getpid())
        with (
            pytest.raises(SettingsError, match=f"process {os.getpid()}"),
            hold_folder(tmp_path),
        ):
            pass
    assert holder_of(tmp_path) is None
