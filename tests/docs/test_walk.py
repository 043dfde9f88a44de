"""The table in docs/internals.md shows how many files a request really runs through."""

import pytest

from qa import walk


@pytest.mark.timeout(300)  # start-up takes long on a busy machine
def test_the_documented_table_is_the_measured_one() -> None:
    walks = walk.trace()
    files = {f"{one.operation}, {one.package}": one.files for one in walks}
    assert walk.documented() == walk.table(walks), f"run: python qa/walk.py --write\n{files}"
