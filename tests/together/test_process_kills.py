"""
Kills server processes at random moments while the official SDK and tinkex train and sample.

No client sees an error, no step is lost or duplicated, samplers return the same samples, and the final
weights equal those of a run without kills. `make chaos` runs the same with many more kills.
"""

from pathlib import Path

import pytest

import sdk_envs
from qa.chaos.process_kills import run

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(300)]

SEED = 3


@pytest.mark.parametrize(("deterministic", "kills"), [(True, 4), (False, 2)])
def test_kills_change_no_result(
    tiny_model: Path, tmp_path: Path, *, deterministic: bool, kills: int
) -> None:
    report = run(
        model=tiny_model,
        data=tmp_path,
        sdk=sdk_envs.ensure("0.36.0"),
        seed=SEED,
        kills=kills,
        deterministic=deterministic,
        steps=8,
    )
    details = "\n".join([*report.lines(), *map(str, report.violations), *report.log[-100:]])
    assert sum(report.killed.values()) == kills, details
    assert report.is_good(deterministic=deterministic), details
