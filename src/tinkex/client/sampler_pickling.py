"""
Sampling clients in other processes: the contents of pickles and handles, and how to join them.

Neither contains a credential. A copy in the same process, or in a forked one, uses the settings
of the original; elsewhere settings are resolved as for a new client.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from tinkex.client.http.retry import RetryConfig
from tinkex.client.session import Session
from tinkex.client.settings import Settings


@dataclass(frozen=True, kw_only=True)
class SamplerHandle:
    """The data from which a copy of a sampling client is made."""

    session_id: str | None
    sampling_session_id: str
    base_url: str
    retry_config: RetryConfig | None
    record_stability_info: bool

    def to_text(self) -> str:
        """Text that is safe in URLs and command lines."""
        fields: dict[str, Any] = {**asdict(self), "retry_config": None}
        if self.retry_config is not None:
            # Exception classes have no text form: a copy has the default ones.
            fields["retry_config"] = asdict(replace(self.retry_config, retryable_exceptions=()))
            del fields["retry_config"]["retryable_exceptions"]
        return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> SamplerHandle:
        try:
            fields = json.loads(base64.urlsafe_b64decode(text.encode("ascii")))
            config = fields.get("retry_config")
            return cls(
                session_id=_text(fields["session_id"]),
                sampling_session_id=_text(fields["sampling_session_id"]),
                base_url=_text(fields["base_url"]),
                retry_config=None if config is None else RetryConfig(**config),
                record_stability_info=bool(fields.get("record_stability_info", False)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise ValueError(
                f"This is not a sampler handle ({type(error).__name__}). Pass the complete, unchanged "
                "text that SamplingClient.get_sampler_handle() returned."
            ) from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("text is needed")
    return value


#: Sessions of this process whose clients were copied; a forked child inherits them.
_originals: WeakValueDictionary[tuple[str | None, str], Session] = WeakValueDictionary()
#: Sessions that this process only joined; their copies share connections and heartbeat.
_joined: WeakValueDictionary[tuple[str | None, tuple[str, str]], Session] = WeakValueDictionary()


def remember_original(session: Session) -> None:
    """Keep the session's settings for copies of its clients in this process."""
    _originals[session.session_id, session.settings.base_url] = session


def joined_session(handle: SamplerHandle, *, api_key: str | None = None) -> Session:
    """The session of a copy; joined once per process."""
    original = _originals.get((handle.session_id, handle.base_url))
    if original is None or api_key is not None:
        settings = Settings.resolve(base_url=handle.base_url, api_key=api_key)
        return _join(handle, settings, {})
    # In the original's process its settings are known, including headers and key.
    return _join(handle, original.settings, {"make_transport": original.make_transport})


def _join(handle: SamplerHandle, settings: Settings, options: dict[str, Any]) -> Session:
    key = (handle.session_id, settings.limits_key)
    session = _joined.get(key)
    if session is None or session.closed:
        session = _joined[key] = Session(settings, session_id=handle.session_id, **options)
    return session
