"""
Named servers of `tinkex use`: names and addresses, in a file of the user.

    $XDG_CONFIG_HOME/tinkex/profiles.json      (default: ~/.config)

Keys are not in it; they are stored by address (`tinkex auth login`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path


class BadProfiles(ValueError):
    """The file is not valid, or has no such name."""


@dataclass(frozen=True, kw_only=True)
class Profiles:
    """The contents of the file. Changes return a new object, for `write`."""

    #: The name of the server that is used if no other is named.
    current: str | None = None
    #: name -> address
    urls: Mapping[str, str] = field(default_factory=dict)

    def using(self, name: str) -> Profiles:
        """BadProfiles if there is no such name."""
        self.url(name)
        return replace(self, current=name)

    def adding(self, name: str, url: str) -> Profiles:
        """Adds or replaces a name, and uses it."""
        return Profiles(current=name, urls={**self.urls, name: url})

    def url(self, name: str) -> str:
        if name not in self.urls:
            known = ", ".join(sorted(self.urls)) or "none"
            raise BadProfiles(
                f"there is no profile {name!r}; known: {known}. `tinkex use URL --name {name}` "
                "adds it."
            )
        return self.urls[name]


def path(env: Mapping[str, str] = os.environ, home: Path | None = None) -> Path:
    base = env.get("XDG_CONFIG_HOME")
    return (Path(base) if base else (home or Path.home()) / ".config") / "tinkex" / "profiles.json"


def read(env: Mapping[str, str] = os.environ, home: Path | None = None) -> Profiles:
    """The stored profiles; empty if there is no file."""
    file = path(env, home)
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        urls = {str(name): str(url) for name, url in told["urls"].items()}
        current = told["current"]
        if current is not None and current not in urls:
            raise ValueError("the current profile is not one of its profiles")
    except FileNotFoundError:
        return Profiles()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadProfiles(
            f"{file} is not a valid file of profiles ({error}). Delete it, and name the servers "
            "again with `tinkex use URL`."
        ) from error
    return Profiles(current=current, urls=urls)


def write(profiles: Profiles, env: Mapping[str, str] = os.environ) -> None:
    """Write the file, readable by its owner only."""
    from tinkex.durable_files import write_file  # imported here: only `tinkex use` needs it

    file = path(env)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_file(file, (json.dumps(asdict(profiles), indent=2) + "\n").encode())


def current_url(env: Mapping[str, str] = os.environ, home: Path | None = None) -> str | None:
    """The address of the profile in TINKEX_PROFILE, else of the current one."""
    chosen = env.get("TINKEX_PROFILE")
    if not chosen and not path(env, home).exists():
        return None
    profiles = read(env, home)
    name = chosen or profiles.current
    return None if name is None else profiles.url(name)
