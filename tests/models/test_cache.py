"""The cache folder, and atomic publishing."""

import io

import pytest

from tinkex.models.cache import cache_folder, line_progress, staged


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TINKEX_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/tinkex"),
        ({"HOME": "/c"}, "/c/.cache/tinkex"),
    ],
)
def test_the_cache_folder_follows_the_environment(env, expected):
    assert str(cache_folder(env)) == expected


def test_a_staged_folder_appears_complete(tmp_path):
    final = tmp_path / "models" / "m"
    with staged(final) as staging:
        (staging / "a").write_text("1")
        assert not final.exists()
    assert (final / "a").read_text() == "1"
    assert [path.name for path in final.parent.iterdir()] == ["m"]


def test_a_failure_leaves_nothing(tmp_path):
    final = tmp_path / "m"
    with pytest.raises(FileNotFoundError), staged(final) as staging:
        (staging / "not made" / "a").write_text("1")
    assert list(tmp_path.iterdir()) == []


def test_progress_in_a_log_is_a_line_for_each_quarter():
    stream = io.StringIO()
    report = line_progress(stream)
    for done in range(1001):
        report(done * 10_000, 10_000_000, "downloading")
    assert stream.getvalue().splitlines() == [
        "downloading: 0 of 10 MB",
        "downloading: 2 of 10 MB",
        "downloading: 5 of 10 MB",
        "downloading: 8 of 10 MB",
        "downloading: 10 of 10 MB",
    ]
