"""Writes docs/reference/client-settings.md: python -m qa.reference_pages.client_settings"""

from dataclasses import MISSING, fields
from pathlib import Path

from qa.reference_pages.settings import meanings, shown
from tinkex.client.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "client-settings.md"

HEAD = """# Settings of the client

One frozen object, `tinkex.Settings`, holds everything a client may be told. The first place that has a value counts:

1. an argument: of `ServiceClient`, `RestClient` and `AdminClient`, or of `Settings.resolve(...)`
2. the environment, `TINKEX_…` before `TINKER_…`; an empty variable counts as unset
3. the file of stored keys (the key only)
4. the default

The environment is read when a client is made, and never again. Different clients of one process may have different settings.

```python
import tinkex

settings = tinkex.Settings.resolve(base_url="local", first_contact_s=5, give_up_s=60)
service = tinkex.ServiceClient(settings=settings)
assert service.holder.settings.give_up_s == 60
```

For a whole process, also one that was written for the official client, set the environment: `TINKEX_FIRST_CONTACT_S=5`.
Times (`…_s`) are in seconds. What may hold a secret (key, command, headers, proxy) is not part of the object's `repr`, and the object cannot be pickled with a key in it.

| setting | environment | default | meaning |
|---|---|---|---|
"""

TAIL = """
Lists (`tags`, `feature_gates`) are separated by commas; blanks around a name are dropped, each name counts once, and the order is kept.
`telemetry` and `otel` are on for `1`, `true`, `yes` and `on`. `TINKEX_BREAKER` is `on`, `off` or `FAILURES/SECONDS` ([observing](../guides/observing.md)). How a key is chosen: [credentials](../guides/credentials.md).

A server on this machine (`127.0.0.1`, `localhost`, `local`) is never asked through a proxy that the environment names.
Files of checkpoints are fetched from links, which may lead to other hosts. A `proxy` that is given is used for all of them; otherwise the proxy variables decide for each host, as they were when the settings were made. `headers` go to links of the service's own origin (scheme, host, port) and to no other, also after redirects; the key goes to no link.

## Where nothing is set in `Settings`

| variable | meaning |
|---|---|
| `TINKEX_LOG`, `TINKER_LOG` | `debug` or `info`: what the client does, on stderr; read at import. A program that sets up `logging` itself gets the records in its own way; the root logger is not touched. Header values that may be secret are not shown |
| `TINKEX_LOCAL_MODEL`, `TINKEX_LOCAL_DATA`, `TINKEX_LOCAL_ARGS`, `TINKEX_LOCAL_WAIT_S` | the server of `base_url="local"`: its model, data folder, further options, and how long it may take to start |
| `TINKEX_CACHE` | where models and tokenizers are kept |
"""

#: Fields that are not simply TINKEX_<NAME> and TINKER_<NAME>.
ELSEWHERE = {
    "headers": "`CLOUDFLARE_ACCESS_CLIENT_ID`, `CLOUDFLARE_ACCESS_CLIENT_SECRET` (as `CF-Access-Client-…`)",
    "proxy": "`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`",
}
ALSO = {"ca_bundle": ", `SSL_CERT_FILE`"}


def page() -> str:
    told = meanings(Settings)
    rows = []
    for field in fields(Settings):
        if field.name.startswith("_"):
            continue
        assert told[field.name], f"{field.name} has no comment to be documented with"
        name = field.name.upper()
        usual = f"`TINKEX_{name}`, `TINKER_{name}`" + ALSO.get(field.name, "")
        value = "-" if field.default in (None, MISSING) else shown(field.name, field.default)
        if isinstance(field.default, tuple) and field.default:
            value = f"`{','.join(field.default)}`"
        rows.append(
            f"| `{field.name}` | {ELSEWHERE.get(field.name, usual)} | {value} "
            f"| {told[field.name]} |\n"
        )
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
