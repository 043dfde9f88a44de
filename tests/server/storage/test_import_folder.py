"""`tinkex import`: runs and checkpoints of a data folder of an earlier version."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import tinkex
from serving import serving
from tinkex import types
from tinkex.server.folder_lock import lock_folder
from tinkex.server.maintenance import import_folder as importing
from tinkex.server.maintenance.backup import BackupFailed
from tinkex.server.maintenance.import_folder import import_folder
from tinkex.server.registration import name_old_folders
from tinkex.server.settings import Settings, SettingsError
from tinkex.server.store.blobs import Files
from tinkex.server.store.database import Database
from tinkex.server.store.inspection import inspect

FOLDER = Path(__file__).resolve().parents[2] / "data" / "folder-0.1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data=str(tmp_path / "tinkex"))


@pytest.fixture
def old(settings: Settings) -> Path:
    """A data folder of 0.1 where that version kept those of `base_url="local"`."""
    folder = settings.folder / "local" / "default"
    shutil.copytree(FOLDER / "data", folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    # A local server has no keys, so everything belongs to the owner `local`.
    with closing(sqlite3.connect(folder / "tinkex.db")) as connection, connection:
        for table in ("sessions", "models", "checkpoint_versions", "samplers", "requests", "usage"):
            connection.execute(f"UPDATE {table} SET owner = 'local'")
    return folder


def counts(settings: Settings) -> dict[str, int]:
    tables = ("sessions", "models", "requests", "checkpoint_names", "snapshots", "usage")
    with closing(sqlite3.connect(settings.folder / "tinkex.db")) as connection:
        return {
            table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in tables
        }


def assert_intact(settings: Settings) -> None:
    """All files are there and match their fingerprints, and no log has a gap."""
    files = Files(settings.storage_url)
    found = inspect(settings.db_url, files, young_s=0, abandoned_s=settings.abandoned_s)
    assert found.refused is None
    assert not found.damage
    assert not found.damaged
    assert not found.log_gaps
    assert found.checked


def test_old_folders_are_named_until_they_are_imported(settings: Settings, old: Path) -> None:
    said: list[str] = []
    name_old_folders(settings, said.append)
    assert [f"tinkex import {old}" in line for line in said] == [True]
    import_folder(settings, old)
    said.clear()
    name_old_folders(settings, said.append)
    assert said == []


def test_everything_is_imported_once(settings: Settings, old: Path) -> None:
    before = {file: file.read_bytes() for file in old.rglob("*") if file.is_file()}
    first = import_folder(settings, old)
    assert (first.runs, first.checkpoints, first.missing) == (1, 2, ())
    assert_intact(settings)
    found = counts(settings)
    assert min(found.values()) > 0
    again = import_folder(settings, old)
    assert (again.runs, again.checkpoints) == (0, 0)
    assert counts(settings) == found
    # The source has everything that it had.
    for file, content in before.items():
        if file.name not in ("server.lock", "tinkex.db-shm"):
            assert file.read_bytes() == content, file


def test_usage_of_keys_of_another_server_has_no_key_here(settings: Settings, old: Path) -> None:
    file = old / "tinkex.db"
    Database(f"sqlite:///{file}", exclusive=True).close()  # upgrades it
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE requests SET key_id = 3")
        names = "owner, hour, session_id, base_model, what, writer, amount"
        connection.execute(f"INSERT INTO usage ({names}, key_id) SELECT {names}, 3 FROM usage")
        (total,) = connection.execute("SELECT sum(amount) FROM usage").fetchone()
    for _ in range(2):
        import_folder(settings, old)
        with closing(sqlite3.connect(settings.folder / "tinkex.db")) as connection:
            assert connection.execute("SELECT DISTINCT key_id FROM requests").fetchall() == [(0,)]
            found = connection.execute("SELECT sum(amount), max(key_id) FROM usage").fetchone()
        assert found == (total, 0)


def test_an_interrupted_import_can_be_repeated(
    settings: Settings, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = importing.copy_key
    left = [3]

    def fail_later(source: Path, root: Path, key: str) -> bool:
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        return copied(source, root, key)

    monkeypatch.setattr(importing, "copy_key", fail_later)
    with pytest.raises(OSError, match="No space"):
        import_folder(settings, old)
    monkeypatch.setattr(importing, "copy_key", copied)
    assert counts(settings)["models"] == 0
    assert import_folder(settings, old).runs == 1
    assert_intact(settings)
    assert not list(settings.folder.glob(".import-*"))


def test_a_repeated_import_leaves_room_for_new_results_of_a_sampler(
    settings: Settings, old: Path
) -> None:
    import_folder(settings, old)
    # The old server went on: its sampler has one more result.
    with closing(sqlite3.connect(old / "tinkex.db")) as connection, connection:
        connection.execute(
            "INSERT INTO completions (sampling_session_id, clone_id, request_id, at_s) "
            "SELECT sampling_session_id, 0, 'later', 1.0 FROM samplers"
        )
    import_folder(settings, old)
    with closing(sqlite3.connect(settings.folder / "tinkex.db")) as connection:
        rows = connection.execute(
            "SELECT s.events, max(c.position), count(*) FROM samplers s "
            "JOIN completions c USING (sampling_session_id)"
        ).fetchall()
    # The next result gets the position after `events`, which must be free.
    assert rows == [(2, 2, 2)]


def test_folders_in_use_and_other_folders_are_refused(
    settings: Settings, old: Path, tmp_path: Path
) -> None:
    for held in (old, settings.folder):
        with lock_folder(held), pytest.raises(SettingsError, match=f"holds the data folder {held}"):
            import_folder(settings, old)
    with pytest.raises(BackupFailed, match=r"it has no tinkex\.db"):
        import_folder(settings, tmp_path)
    with pytest.raises(BackupFailed, match="is the data folder itself"):
        import_folder(Settings(data=str(old)), old)


@pytest.mark.timeout(120)
def test_imported_paths_work_and_accepted_requests_are_finished(
    settings: Settings, old: Path
) -> None:
    import_folder(settings, old)
    with (
        serving(f"test/tiny={FOLDER / 'model'}", data=settings.folder) as server,
        tinkex.ServiceClient(base_url=server.url) as service,
    ):
        sampler = service.create_sampling_client(model_path=EXPECTED["sampler_path"])
        params = types.SamplingParams(max_tokens=8, temperature=0.7, seed=11)
        prompt = types.ModelInput.from_ints(list(range(40, 48)))
        answer = sampler.sample(prompt, 2, params).result()
        assert [list(one.tokens) for one in answer.sequences] == EXPECTED["sampled"]
        assert service.create_training_client_from_state(EXPECTED["state_path"])
