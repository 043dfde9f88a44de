"""The conformance suite: our server passes it, and faulty servers fail the matching checks."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.faults import (
    Averages,
    Fault,
    FollowsTraining,
    IgnoresSamplingParameter,
    NeverHolds,
    NewIdsForRepeats,
    OddMetrics,
    OtherLogprobs,
    RefusesOutOfOrder,
    ReplacesLosses,
    ServerErrorForEverything,
    in_front_of,
)
from server.tenants import new_key
from serving import TINY, Server, serving
from tinkex.conformance import CHECKS, Remote, Report, Verdict, run

# The first test that uses the report waits for all checks.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def report(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """All checks against a server with keys, so that none has to be skipped."""
    data = tmp_path_factory.mktemp("keyed")
    key, other = (asyncio.run(new_key(data, owner)) for owner in ("alice", "bob"))
    with serving(f"{TINY}={tiny_model}", data=data) as server:
        return run(Remote(server.url, key=key, other_key=other))


@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_our_server_passes(name: str, report: Report) -> None:
    outcome = next(outcome for outcome in report.outcomes if outcome.check.name == name)
    assert outcome.verdict is Verdict.PASS, outcome.seen


#: Fault -> the checks that must fail.
FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "averages": (
        Averages(),
        {"a_loss_is_the_weighted_sum", "a_datum_twice_counts_twice"}
        | {"cutting_a_batch_changes_nothing"},
    ),
    "runs unknown losses as cross-entropy": (
        ReplacesLosses(),
        {"an_unknown_loss_is_the_users_failure", "a_step_after_a_failed_pass_fails_and_clears"},
    ),
    "ignores seeds": (IgnoresSamplingParameter("seed"), {"seeds_are_honoured"}),
    "ignores stops": (IgnoresSamplingParameter("stop"), {"stops_are_honoured"}),
    "ignores temperature": (
        IgnoresSamplingParameter("temperature"),
        {"temperature_zero_is_greedy", "logprobs_are_of_the_tempered_distribution"},
    ),
    "ignores what it does not know": (
        IgnoresSamplingParameter("frequency_penalty"),
        {"an_unknown_sampling_parameter_is_refused"},
    ),
    "new ids for repeats": (
        NewIdsForRepeats(),
        {"a_repeated_step_runs_once", "repeated_creations_are_the_same_thing"},
    ),
    "samplers follow training": (
        FollowsTraining(),
        {"a_saved_sampler_does_not_follow_training"},
    ),
    "refuses steps that come early": (
        RefusesOutOfOrder(),
        {"steps_run_by_number_whatever_the_arrival"},
    ),
    "metrics without reducers": (OddMetrics(), {"metrics_have_names_clients_can_merge"}),
    "samples with other weights": (OtherLogprobs(), {"sampled_logprobs_are_trained_logprobs"}),
    "answers polls at once": (NeverHolds(), {"a_poll_is_held_and_wakes"}),
    "500 for everything": (
        ServerErrorForEverything(),
        {"malformed_requests_name_the_field", "unknown_things_are_not_found"},
    ),
}

#: Checks that no fault affects; they show that the proxy itself breaks nothing.
UNTOUCHED = {"telemetry_is_accepted", "client_configuration_is_answered"}


@pytest.fixture(params=FAULTS.items(), ids=lambda fault: fault[0])
def wrong(request: pytest.FixtureRequest, server: Server) -> Iterator[tuple[Remote, set[str]]]:
    _, (fault, failing) = request.param
    with in_front_of(server.url, fault) as url:
        yield Remote(url), failing


def test_a_wrong_server_fails_the_right_checks(wrong: tuple[Remote, set[str]]) -> None:
    remote, failing = wrong
    found = run(remote, only=failing | UNTOUCHED)
    assert found.named(Verdict.FAIL) == failing, [
        (outcome.check.name, outcome.seen) for outcome in found.outcomes
    ]
    assert found.named(Verdict.PASS) == UNTOUCHED


def test_a_proxy_without_a_fault_passes(server: Server) -> None:
    with in_front_of(server.url, Fault()) as url:
        assert run(Remote(url), only={"S1", "S6"}).passed


def test_every_check_says_what_is_right() -> None:
    assert len(CHECKS) >= 35
    for check in CHECKS:
        assert check.sentence.endswith("."), check.name
        assert check.requirements, check.name


def tinkex(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tinkex.cli.main", "conformance", *args],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_the_command_prints_a_table_with_ids(server: Server) -> None:
    done = tinkex(server.url, "--only", "S5")
    assert done.returncode == 0, done.stderr
    assert "S5" in done.stdout
    assert "1 check: 1 pass, 0 fail, 0 skip" in done.stderr


@pytest.mark.parametrize(
    "option", [["--json", "--key", "tml-x"], ["-f", "json", "--api-key", "tml-x"]]
)
def test_the_command_prints_json(server: Server, option: list[str]) -> None:
    done = tinkex(server.url, "--only", "S5", *option)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert report["checks"][0]["requirements"] == ["S5"]


def test_a_failed_check_is_an_exit_status(server: Server) -> None:
    with in_front_of(server.url, ServerErrorForEverything()) as url:
        done = tinkex(url, "--only", "malformed_requests_name_the_field")
    assert done.returncode == 1
    assert "fail" in done.stdout


def test_an_address_without_a_server_is_an_error_with_a_hint() -> None:
    done = tinkex("http://127.0.0.1:9")
    assert done.returncode == 1
    assert "does not answer as a Tinker server" in done.stderr
    assert "hint:" in done.stderr


def test_pytest_runs_the_checks_too(server: Server, tmp_path: Path) -> None:
    options = ["-k", "unknown_base_model or keys_keep", "-q", "-c", os.devnull]
    options += ["-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--pyargs", "tinkex.conformance", *options],
        env={**os.environ, "TINKER_BASE_URL": server.url},
        cwd=tmp_path,  # outside this repository, so that its pytest settings do not apply
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 skipped" in done.stdout


def test_the_suite_needs_no_torch() -> None:
    code = "import sys, tinkex.conformance; len(tinkex.conformance.CHECKS); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "transformers", "fastapi", "sqlalchemy", "click", "pytest"} & set(done)
