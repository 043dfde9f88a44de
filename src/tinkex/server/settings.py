"""
Settings of the server: options over `TINKEX_*` environment variables over a TOML file over defaults.

They are checked before anything starts, and printed without passwords.
"""

import difflib
import functools
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from tinkex.local.registry import default_data_folder
from tinkex.server.prices import Prices

MEBIBYTE = 2**20
GIGABYTE = 10**9

CONFIG_FILE = "tinkex.toml"
#: Folder in the data folder: what deterministic engines compute with (`engine.numerics`).
NUMERICS = "numerics"
TYPE_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    tuple: "a list of strings",
}
EXAMPLES = {bool: "true", int: "8", float: "1.5", str: '"text"', tuple: '["text"]'}

#: Settings with a fixed set of values.
CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "log_level": ("info", "debug"),
}


class SettingsError(ValueError):
    """A setting is missing or invalid; nothing was started."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of `tinkex serve`. The comments are the text of docs/reference/settings.md."""

    #: Models to serve: NAME, FOLDER or NAME=FOLDER.
    models: tuple[str, ...] = ()
    #: TOML file with settings; by default `tinkex.toml` in the data folder, if that file exists.
    config: str = ""
    #: Address to listen on. An address that other machines can reach requires API keys.
    host: str = "127.0.0.1"
    #: Port to listen on; 0 picks a free one.
    port: int = 8000
    #: Folder of the database, payloads, results and checkpoints.
    data: str = ""
    #: SQLAlchemy URL of the database; empty means SQLite in the data folder.
    db: str = ""
    #: Folder or fsspec URL of payloads and results; empty means the data folder.
    storage: str = ""
    #: Name of a worker, unique in its cluster; empty is the name of the machine and a hash of the data
    #: folder. A second worker of one name replaces the first.
    name: str = ""
    #: How long a worker may be silent before others take over its work.
    takeover_s: float = 15.0
    #: Disk space for local copies of checkpoints and snapshots that are in an object store, in
    #: gigabytes. The least recently used ones are deleted; 0 is no limit.
    cache_gb: float = 50.0
    #: Device of the engines: cpu, cuda, cuda:1, ...; auto is CUDA if available. Several engines take
    #: the devices of a list (`cuda:0,cuda:1`) in turn; with auto, all GPUs.
    device: str = "auto"
    #: Engines of each base model. 0 is one, or one for each device of a list if there is one model.
    replicas: int = 0
    #: GPUs over which each engine divides its model: a model that is too large for one. Each engine
    #: takes so many devices of a list, which then stand for one replica.
    gpus_per_replica: int = 1
    #: With several GPUs for each replica: seconds that one waits for another before the engine ends and
    #: is started again. It must exceed the longest computation.
    rank_timeout_s: float = 300.0
    #: Number format of the base model: auto, float32 or bfloat16.
    dtype: str = "auto"
    #: CPU threads per engine; 0 lets the engine choose.
    threads: int = 0
    #: Identical requests give bit-identical results, at some cost in speed.
    deterministic: bool = False
    #: Continue deterministic runs on another device, number format or version of a library, with
    #: other rounding. Without it, the server does not start.
    accept_changed_numerics: bool = False
    #: Compile no kernels and record no CUDA graphs: a GPU then computes with the code of
    #: transformers, several times slower. Always so in deterministic mode.
    no_compile: bool = False
    #: Continue runs whose base model files have changed, with the new files. Without it, their steps
    #: and samples are refused.
    accept_changed_base: bool = False
    #: Device memory for an engine, in gigabytes; 0 is all free memory of a GPU at start, and on a
    #: CPU the base model and half of the remaining free memory.
    memory_gb: float = 0.0
    #: Part of `memory_gb` for adapters; 0 is what the rest leaves.
    adapter_gb: float = 0.0
    #: Size of the KV cache for sampling, in tokens; 0 sizes it by free memory.
    kv_tokens: int = 0
    #: Maximum tokens in one pass; 0 is 1,024 on a CPU and 8,192 on a GPU, fewer if memory is short,
    #: and always 8,192 in deterministic mode.
    batch_tokens: int = 0
    #: Maximum sequences that an engine samples together; 0 is the engine's own limit.
    max_sequences: int = 0
    #: Reuse the KV cache for prompts of one owner with the same prefix; never in deterministic mode.
    prefix_cache: bool = True
    #: Fraction of an engine's time for training while there is sampling to do too.
    training_share: float = 0.5
    #: Idle sampler adapters that an engine keeps in memory.
    idle_adapters: int = 16
    #: Memory for idle sampler adapters, in gigabytes; 0 is half of the part for adapters.
    idle_adapter_gb: float = 0.0
    #: Host memory for adapters that do not fit on a GPU, in gigabytes; 0 is half of the free memory.
    host_gb: float = 0.0
    #: With several base models, unload an engine that was idle for this long; the next request loads
    #: it again. 0 keeps all loaded.
    engine_idle_s: float = 1800.0
    #: Maximum size of a request body before decompression.
    max_body_bytes: int = 64 * MEBIBYTE
    #: Maximum size of a request body after decompression.
    max_decoded_bytes: int = 256 * MEBIBYTE
    #: Maximum size of any body other than a pass or a sample, before and after decompression.
    max_message_bytes: int = 4 * MEBIBYTE
    #: Memory budget for large request bodies of all owners, from arrival until they are stored; 0 is
    #: no limit. Bodies up to 64 KiB do not count.
    max_arriving_bytes: int = 512 * MEBIBYTE
    #: How long a large body waits for that budget before it gets a 429.
    arriving_wait_s: float = 10.0
    #: How long a poll for a result is held open. The official client gives up after 45 s.
    long_poll_s: float = 30.0
    #: How long a sample continues after its stream broke; a client that reconnects in time loses
    #: nothing.
    stream_grace_s: float = 5.0
    #: How long later steps wait for a missing sequence number. The official client retries for 300 s.
    gap_s: float = 360.0
    #: Results up to this size are sent at once; for larger ones, the first answer has metadata only.
    metadata_only_bytes: int = 64 * 1024
    #: Let clients exchange their key for a token that expires, and send the token (SDK 0.18 and
    #: newer).
    jwt: bool = False
    #: Lifetime of such a token.
    jwt_s: float = 3600.0
    #: How long a session may be silent before its models are unloaded from the engine. Nothing is
    #: lost: they are loaded again when the client returns.
    session_grace_s: float = 1800.0
    #: Maximum unfinished requests of one owner; 0 is no limit.
    max_requests: int = 0
    #: Maximum prompt and example tokens in those requests; 0 is no limit.
    max_queued_tokens: int = 0
    #: Maximum sequences that one owner samples at the same time; 0 is no limit.
    max_samples: int = 0
    #: Maximum models of one owner that train at the same time; 0 is no limit. Others wait.
    max_training: int = 0
    #: Maximum bytes of checkpoints that one owner keeps, unnamed ones included; 0 is no limit. Saves
    #: beyond it fail with the current use and the limit.
    max_checkpoint_bytes: int = 0
    #: Maximum named checkpoints that one owner keeps; 0 is no limit.
    max_checkpoints: int = 0
    #: Maximum training runs that one owner keeps; 0 is no limit. A run counts until its client is
    #: closed and its checkpoints are deleted.
    max_runs: int = 0
    #: Maximum unfinished requests of all owners together; 0 is no limit.
    max_open: int = 20_000
    #: Maximum open connections; further ones get a 503. 0 is no limit.
    max_connections: int = 10_000
    #: Time limit for the request line and headers of a request; 0 is no limit.
    head_s: float = 30.0
    #: Close a connection whose body or answer moves less than 4 KiB in this time; 0 is no limit.
    stall_s: float = 60.0
    #: How long a stopping server waits for running requests.
    drain_s: float = 10.0
    #: The server's URL as clients see it, for links in answers; empty is the URL of each request.
    public_url: str = ""
    #: Lifetime of a link to a file.
    link_s: float = 900.0
    #: How long a result is kept after it was fetched; then polls for it get a 410.
    result_kept_s: float = 3600.0
    #: How long a result that was never fetched is kept.
    unfetched_kept_s: float = 24 * 3600.0
    #: Take a snapshot of a model after this many steps; older requests of its log may then be deleted.
    #: Snapshots above 64 MiB also wait until writing them takes at most 5 % of the time.
    snapshot_steps: int = 200
    #: Or after this many bytes of requests.
    snapshot_bytes: int = 64 * MEBIBYTE
    #: How long the second-newest snapshot and the requests since are kept, in case the newest is
    #: damaged. 0 is until the next cleanup.
    way_back_s: float = 24 * 3600.0
    #: Newest checkpoints of each kind that a run keeps; published ones are never deleted. 0 keeps all.
    keep_last: int = 0
    #: Interval of the cleanup of expired data; 0 disables it.
    janitor_s: float = 60.0
    #: Minimum age of an unreferenced file before the cleanup deletes it.
    orphan_s: float = 3600.0
    #: Free disk space reserved for results, in mebibytes: with less, new requests are refused.
    #: Checkpoints, snapshots and adapters that leave the memory are not written into it.
    reserve_mb: float = 64.0
    #: After this long without contact, a session no longer keeps files for its samplers.
    abandoned_s: float = 7 * 24 * 3600.0
    #: How long telemetry of clients is kept, without secrets; 0 drops it.
    telemetry_kept_s: float = 7 * 24 * 3600.0
    #: US dollars per million tokens: BASE=USD or BASE=TRAINING/PREFILL/CACHED/SAMPLED, * for any.
    prices: tuple[str, ...] = ()
    #: US dollars per gigabyte of checkpoints and month; 0 is no price.
    price_gb_month: float = 0.0
    #: How long entries of the audit log are kept.
    audit_kept_s: float = 400 * 24 * 3600.0
    #: How long the step metrics of a run are kept after its last step, once its session has ended;
    #: then only those of the last step are.
    metrics_kept_s: float = 400 * 24 * 3600.0
    #: Interval of the log line about current work (runs, tokens per second, queue, memory), while
    #: there is any; 0 disables it.
    activity_s: float = 10.0
    #: Level of the log on standard error: info or debug.
    log_level: str = "info"

    @classmethod
    def from_sources(
        cls, flags: Mapping[str, Any], env: Mapping[str, str] = os.environ
    ) -> "Settings":
        """Combine flags (None: not given), `TINKEX_<NAME>` variables, the file and defaults; check all."""
        given = {name: value for name, value in flags.items() if value is not None}
        sources = {}
        for field in fields(cls):
            variable = f"TINKEX_{field.name.upper()}"
            if field.name not in given and (text := env.get(variable)):
                given[field.name] = _parse(variable, text, type(field.default))
                sources[field.name] = variable
        data = str(given.get("data") or default_data_folder(env))
        if file := _config_file(given.get("config"), data):
            given["config"] = str(file)
            for name, (value, source) in _read_file(file, in_data=Path(data)).items():
                if name not in given:
                    given[name], sources[name] = value, source
        given.setdefault("data", data)
        settings = cls(**given)
        settings.check(sources)
        return settings

    def check(self, sources: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raise SettingsError for the first invalid value; `sources` says where values come from."""
        for name, message, hint in self._problems():
            source = f"{sources[name]}: " if name in sources else ""
            raise SettingsError(source + message, hint=hint)

    def _problems(self) -> Iterator[tuple[str, str, str]]:
        """The setting, what was found, and what to do, for each invalid value."""
        if not 0 <= self.port <= 65535:
            hint = "Use 1 to 65535, or 0 for a free one."
            yield "port", f"port {self.port} is not a valid port.", hint
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                hint = f"Use {' or '.join(f'`{choice}`' for choice in choices)}."
                yield name, f"{name} {value} is not a known value.", hint
        if not all(self.devices):
            yield "device", f"device {self.device!r} has an empty part.", "Write: cuda:0,cuda:1"
        try:
            Prices.parse(self.prices)
        except ValueError as error:
            yield "prices", f"{error}.", "Give NAME=USD or NAME=TRAINING/PREFILL/CACHED/SAMPLED."
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                hint = f"Use 0 or more; the default is {field.default}."
                yield field.name, f"{field.name} {value} is negative.", hint
        if self.gpus_per_replica < 1:
            hint = "Use 1, or how many GPUs one model is divided over."
            yield "gpus_per_replica", f"gpus_per_replica is {self.gpus_per_replica}.", hint
        if len(self.devices) > 1 and len(self.devices) % max(1, self.gpus_per_replica):
            found = f"{len(self.devices)} devices ({self.device}) are listed for engines of"
            hint = f"List a multiple of {self.gpus_per_replica}."
            yield "gpus_per_replica", f"{found} {self.gpus_per_replica} GPUs.", hint
        if not 0 < self.training_share < 1:
            hint = "Use a fraction between 0 and 1; 0.5 shares the time equally."
            yield "training_share", f"training_share is {self.training_share}.", hint
        for name in ("jwt_s", "session_grace_s", "takeover_s", "rank_timeout_s"):
            if getattr(self, name) == 0:
                hint = "Give a number of seconds above 0."
                yield name, f"{name} is 0; it must be a positive time.", hint

    def check_shared(self, command: str) -> None:
        """Refuse a web or worker process whose data the others cannot reach."""
        if not self.db.startswith("postgresql"):
            raise SettingsError(
                f"`{command}` needs a PostgreSQL database, which all web and worker processes "
                "share; SQLite has one server.",
                hint="Give --db postgresql+psycopg://USER@HOST/NAME. For one machine: `tinkex "
                "serve`.",
            )
        if not self.storage:
            raise SettingsError(
                f"`{command}` needs a storage that all web and worker processes share.",
                hint="Give --storage s3://BUCKET/FOLDER, or a folder that all of them mount.",
            )

    def check_reachable(self, *, has_keys: bool) -> None:
        """Refuse to start a server that other machines can reach without API keys."""
        if not has_keys and not is_loopback(self.host):
            raise SettingsError(
                f"--host {self.host} can be reached from other machines, and this server has no "
                "keys: anyone could train, read and delete.",
                hint=f"Create a key first: `tinkex key create --data {self.folder}`. Or use "
                "--host 127.0.0.1 and an SSH tunnel.",
            )

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.device.split(","))

    def replicas_of_each(self, models: int) -> int:
        """How many engines each of this many base models has."""
        listed = max(1, len(self.devices) // self.gpus_per_replica)
        return self.replicas or (listed if models == 1 else 1)

    def device_of(self, engine: int) -> str:
        """The device of an engine by its number; of several GPUs, a list."""
        if len(self.devices) == 1:
            return self.device
        first = engine * self.gpus_per_replica
        each = range(first, first + self.gpus_per_replica)
        return ",".join(self.devices[number % len(self.devices)] for number in each)

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
        """One line per setting, for the log, without the passwords of URLs."""
        for name, value in asdict(self).items():
            shown = _without_password(value) if name in ("db", "storage") else value
            # Lists as in the settings file.
            yield f"{name} = {list(shown) if isinstance(shown, tuple) else shown!r}"

    def changed(self) -> str:
        """The settings that differ from their defaults, as one line for the log."""
        lines = zip(fields(self), self.lines(), strict=True)
        return ", ".join(line for one, line in lines if getattr(self, one.name) != one.default)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        values["models"] = tuple(values["models"])
        values["prices"] = tuple(values["prices"])
        return cls(**values)


def _config_file(given: str | None, data: str) -> Path | None:
    """The settings file: the given one, else the one in the data folder, if it exists."""
    if given:
        return Path(given).expanduser().absolute()
    default = Path(data).expanduser().absolute() / CONFIG_FILE
    try:
        return default if default.exists() else None
    except PermissionError:
        raise SettingsError(
            f"the data folder {default.parent} cannot be read by this user.",
            hint="Use the user that runs the server (sudo -u USER), or another folder with --data.",
        ) from None


def _read_file(file: Path, *, in_data: Path) -> dict[str, tuple[Any, str]]:
    """The settings of a TOML file, each with its file and line. Unknown names are refused."""
    try:
        text = file.read_text()
        values = tomllib.loads(text)
    except OSError as error:
        raise SettingsError(
            f"the settings file {file} cannot be read: {error.strerror}.",
            hint="Give another file with --config.",
        ) from None
    except ValueError as error:
        raise SettingsError(
            f"{file} is not TOML: {error}.", hint="Write lines like: port = 8000"
        ) from None
    found = {}
    for name, value in values.items():
        source = f"{file} line {_line(text, name)}"
        if name == "data" and file == in_data.expanduser().absolute() / CONFIG_FILE:
            raise SettingsError(
                f"{source}: the settings file in a data folder cannot set another data folder.",
                hint="Remove `data`, or give the file with --config.",
            )
        found[name] = (checked_value(source, name, value), source)
    return found


def checked_value(source: str, name: str, value: Any) -> Any:
    """A value from a TOML file in the type of its setting; an integer is a valid float."""
    kinds = {field.name: type(field.default) for field in fields(Settings)}
    del kinds["config"]  # a file does not name another one
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1)
        raise SettingsError(
            f"{source}: {name} is not a setting.",
            hint=f"Did you mean {near[0]}?" if near else "See docs/reference/settings.md.",
        )
    kind = kinds[name]
    if kind is float and type(value) is int:
        return float(value)
    if kind is tuple and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if type(value) is not kind:
        raise SettingsError(
            f"{source}: {name} = {value!r} is not {TYPE_NAMES[kind]}.",
            hint=f"Write it like: {name} = {EXAMPLES[kind]}",
        )
    return value


def _line(text: str, name: str) -> int:
    """The line number of a key, which may be quoted or the name of a table."""
    key = re.compile(rf"""^\s*\[?\s*["']?{re.escape(name)}["']?\s*[=.\]]""")
    return next((n for n, line in enumerate(text.splitlines(), 1) if key.match(line)), 1)


@functools.lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether a server on `host` can be reached from this machine only."""
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
    credentials, _, host = rest.rpartition("@")
    return f"{scheme}://{credentials.partition(':')[0]}:***@{host}"


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return _parse_bool(text)
        if kind is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return kind(text)
    except ValueError:
        raise SettingsError(
            f"{name}={text} is not a {'boolean' if kind is bool else 'number'}.",
            hint=f"Unset {name}, or give {'1 or 0' if kind is bool else 'a number'}.",
        ) from None
