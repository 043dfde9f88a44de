"""Writes docs/reference/limits.md from `tests/server/limits.py`: python -m qa.reference_pages.limits"""

from pathlib import Path

from server.limits import LIMITS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "limits.md"

HEAD = """# Limits

Every size in a request is limited, and checked before anything is built from the request.
Over a limit, the answer is 413 (the whole body is too large) or 422 (a field is too large, and the answer names it), and the server continues.
A well-formed step that is too large is accepted and fails with category `user`; that is "user" below.
Limits on waiting and running work of an owner are separate: `max_requests`, `max_queued_tokens`, `max_samples` and `max_training` in [the settings](settings.md).
So are storage quotas of an owner: `max_checkpoint_bytes`, `max_checkpoints` and `max_runs` ([quotas](../guides/keys.md#quotas)).
The tokens of a prompt or an example are limited by the model's context length, which `get_server_capabilities` returns.
The sizes of images are limited by the engine ([images](../guides/images.md#what-is-refused)).

`tests/server/test_limits_page.py` sends a request over each of these limits to a server, and checks this page.

| limit | maximum | setting | over the limit | names |
|---|---|---|---|---|
"""


def page() -> str:
    rows = [
        f"| {limit.what} | {limit.value} | {f'`{limit.setting}`' if limit.setting else ''} "
        f"| {limit.answer} | {f'`{limit.says}`' if limit.answer == '422' and limit.says != 'recursion' else ''} |\n"
        for limit in LIMITS
    ]
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
