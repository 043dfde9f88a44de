"""The page of the client's settings says what the settings are."""

from qa.reference_pages.client_settings import PAGE, page


def test_the_page_of_client_settings_is_the_one_that_would_be_written_now() -> None:
    assert PAGE.read_text() == page(), "run: python -m qa.reference_pages.client_settings"
