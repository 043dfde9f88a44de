"""
The newest official SDK trains and samples tiny models of other families than Llama and Qwen3.

`make matrix` runs the same with all families that are served.
"""

from typing import Any

import pytest

from together.families import check_family, check_merged_metrics, run_families

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

#: Experts; experts, sinks and windows; experts and MLA. One engine each.
FAMILIES = ["Qwen3Moe", "GptOss", "DeepseekV3"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_families("0.36.0", FAMILIES, tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_sampled_saved_and_loaded(family: str, found: dict[str, Any]) -> None:
    check_family(family, found["families"][f"test/{family}"])


def test_metrics_of_experts_are_merged_over_the_requests_of_a_batch(found: dict[str, Any]) -> None:
    check_merged_metrics(found["many"])
