"""
Kills server processes at random moments while the official SDK and tinkex train and sample.

No client sees an error, no step is lost or duplicated, samplers return the same samples, and the final
weights equal those of a run without kills. `make chaos` runs the same with many more kills, also on a
server that is not deterministic, of which tests/cli/test_demo.py kills an engine.
"""

from collections import Counter
from pathlib import Path

import pytest

import sdk_envs
from numerics.mixtures import write_mixture
from qa.chaos.process_kills import plan, run

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(300)]

SEED = 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "targets"),
    [("dense", ["engine", "both", "web"]), ("mixture", ["engine"])],
)
def test_kills_change_no_result(
    tiny_model: Path, tmp_path: Path, family: str, targets: list[str]
) -> None:
    assert [kill.target for kill in plan(SEED, len(targets))] == targets
    dense = family == "dense"
    report = run(
        model=tiny_model if dense else write_mixture(tmp_path / "model", "Qwen3Moe"),
        data=tmp_path / "data",
        sdk=sdk_envs.ensure("0.36.0") if dense else None,
        seed=SEED,
        kills=len(targets),
        deterministic=True,
        steps=8,
    )
    details = "\n".join([*report.lines(), *map(str, report.violations), *report.log[-100:]])
    assert report.killed == Counter(targets), details
    assert report.is_good(deterministic=True), details
