"""The page of settings says what the settings are."""

from docs.settings_page import PAGE, page


def test_the_page_of_settings_is_the_one_that_would_be_written_now() -> None:
    assert PAGE.read_text() == page(), "run: python tests/docs/settings_page.py"
