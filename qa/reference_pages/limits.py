"""Writes docs/reference/limits.md from the limits themselves: python -m qa.reference_pages.limits"""

from pathlib import Path

from server.limits import LIMITS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "limits.md"

HEAD = """# Limits

Every size in a request has an end, and it is looked at before anything is built from the request.
Over it, the answer is 413 (the whole is too large) or 422 (a part is, and the answer names the field), and the server goes on.
What a step asks for that is sound and too much fails with category `user` when its turn comes; that is "user" below.
How much an owner may have waiting or running at once is another matter: `max_requests`, `max_queued_tokens`, `max_samples` and `max_training` in [the settings](settings.md).
So is how much an owner may keep: `max_checkpoint_bytes`, `max_checkpoints` and `max_runs` ([quotas](../guides/keys.md#quotas)).
Tokens of a prompt or an example are limited by the model's context, which `get_server_capabilities` tells.

`tests/server/test_limits_page.py` sends a request over each of these to a server, and checks this page.

| limit | most | setting | over it | names |
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
