"""Writes docs/reference/limits.md from `tests/server/limits.py`: python -m qa.reference_pages.limits"""

from pathlib import Path

from server.limits import LIMITS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "limits.md"

HEAD = """# Limits

Every size in a request has a limit, which is checked before anything is built from the request.
Over a limit, the response is 413 (the request is too large) or 422 (a part is too large; the response names the field).
A valid step that asks for too much fails with category `user` when it runs; the table shows "user".
The settings `max_requests`, `max_queued_tokens`, `max_samples` and `max_training` limit how much an owner may have waiting or running ([settings](settings.md)).
The quotas `max_checkpoint_bytes`, `max_checkpoints` and `max_runs` limit how much an owner may store ([quotas](../guides/keys.md#quotas)).
The context length of a model limits the tokens of a prompt or an example; `get_server_capabilities` returns it.

`tests/server/test_limits_page.py` sends a request over each limit to a server, and checks this page.

| limit | maximum | setting | response | field |
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
