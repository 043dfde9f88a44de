"""Origins: which addresses may get a key or a cookie."""

import pytest

from tinkex.client.http.transport import origin, redirect_url


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://h", "https://h:443/path?query"),
        ("http://h:80/", "http://H"),
        ("https://[::1]:8000/a", "https://[::1]:8000"),
        ("http://name:word@h/", "http://h/"),
    ],
)
def test_the_same_server(one: str, other: str) -> None:
    assert origin(one) is not None
    assert origin(one) == origin(other)


@pytest.mark.parametrize(
    "other", ["http://h", "https://h:444", "https://g", "https://h.g", "https://h@g", "https://h:0"]
)
def test_another_server(other: str) -> None:
    assert origin(other) is not None
    assert origin(other) != origin("https://h")


@pytest.mark.parametrize(
    "url",
    ["", "local", "/path", "ftp://h", "http://", "http://h:port", "http://h:99999", "http://[h"],
)
def test_an_invalid_address_has_no_origin(url: str) -> None:
    assert origin(url) is None


def test_the_target_of_a_redirect() -> None:
    assert redirect_url("https://h/a/b", "c?d=1") == "https://h/a/c?d=1"
    assert redirect_url("https://h/a", "//g/c") == "https://g/c"
    for location in (None, "", "ftp://h/", "//h:port/", "http://[h", "/a\\b", "\\\\g/c"):
        assert redirect_url("https://h/a", location) is None
