"""With `CI=true` a missing part fails its tests: a skip would hide that nothing was tested."""

import os
from collections.abc import Generator

import pytest

ON_CI = os.environ.get("CI", "").lower() in ("1", "true")
WHY = "skipped, which CI=true does not allow (mark `may_skip` says which tests may be): "


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{WHY}{reason}"


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
    """A whole file that is skipped, as by `importorskip` at its top."""
    report = yield
    if ON_CI and report.skipped:
        _fail(report)
    return report
