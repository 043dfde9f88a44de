"""The page of the client's settings says what the settings are."""

from docs.client_settings_page import PAGE, page


def test_the_page_of_client_settings_is_the_one_that_would_be_written_now() -> None:
    assert PAGE.read_text() == page(), (
        "run: PYTHONPATH=tests python tests/docs/client_settings_page.py"
    )
