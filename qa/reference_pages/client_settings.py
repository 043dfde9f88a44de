"""Writes docs/reference/client-settings.md from `Settings` of the client: python -m qa.reference_pages.client_settings"""

from dataclasses import MISSING, fields
from pathlib import Path

from qa.reference_pages.settings import displayed, field_comments
from tinkex.client.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "client-settings.md"

HEAD = """# Settings of the client

One frozen object, `tinkex.Settings`, holds all settings of a client. The first place that has a value applies:

1. an argument of `ServiceClient`, `RestClient`, `AdminClient`, or of `Settings.resolve(...)`
2. the environment, `TINKEX_…` before `TINKER_…`; an empty variable counts as unset
3. the file of stored keys (only for the key)
4. the default

A client reads the environment once, when it is created. Clients of one process may have different settings.

```python
import tinkex

settings = tinkex.Settings.resolve(base_url="local", first_contact_s=5, give_up_s=60)
service = tinkex.ServiceClient(settings=settings)
assert service.holder.settings.give_up_s == 60
```

For a whole process, including one written for the official client, set the environment: `TINKEX_FIRST_CONTACT_S=5`.
Times (`…_s`) are in seconds. Values that may contain a secret (key, command, headers, proxy) are not part of the object's `repr`, and an object with a key cannot be pickled.

| setting | environment | default | meaning |
|---|---|---|---|
"""

TAIL = """
Lists (`tags`, `feature_gates`) are separated by commas; blanks around a name are removed, duplicates are dropped, and the order is kept.
`TINKEX_WAIT_NOTICE_S=off` (or an argument of 0) turns the [lines about waits](../guides/observing.md#waiting) off. `telemetry` and `otel` are on for `1`, `true`, `yes` and `on`. `TINKEX_BREAKER` is `on`, `off` or `FAILURES/SECONDS` ([observing](../guides/observing.md)). [Credentials](../guides/credentials.md) describes how a key is chosen.

Requests to a server on this machine (`127.0.0.1`, `localhost`, `local`) never use a proxy from the environment.
Files of checkpoints are downloaded from links, which may be on other hosts. A given `proxy` applies to all of them; otherwise the proxy variables at the time when the settings were created apply to each host. `headers` are sent only to links of the service's own origin (scheme, host, port), also after redirects; the key is not sent to links.

## Variables that are not part of `Settings`

| variable | meaning |
|---|---|
| `TINKEX_LOG`, `TINKER_LOG` | `debug` or `info`: log the client's actions to stderr; read at import. If the program configures `logging` itself, its handlers get the records; the root logger is not changed. Header values that may be secret are not shown |
| `TINKEX_LOCAL_MODEL`, `TINKEX_LOCAL_DATA`, `TINKEX_LOCAL_ARGS`, `TINKEX_LOCAL_WAIT_S` | the server of `base_url="local"`: its model, data folder (default: that of `tinkex serve`), further options, and its time limit to start |
| `TINKEX_LOCAL_KEEP_S` | how long that server stays after its last program, in seconds; default 300 |
| `TINKEX_PROFILE` | the name of a service that `tinkex use` stored, instead of the current one |
| `TINKEX_TRACEBACKS` | `full`: errors keep the frames of tinkex and their causes (`__cause__`). Otherwise a traceback of an expected error ends at the line of your program |
| `TINKEX_CACHE` | the folder of cached models and tokenizers |
"""

#: Fields that are not simply TINKEX_<NAME> and TINKER_<NAME>.
ELSEWHERE = {
    "headers": "`CLOUDFLARE_ACCESS_CLIENT_ID`, `CLOUDFLARE_ACCESS_CLIENT_SECRET` (as `CF-Access-Client-…`)",
    "proxy": "`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`",
}
ALSO = {"ca_bundle": ", `SSL_CERT_FILE`"}


def page() -> str:
    comments = field_comments(Settings)
    rows = []
    for field in fields(Settings):
        if field.name.startswith("_"):
            continue
        assert comments[field.name], f"{field.name} has no comment above it"
        name = field.name.upper()
        usual = f"`TINKEX_{name}`, `TINKER_{name}`" + ALSO.get(field.name, "")
        value = "-" if field.default in (None, MISSING) else displayed(field.name, field.default)
        if isinstance(field.default, tuple) and field.default:
            value = f"`{','.join(field.default)}`"
        rows.append(
            f"| `{field.name}` | {ELSEWHERE.get(field.name, usual)} | {value} "
            f"| {comments[field.name]} |\n"
        )
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
