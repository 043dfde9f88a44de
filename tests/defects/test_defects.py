"""None of the official client's defects is in ours. `table.py` runs the same programs with both."""

import pytest

from qa.defects.cases import CASES
from qa.defects.runner import ours


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str | None]:
    return ours()


@pytest.mark.timeout(240)  # the first of them waits for all
@pytest.mark.parametrize(
    "number", [case.number for case in CASES], ids=[f"{c.number} {c.title}" for c in CASES]
)
def test_the_defect_is_not_ours(number: str, verdicts: dict[str, str | None]) -> None:
    assert verdicts[number] is None
