"""Writes docs/reference/settings.md from `Settings` of the server: python -m qa.reference_pages.settings"""

import ast
import inspect
from dataclasses import fields
from pathlib import Path

from tinkex.cli.serve import command
from tinkex.server.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"

HEAD = """# Settings of the server

Each setting can be given in three places; the first one wins:

1. an option of `tinkex serve`, where the table shows one: `--max-samples 64`
2. the environment: `TINKEX_MAX_SAMPLES=64`; lists are separated by commas, booleans are 1 or 0
3. one TOML file, `--config FILE` or else `tinkex.toml` in the data folder: `max_samples = 64`

An unknown name or an invalid value is refused at start-up; the error names the option, the variable, or the file and line.
At start-up, the log has one line with the settings that differ from their defaults, without passwords; with `TINKEX_LOG_LEVEL=debug` it has all settings.

```toml
models = ["Qwen/Qwen3-8B=/models/qwen"]
host = "0.0.0.0"
session_grace_s = 600
max_samples = 256
```

`max_requests`, `max_queued_tokens`, `max_samples`, `max_training`, `max_checkpoint_bytes`, `max_checkpoints` and `max_runs` can also be set per key: `tinkex key create --max-samples 64`.
Times (`…_s`) are in seconds.

| setting | option | default | meaning |
|---|---|---|---|
"""


def field_comments(settings: type = Settings) -> dict[str, str]:
    """The `#:` comments above the fields of a settings class."""
    source = inspect.getsource(settings)
    lines = source.splitlines()
    comments = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment: list[str] = []
            number = node.lineno - 2
            while lines[number].strip().startswith("#:"):
                comment.insert(0, lines[number].strip().removeprefix("#:").strip())
                number -= 1
            comments[node.target.id] = " ".join(comment)
    return comments


def displayed(name: str, value: object) -> str:
    if name == "data":
        return "`~/.local/share/tinkex`"
    if value in ((), ""):
        return "-"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float) and value.is_integer():
        return f"`{int(value)}`"
    return f"`{value}`"


def page() -> str:
    options = {
        option.name: option.opts[0] for option in command.params if option.opts[0].startswith("--")
    }
    options["models"] = "arguments"
    comments = field_comments()
    rows = []
    for field in fields(Settings):
        assert comments[field.name], f"{field.name} has no comment above it"
        option = f"`{options[field.name]}`" if field.name in options else ""
        meaning = comments[field.name].replace("|", "\\|")
        rows.append(
            f"| `{field.name}` | {option} | {displayed(field.name, field.default)} | {meaning} |\n"
        )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
