"""What a server is told: flags over `TINKEX_*` environment over defaults. Printed without secrets."""

import ipaddress
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from tinkex.server.prices import Prices

MEBIBYTE = 2**20

#: Settings that a key may have its own values of.
LIMITS = ("max_requests", "max_queued_tokens", "max_samples", "max_training")


class SettingsError(ValueError):
    """A setting is missing or wrong: nothing was started."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything `tinkex serve` can be told."""

    #: Models to serve: NAME, FOLDER or NAME=FOLDER.
    models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    #: 0 picks a free one.
    port: int = 8000
    #: Folder of the database, payloads, results and checkpoints.
    data: str = ""
    #: SQLAlchemy URL; empty means SQLite in the data folder.
    db: str = ""
    #: Folder or fsspec URL of payloads and results; empty means the data folder.
    storage: str = ""
    device: str = "auto"
    dtype: str = "auto"
    executor: str = "local"
    #: Threads an engine computes with; 0 leaves the choice to the engine.
    threads: int = 0
    deterministic: bool = False
    #: Memory an engine may take of its device, in gigabytes; 0 is all that is free at start.
    memory_gb: float = 0.0
    #: Of that, for adapters; 0 is what the rest leaves.
    adapter_gb: float = 0.0
    #: Tokens whose keys and values an engine keeps for sampling; 0 sizes them by free memory.
    kv_tokens: int = 0
    #: Most tokens in one pass; 0 is the engine's own limit, or what fits.
    batch_tokens: int = 0
    #: Largest request body as it arrives.
    max_body_bytes: int = 64 * MEBIBYTE
    #: Largest request body after decompression.
    max_decoded_bytes: int = 256 * MEBIBYTE
    #: How long a poll for a result is held. The official client gives up after 45 s.
    long_poll_s: float = 30.0
    #: How long later steps wait for a missing number. The official client retries for 300 s.
    gap_s: float = 360.0
    #: Results up to this size are sent with the first answer, larger ones are announced first.
    metadata_only_bytes: int = 64 * 1024
    #: Clients exchange their key for a token that expires, and send that (SDK 0.18 and newer).
    jwt: bool = False
    #: How long such a token lasts.
    jwt_s: float = 3600.0
    #: How long a session may be silent before its models leave the engine's memory. Nothing is
    #: lost: they come back when the client does.
    session_grace_s: float = 1800.0
    #: Most requests of one owner that are accepted and not finished; 0 is no limit.
    max_requests: int = 0
    #: Most tokens of those requests; 0 is no limit.
    max_queued_tokens: int = 0
    #: Most sequences that one owner has sampled at once; 0 is no limit.
    max_samples: int = 0
    #: Most models of one owner that train at once; 0 is no limit. The others wait their turn.
    max_training: int = 0
    #: How long a stopping server waits for running requests.
    drain_s: float = 10.0
    #: The server's address as clients see it, for links in answers; empty is as they asked.
    public_url: str = ""
    #: How long a link to a file works.
    link_s: float = 900.0
    #: How long a result is kept once it was handed out whole; then it answers 410.
    result_kept_s: float = 3600.0
    #: How long a result is kept that nobody has fetched.
    unfetched_kept_s: float = 24 * 3600.0
    #: A model's state is written down, and the requests before it may go, after so many steps.
    snapshot_steps: int = 200
    #: Or after so many bytes of requests.
    snapshot_bytes: int = 64 * MEBIBYTE
    #: Checkpoints of one kind that a run keeps, the newest; published ones stay. 0 keeps all.
    keep_last: int = 0
    #: How often what may go is deleted; 0 deletes nothing.
    janitor_s: float = 60.0
    #: How old a file must be that nothing refers to before it is taken for left behind.
    orphan_s: float = 3600.0
    #: A session that was silent for so long does not keep files for its samplers any more.
    abandoned_s: float = 7 * 24 * 3600.0
    #: How long telemetry of clients is kept, scrubbed; 0 drops it.
    telemetry_kept_s: float = 7 * 24 * 3600.0
    #: US dollars for a million tokens: BASE=USD or BASE=TRAINING/PREFILL/CACHED/SAMPLED, * for any.
    prices: tuple[str, ...] = ()
    #: US dollars for a gigabyte of checkpoints in a month; 0 is no price.
    price_gb_month: float = 0.0
    #: How long entries of the audit log are kept.
    audit_kept_s: float = 400 * 24 * 3600.0

    @classmethod
    def from_sources(
        cls, flags: Mapping[str, Any], env: Mapping[str, str] = os.environ
    ) -> "Settings":
        """Flags that were given (not None), then `TINKEX_<NAME>`, then defaults; checked."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = f"TINKEX_{field.name.upper()}"
            if flags.get(field.name) is not None:
                values[field.name] = flags[field.name]
            elif field.name == "data" and not env.get(name):
                values["data"] = str(default_data_folder(env))
            elif env.get(name):
                values[field.name] = _parse(name, env[name], type(field.default))
        settings = cls(**values)
        settings.check()
        return settings

    def check(self) -> None:
        """Refuse mixes that cannot work or would not be safe."""
        if not 0 <= self.port <= 65535:
            raise SettingsError(
                f"--port {self.port} is not a port.", hint="Use 1 to 65535, or 0 for a free one."
            )
        if self.executor != "local":
            raise SettingsError(
                f"--executor {self.executor} is not known.", hint="The one form is `local`."
            )
        for name in ("threads", "memory_gb", "adapter_gb", "kv_tokens", "batch_tokens"):
            if (value := getattr(self, name)) < 0:
                raise SettingsError(
                    f"--{name.replace('_', '-')} {value} is negative.",
                    hint="0 lets the engine choose.",
                )
        try:
            Prices.parse(self.prices)
        except ValueError as error:
            raise SettingsError(
                f"{error}.", hint="Give NAME=USD or NAME=TRAINING/PREFILL/CACHED/SAMPLED."
            ) from None
        for name in LIMITS:
            if (value := getattr(self, name)) < 0:
                raise SettingsError(f"{name} {value} is negative.", hint="0 is no limit.")
        for name in ("jwt_s", "session_grace_s"):
            if (value := getattr(self, name)) <= 0:
                raise SettingsError(f"{name} {value} is not a time.", hint="Give seconds above 0.")

    def check_reachable(self, *, has_keys: bool) -> None:
        """A server that everybody can reach, and use, is not started."""
        if not has_keys and not is_loopback(self.host):
            raise SettingsError(
                f"--host {self.host} can be reached from other machines, and this server has no "
                "keys: anybody could train, read and delete.",
                hint=f"Make one first: `tinkex key create --data {self.folder}`. Or use "
                "--host 127.0.0.1, and an SSH tunnel to reach it from elsewhere.",
            )

    @property
    def folder(self) -> Path:
        return Path(self.data).expanduser().absolute()

    @property
    def db_url(self) -> str:
        return self.db or f"sqlite:///{self.folder / 'tinkex.db'}"

    @property
    def storage_url(self) -> str:
        return self.storage or str(self.folder)

    def lines(self) -> Iterator[str]:
        """One line for each setting, for the log; passwords in URLs are left out."""
        for name, value in asdict(self).items():
            shown = _without_password(value) if name in ("db", "storage") else value
            yield f"{name} = {shown!r}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        values["models"] = tuple(values["models"])
        values["prices"] = tuple(values["prices"])
        return cls(**values)


def default_data_folder(env: Mapping[str, str]) -> Path:
    """`$XDG_DATA_HOME/tinkex`, by default `~/.local/share/tinkex`."""
    base = env.get("XDG_DATA_HOME")
    return (Path(base) if base else Path("~/.local/share").expanduser()) / "tinkex"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator or "@" not in rest:
        return url
    credentials, _, place = rest.rpartition("@")
    return f"{scheme}://{credentials.partition(':')[0]}:***@{place}"


def _truth(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return _truth(text)
        if kind is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return kind(text)
    except ValueError:
        raise SettingsError(
            f"{name}={text} is not a {'truth value' if kind is bool else 'number'}.",
            hint=f"Unset {name}, or give {'1 or 0' if kind is bool else 'a number'}.",
        ) from None
