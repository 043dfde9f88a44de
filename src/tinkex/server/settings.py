"""What things cost here, if anybody said so: pure, from settings."""

import difflib
import functools
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

#: A month of storage is this many hours.
HOURS_PER_MONTH = 730.0
#: For every base model that has no price of its own.
ANY = "*"
#: What is priced, in the order in which prices are written.
PRICED_TOKENS = ("training", "prefill", "cached", "sampled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """US dollars for a million tokens, by base model and kind."""

    by_model: Mapping[str, Mapping[str, float]]

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """From `BASE=USD` or `BASE=TRAINING/PREFILL/CACHED/SAMPLED`; ValueError says what is wrong."""
        by_model = {}
        for entry in entries:
            # Names of models may hold anything but this sign at their end.
            name, _, text = entry.rpartition("=")
            try:
                numbers = [float(part) for part in text.split("/")]
            except ValueError:
                numbers = []
            if len(numbers) == 1:
                numbers *= len(PRICED_TOKENS)
            if not name or len(numbers) != len(PRICED_TOKENS) or not all(n >= 0 for n in numbers):
                raise ValueError(f"{entry!r} is not a price")
            by_model[name] = dict(zip(PRICED_TOKENS, numbers, strict=True))
        return cls(by_model=by_model)

    def rate(self, base_model: str, kind: str) -> float | None:
        """For a million tokens; None where nobody set a price."""
        found = self.by_model.get(base_model, self.by_model.get(ANY))
        return None if found is None else found[kind]


# MERGED: What a server is told: flags over `TINKEX_*` environment over one TOML file over defaults. Checked before anything starts, and printed without secrets.


MEBIBYTE = 2**20

CONFIG_FILE = "tinkex.toml"
KINDS = {
    bool: "a truth value",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list of texts",
}
EXAMPLES = {bool: "true", int: "8", float: "1.5", str: '"text"', tuple: '["text"]'}

#: Settings that are one of a few words.
CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "executor": ("local",),
    "log_level": ("info", "debug"),
}


class SettingsError(ValueError):
    """A setting is missing or wrong: nothing was started."""

    def __init__(self, message: str, *, hint: str, setting: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        #: The one that is wrong, when it is one.
        self.setting = setting


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything `tinkex serve` can be told."""

    #: Models to serve: NAME, FOLDER or NAME=FOLDER.
    models: tuple[str, ...] = ()
    #: A TOML file with settings; by default `tinkex.toml` in the data folder, if it is there.
    config: str = ""
    #: Address to listen on. One that other machines can reach needs keys.
    host: str = "127.0.0.1"
    #: Port to listen on; 0 picks a free one.
    port: int = 8000
    #: Folder of the database, payloads, results and checkpoints.
    data: str = ""
    #: SQLAlchemy URL; empty means SQLite in the data folder.
    db: str = ""
    #: Folder or fsspec URL of payloads and results; empty means the data folder.
    storage: str = ""
    #: Where engines compute: cpu, cuda, cuda:1, ...; auto is CUDA when there is one.
    device: str = "auto"
    #: Numbers of the base model: auto, float32 or bfloat16.
    dtype: str = "auto"
    #: Where engines run; the one form is `local`.
    executor: str = "local"
    #: Threads an engine computes with; 0 leaves the choice to the engine.
    threads: int = 0
    #: Same requests, same bits, at some cost of speed.
    deterministic: bool = False
    #: Runs whose base model has changed since they were made go on with the new files; without it
    #: their steps and samples are refused.
    accept_changed_base: bool = False
    #: Memory an engine may take of its device, in gigabytes; 0 is all of a GPU that is free at
    #: start, and on a CPU the base model and half of what is free beside it.
    memory_gb: float = 0.0
    #: Of that, for adapters; 0 is what the rest leaves.
    adapter_gb: float = 0.0
    #: Tokens whose keys and values an engine keeps for sampling; 0 sizes them by free memory.
    kv_tokens: int = 0
    #: Most tokens in one pass; 0 is 1,024 on a CPU and 8,192 on a GPU, fewer where memory is short,
    #: and always 8,192 in deterministic mode.
    batch_tokens: int = 0
    #: Most sequences that an engine samples together; 0 is the engine's own limit.
    max_sequences: int = 0
    #: Whether prompts of one owner that begin alike are computed once; never in deterministic mode.
    prefix_cache: bool = True
    #: Adapters of samplers that an engine keeps in memory although no request uses them.
    idle_adapters: int = 16
    #: Memory of the host for adapters that had to leave a GPU, in gigabytes; 0 is half of what is
    #: free there.
    host_gb: float = 0.0
    #: Where several base models are served, one that nobody asked for so long leaves the memory,
    #: and comes back when somebody does; 0 keeps all.
    engine_idle_s: float = 1800.0
    #: Largest request body as it arrives.
    max_body_bytes: int = 64 * MEBIBYTE
    #: Largest request body after decompression.
    max_decoded_bytes: int = 256 * MEBIBYTE
    #: Largest body of any other request than a pass or a sample, before and after decompression.
    max_message_bytes: int = 4 * MEBIBYTE
    #: Bytes of large bodies of everybody that there is room for while they arrive and are stored;
    #: 0 is no limit. Bodies up to 64 KiB need none.
    max_arriving_bytes: int = 512 * MEBIBYTE
    #: How long a large body waits for that room before it is refused with a 429.
    arriving_wait_s: float = 10.0
    #: How long a poll for a result is held. The official client gives up after 45 s.
    long_poll_s: float = 30.0
    #: How long a sample goes on whose stream broke; a client that comes back by then loses nothing.
    stream_grace_s: float = 5.0
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
    #: Most tokens of prompts and examples in those requests; 0 is no limit.
    max_queued_tokens: int = 0
    #: Most sequences that one owner has sampled at once; 0 is no limit.
    max_samples: int = 0
    #: Most models of one owner that train at once; 0 is no limit. The others wait their turn.
    max_training: int = 0
    #: Most bytes of checkpoints that one owner keeps, those without a name included; 0 is no limit.
    #: What is beyond fails, with what there is and what is allowed.
    max_checkpoint_bytes: int = 0
    #: Most checkpoints with a name that one owner keeps; 0 is no limit.
    max_checkpoints: int = 0
    #: Most training runs that one owner keeps: until the client is closed and its checkpoints are
    #: gone; 0 is no limit.
    max_runs: int = 0
    #: Most requests of all owners together that are accepted and not finished; 0 is no limit.
    max_open: int = 20_000
    #: Most connections; who comes beyond them is told to come back. 0 is no limit.
    max_connections: int = 10_000
    #: How long a connection may take for the head of a request; 0 is no limit.
    head_s: float = 30.0
    #: A body or an answer of which less than 4 KiB moves in so long is given up; 0 is no limit.
    stall_s: float = 60.0
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
    #: How long the snapshot before the newest, and the requests since, are kept: the newest may turn
    #: out damaged. 0 is until the next look.
    way_back_s: float = 24 * 3600.0
    #: Checkpoints of one kind that a run keeps, the newest; published ones stay. 0 keeps all.
    keep_last: int = 0
    #: How often what may go is deleted; 0 deletes nothing.
    janitor_s: float = 60.0
    #: How old a file must be that nothing refers to before it is taken for left behind.
    orphan_s: float = 3600.0
    #: Room on the disk that is kept for results, in mebibytes: with less, nothing new is taken in.
    reserve_mb: float = 64.0
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
    #: How much the log on standard error tells: info, or debug.
    log_level: str = "info"

    @classmethod
    def from_sources(
        cls, flags: Mapping[str, Any], env: Mapping[str, str] = os.environ
    ) -> "Settings":
        """Flags that were given (not None), `TINKEX_<NAME>`, the file, defaults; checked."""
        given = {name: value for name, value in flags.items() if value is not None}
        sources = {name: _flag(name) for name in given}
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
        try:
            settings.check()
        except SettingsError as error:
            source = sources.get(error.setting, "")
            if not source or source.startswith("--"):
                raise
            raise SettingsError(
                f"{source}: {error}", hint=error.hint, setting=error.setting
            ) from None
        return settings

    def check(self) -> None:
        """Refuse what cannot work."""
        if not 0 <= self.port <= 65535:
            raise SettingsError(
                f"port {self.port} is not a port.",
                hint="Use 1 to 65535, or 0 for a free one.",
                setting="port",
            )
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise SettingsError(
                    f"{name} {value} is not known.",
                    hint=f"Use {' or '.join(f'`{choice}`' for choice in choices)}.",
                    setting=name,
                )
        try:
            Prices.parse(self.prices)
        except ValueError as error:
            raise SettingsError(
                f"{error}.",
                hint="Give NAME=USD or NAME=TRAINING/PREFILL/CACHED/SAMPLED.",
                setting="prices",
            ) from None
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise SettingsError(
                    f"{field.name} {value} is negative.",
                    hint=f"Use 0 or more; the default is {field.default}.",
                    setting=field.name,
                )
        for name in ("jwt_s", "session_grace_s"):
            if getattr(self, name) == 0:
                raise SettingsError(
                    f"{name} is 0, which is no time at all.",
                    hint="Give seconds above 0.",
                    setting=name,
                )

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

    def changed(self) -> str:
        """Those that are not what they are by default, for one line of the log."""
        plain = Settings()
        lines = zip(fields(self), self.lines(), strict=True)
        told = [line for one, line in lines if getattr(self, one.name) != getattr(plain, one.name)]
        return ", ".join(told)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        values["models"] = tuple(values["models"])
        values["prices"] = tuple(values["prices"])
        return cls(**values)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _config_file(asked: str | None, data: str) -> Path | None:
    """The file with settings: the one that was named, else that of the data folder."""
    if asked:
        return Path(asked).expanduser().absolute()
    usual = Path(data).expanduser().absolute() / CONFIG_FILE
    try:
        return usual if usual.exists() else None
    except PermissionError:
        raise SettingsError(
            f"the data folder {usual.parent} cannot be read by this user.",
            hint="Use the user that runs the server (sudo -u USER), or another folder with --data.",
        ) from None


def _read_file(file: Path, *, in_data: Path) -> dict[str, tuple[Any, str]]:
    """Each setting of a TOML file with where it stands; what is not a setting is refused."""
    try:
        text = file.read_text()
        values = tomllib.loads(text)
    except OSError as error:
        raise SettingsError(
            f"the settings file {file} cannot be read: {error.strerror}.",
            hint="Name another one with --config.",
        ) from None
    except ValueError as error:
        raise SettingsError(
            f"{file} is not TOML: {error}.", hint="Lines look like: port = 8000"
        ) from None
    kinds = {field.name: type(field.default) for field in fields(Settings)}
    found = {}
    for name, value in values.items():
        source = f"{file} line {_line(text, name)}"
        if name not in kinds or name == "config":
            near = difflib.get_close_matches(name, set(kinds) - {"config"}, n=1)
            raise SettingsError(
                f"{source}: {name} is not a setting.",
                hint=f"Did you mean {near[0]}?" if near else "docs/reference/settings.md has all.",
            )
        if name == "data" and file == in_data.expanduser().absolute() / CONFIG_FILE:
            raise SettingsError(
                f"{source}: the file of a data folder cannot name another data folder.",
                hint="Leave `data` out, or give the file with --config.",
            )
        found[name] = (_of_kind(source, name, value, kinds[name]), source)
    return found


def _of_kind(source: str, name: str, value: Any, kind: type) -> Any:
    """A value of a file as its setting takes it; a whole number may stand for any number."""
    if kind is float and type(value) is int:
        return float(value)
    if kind is tuple and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if type(value) is not kind:
        raise SettingsError(
            f"{source}: {name} = {value!r} is not {KINDS[kind]}.",
            hint=f"Write it like: {name} = {EXAMPLES[kind]}",
        )
    return value


def _line(text: str, name: str) -> int:
    """Where a key stands in a file; tables and quoted keys are found as well."""
    key = re.compile(rf"""^\s*\[?\s*["']?{re.escape(name)}["']?\s*[=.\]]""")
    return next((n for n, line in enumerate(text.splitlines(), 1) if key.match(line)), 1)


def default_data_folder(env: Mapping[str, str]) -> Path:
    """`$XDG_DATA_HOME/tinkex`, by default `~/.local/share/tinkex`."""
    base = env.get("XDG_DATA_HOME")
    return (Path(base) if base else Path("~/.local/share").expanduser()) / "tinkex"


@functools.lru_cache(maxsize=64)
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
