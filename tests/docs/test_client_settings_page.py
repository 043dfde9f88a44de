"""docs/reference/client-settings.md is up to date."""

from qa.reference_pages.client_settings import PAGE, page


def test_the_page_of_client_settings_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m qa.reference_pages.client_settings"
