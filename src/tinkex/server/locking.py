"""Files that only the holders of some age keys can read. Needs `tinkex[age]`."""

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinkex.wire.errors import UserFailure

MOST_RECIPIENTS = 10


def check_recipients(recipients: Sequence[str]) -> None:
    """Refuse before the work what could not be locked after it."""
    if len(recipients) > MOST_RECIPIENTS:
        raise UserFailure(
            f"age_encryption_recipients has {len(recipients)} keys; {MOST_RECIPIENTS} are allowed."
        )
    if recipients:
        _parsed(recipients)


def lock_files(folder: Path, locked: Path, recipients: Sequence[str]) -> int:
    """Every file of `folder` as NAME.age in `locked`, whole or not at all; bytes of the result."""
    import pyrage  # type: ignore[import-untyped]

    keys = _parsed(recipients)
    part = locked.with_name(f".{locked.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    size_bytes = 0
    try:
        for file in folder.iterdir():
            target = part / f"{file.name}.age"
            pyrage.encrypt_file(str(file), str(target), keys)
            _sync(target)
            size_bytes += target.stat().st_size
        _sync(part)
        part.rename(locked)
        _sync(locked.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return size_bytes


def _parsed(recipients: Sequence[str]) -> list[Any]:
    try:
        import pyrage
    except ImportError:
        raise UserFailure(
            "this server cannot encrypt: pyrage is not installed there. Install tinkex[age] on "
            "the server, or export without age_encryption_recipients."
        ) from None
    keys = []
    for recipient in recipients:
        kind = pyrage.ssh if recipient.startswith("ssh-") else pyrage.x25519
        try:
            keys.append(kind.Recipient.from_str(recipient))
        except pyrage.RecipientError as error:
            raise UserFailure(
                f"age_encryption_recipients has {recipient[:80]!r}, which is no age key ({error}). "
                "Keys begin with age1, or are SSH public keys."
            ) from None
    return keys


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
