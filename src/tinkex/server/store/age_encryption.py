"""age encryption of exported files; needs `tinkex[age]`."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinkex.durable_files import atomic_folder
from tinkex.wire.errors import UserFailure

MAX_RECIPIENTS = 10


def check_recipients(recipients: Sequence[str]) -> None:
    """Refuse invalid recipients before the export starts."""
    if len(recipients) > MAX_RECIPIENTS:
        raise UserFailure(
            f"age_encryption_recipients has {len(recipients)} keys; {MAX_RECIPIENTS} are allowed."
        )
    if recipients:
        _parse_recipients(recipients)


def encrypt_files(folder: Path, target: Path, recipients: Sequence[str]) -> int:
    """
    Move the files of `folder` to `target`, each encrypted as NAME.age, completely or not at all.

    Returns the size in bytes. `folder` is deleted.
    """
    import pyrage  # type: ignore[import-untyped]

    keys = _parse_recipients(recipients)
    size_bytes = 0
    try:
        with atomic_folder(target) as part:
            for file in folder.iterdir():
                encrypted = part / f"{file.name}.age"
                pyrage.encrypt_file(str(file), str(encrypted), keys)
                size_bytes += encrypted.stat().st_size
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return size_bytes


def _parse_recipients(recipients: Sequence[str]) -> list[Any]:
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
                f"age_encryption_recipients has {recipient[:80]!r}, which is not an age key "
                f"({error}). Keys begin with age1, or are SSH public keys."
            ) from None
    return keys
