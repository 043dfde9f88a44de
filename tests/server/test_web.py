"""What the supervisor tells the web process arrives as it was meant."""

import socket
from pathlib import Path

from tinkex.models.resolve import ModelSource, resolve
from tinkex.server import web
from tinkex.server.settings import Settings
from tinkex.server.supervisor import Supervisor


def test_names_and_folders_may_hold_any_sign(tmp_path: Path) -> None:
    sources = [
        ModelSource(name="a=b", folder=Path("/models/a=b")),
        ModelSource(name="org/c", folder=Path("/models/x = y")),
    ]
    with socket.socket() as listening:
        supervisor = Supervisor(Settings(data=str(tmp_path)), sources, listening, [])
        command = supervisor._command(7, 8)
    options = web.parser().parse_args(command[3:])
    assert options.model == [[source.name, str(source.folder)] for source in sources]


def test_a_folder_with_an_equals_sign_is_served_by_its_name(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lr=3"
    folder.symlink_to(tiny_model)
    assert resolve(f"mine={folder}").folder == tiny_model.resolve()
    assert resolve(str(folder)).folder == tiny_model.resolve()
