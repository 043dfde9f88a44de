"""docs/reference/models.md is up to date, and says only what is tested or measured."""

import pytest

from numerics.hybrids import HYBRIDS
from numerics.mixtures import MIXTURES
from numerics.pictures import IMAGE_MODELS
from numerics.test_families import REFUSED, REFUSED_BY_CONFIG, SERVED
from qa.reference_pages.models import PAGE, REPORTS, page
from tinkex.engine.model_fit import Candidate
from tinkex.models.families import FAMILIES, family_of
from tinkex.models.line_up import LineUpModel, line_up


def test_the_tables_of_models_are_up_to_date() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run: python -m qa.reference_pages.models"


def test_the_families_are_those_that_are_tested() -> None:
    served = {family.name for family in FAMILIES if family.served}
    assert served == {*SERVED, *MIXTURES, *HYBRIDS, *IMAGE_MODELS}
    refused = {family.name for family in FAMILIES if not family.served}
    assert refused == {*REFUSED, *REFUSED_BY_CONFIG} - served


@pytest.mark.parametrize("model", line_up(), ids=lambda model: model.name)
def test_a_served_model_of_the_line_up_is_of_a_tested_family(model: LineUpModel) -> None:
    candidate, family = Candidate.of_line_up(model), family_of(model.type)
    if candidate.served:
        assert family is not None
        assert family.served
        assert candidate.trained
        assert not candidate.reason
    else:
        assert candidate.reason
    for each in model.measured:
        assert f"{each.tokens_per_s:,}" in (REPORTS / each.report).read_text()
