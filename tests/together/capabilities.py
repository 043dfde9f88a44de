"""What every official SDK must be able to do on the server: checks of the output of `capabilities_program.py`."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sdk_envs
from serving import TINY, Server
from together.official_sdk import run_program

PROGRAM = Path(__file__).with_name("capabilities_program.py")

Run = dict[str, Any]


def run_capabilities(version: str, server: Server, vocabulary: int) -> Run:
    """Runs the program with one SDK version; its output."""
    torch = sdk_envs.ensure_torch()
    result = run_program(
        version, PROGRAM, TINY, str(vocabulary), torch, server=server, timeout_s=140
    )
    assert result["version"] == version
    return result


def near(found: Sequence[float], expected: Sequence[float], within: float) -> bool:
    return len(found) == len(expected) and all(
        math.isclose(a, b, abs_tol=within, rel_tol=0) for a, b in zip(found, expected, strict=True)
    )


def trains(run: Run) -> None:
    """Sixty steps memorize the data: the loss halves within 20 and ends below 0.1 nat per token."""
    losses = run["losses"]
    assert len(losses) == 60
    assert min(losses[:20]) < losses[0] / 2
    assert losses[-1] < 0.1


def samples(run: Run) -> None:
    """Greedy samples reproduce the training text, twice."""
    for text, (first, second) in zip(run["texts"], run["sampled"], strict=True):
        assert text[:4] + first == text
        assert first == second


def samples_what_it_trained(run: Run) -> None:
    """At temperature 0 samples have the logprobs of temperature 1, and those of the trained weights."""
    width = len(run["texts"][0]) - 1
    for n, sampled in enumerate(run["sampled_logprobs"]):
        forward = run["logprobs"][n * width : (n + 1) * width]
        assert near(sampled, forward[3:], 1e-4)


def computes_logprobs(run: Run) -> None:
    """Prompt logprobs equal those of a forward pass; the first one is None."""
    first, *rest = run["prompt_logprobs"]
    assert first is None
    assert near(rest, run["logprobs"][: len(rest)], 1e-4)


def saves_and_loads(run: Run) -> None:
    """A client that loads the saved state, and one created from it, continue from it."""
    assert run["path"].startswith("tinker://")
    assert run["path"].endswith("/weights/memorised")
    assert near(run["loaded_logprobs"], run["logprobs"], 1e-5)
    assert near(run["from_state_logprobs"], run["logprobs"], 1e-5)
    assert not near(run["untrained_logprobs"], run["logprobs"], 1e-1)


def lists_and_deletes(run: Run) -> None:
    """Checkpoints are listed, published, unpublished and deleted; a deleted one cannot be loaded."""
    found = run["checkpoints"]
    model_id = run["path"].split("/")[2]
    paths = [path for path, _, _ in found["before"]]
    assert run["path"] in paths
    assert [run["path"], "training", False] in found["before"]
    assert run["path"] in found["mine"]
    assert model_id in found["runs"]
    assert found["run"] == model_id
    assert found["published"]
    assert found["unpublished"]
    assert [path for path, _, _ in found["after"]] == [p for p in paths if p != run["path"]]
    assert run["path"] in found["loading_what_was_deleted"]


def has_custom_losses(run: Run) -> None:
    """A custom loss in the client trains like the equal built-in loss."""
    found = run["custom_loss"]
    assert near(found["custom"], found["built_in"], 1e-4)
    assert "by_hand" in found["custom_metrics"]


def knows_what_is_served(run: Run) -> None:
    """The server lists its models, and metrics have the suffixes that clients merge by."""
    assert run["served"] == [TINY]
    assert run["model_name"] == TINY
    assert all(name.count(":") == 1 for name in run["step_metrics"])


#: Columns of the matrix and their checks.
CAPABILITIES: dict[str, Callable[[Run], None]] = {
    "train": trains,
    "sample": samples,
    "sampled = trained logprobs": samples_what_it_trained,
    "compute_logprobs": computes_logprobs,
    "save, load": saves_and_loads,
    "list, publish, delete": lists_and_deletes,
    "custom loss": has_custom_losses,
    "capabilities, info": knows_what_is_served,
}
