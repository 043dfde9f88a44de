"""The audit reads every pin, and never takes silence for good news."""

import pytest

from qa import audit


def test_every_line_of_the_constraints_is_a_pin_without_a_local_suffix() -> None:
    found = audit.pins(audit.CONSTRAINTS.read_text())
    assert len(found) > 100
    assert not any("+" in pin for pin in found)
    assert audit.pins("torch==2.13.0+cpu ; python_version > '3'  # why") == ["torch==2.13.0"]
    with pytest.raises(AssertionError, match="no exact pin"):
        audit.pins("torch>=2")


FLAGGED = {
    "name": "jinja2",
    "version": "2.10",
    "vulns": [{"id": "PYSEC-2019-217", "fix_versions": ["2.10.1"]}],
}
FINE = {"name": "a", "version": "1", "vulns": []}
SKIPPED = {"name": "b", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("found", "strict", "ends_with", "says"),
    [
        ([FINE], False, 0, "no known vulnerability"),
        ([FINE, FLAGGED], False, 1, "jinja2 2.10: PYSEC-2019-217, fixed in 2.10.1"),
        ([SKIPPED], False, 0, "could NOT be audited"),
        ([SKIPPED, FINE], True, 1, "could NOT be audited"),
    ],
)
def test_silence_is_said_aloud_and_a_finding_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: list[dict[str, object]],
    strict: bool,
    ends_with: int,
    says: str,
) -> None:
    monkeypatch.setattr(audit, "pins", lambda _text: ["x==1"] * len(found))
    monkeypatch.setattr(audit, "asked", lambda _wanted: found)
    assert audit.main(["--strict"] if strict else []) == ends_with
    assert says in capsys.readouterr().out
