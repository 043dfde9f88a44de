"""docs/reference/settings.md is up to date."""

from qa.reference_pages.settings import PAGE, field_comments, page
from tinkex.cli.serve import command


def test_the_page_of_settings_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m qa.reference_pages.settings"


def test_the_documented_default_of_batch_tokens_is_that_of_the_engine() -> None:
    from tinkex.engine.adapters.memory_plan import BATCH_TOKENS, DETERMINISTIC_BATCH_TOKENS

    default = f"{BATCH_TOKENS['cpu']:,} on a CPU{{}} {BATCH_TOKENS['cuda']:,} on a GPU"
    (option,) = (one for one in command.params if one.name == "batch_tokens")
    assert default.format(",") in str(getattr(option, "help", ""))
    meaning = field_comments()["batch_tokens"]
    assert default.format(" and") in meaning
    assert f"{DETERMINISTIC_BATCH_TOKENS:,} in deterministic mode" in meaning
