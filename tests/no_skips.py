"""With `CI=true` a skipped test fails, because a skip would hide that nothing was tested."""

import os
from collections.abc import Generator

import pytest

ON_CI = os.environ.get("CI", "").lower() in ("1", "true")
REASON = "skipped, which CI=true allows only for tests marked `may_skip`: "


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{REASON}{reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("may_skip") is not None
    if ON_CI and report.skipped and not expected:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Handles a file that is skipped as a whole, for example by `importorskip`."""
    report = yield
    if ON_CI and report.skipped:
        _fail(report)
    return report
