"""The audit checks every pin, and reports pins that it could not check."""

import pytest

from qa import audit


def test_every_constraint_is_an_exact_pin_without_a_local_suffix() -> None:
    found = audit.pins(audit.CONSTRAINTS.read_text())
    assert len(found) > 100
    assert not any("+" in pin for pin in found)
    assert audit.pins("torch==2.13.0+cpu ; python_version > '3'  # why") == ["torch==2.13.0"]
    with pytest.raises(AssertionError, match="not an exact pin"):
        audit.pins("torch>=2")


FLAGGED = {
    "name": "jinja2",
    "version": "2.10",
    "vulns": [{"id": "PYSEC-2019-217", "fix_versions": ["2.10.1"]}],
}
CLEAN = {"name": "a", "version": "1", "vulns": []}
SKIPPED = {"name": "b", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("found", "strict", "status", "message"),
    [
        ([CLEAN], False, 0, "no known vulnerability"),
        ([CLEAN, FLAGGED], False, 1, "jinja2 2.10: PYSEC-2019-217, fixed in 2.10.1"),
        ([SKIPPED], False, 0, "could NOT be audited"),
        ([SKIPPED, CLEAN], True, 1, "could NOT be audited"),
    ],
)
def test_unaudited_pins_are_reported_and_vulnerable_pins_fail(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: list[dict[str, object]],
    strict: bool,
    status: int,
    message: str,
) -> None:
    monkeypatch.setattr(audit, "pins", lambda _text: ["x==1"] * len(found))
    monkeypatch.setattr(audit, "pip_audit", lambda _wanted: found)
    assert audit.main(["--strict"] if strict else []) == status
    assert message in capsys.readouterr().out
