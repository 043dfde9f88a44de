"""tinkex has none of the known defects of the official client; `make defects` runs both clients."""

import pytest

from qa.defects.cases import CASES
from qa.defects.runner import ours


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str | None]:
    return ours()


@pytest.mark.timeout(240)  # the first test runs all cases
@pytest.mark.parametrize(
    "number", [case.number for case in CASES], ids=[f"{c.number} {c.title}" for c in CASES]
)
def test_tinkex_does_not_have_the_defect(number: str, verdicts: dict[str, str | None]) -> None:
    assert verdicts[number] is None
