"""What every official SDK must be able to do on our server, judged by what `capabilities_program.py` printed."""

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
    """What the program printed, run in the environment of that SDK version."""
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
    """Sixty steps memorise the data: the loss halves within 20 and ends under 0.1 nat a token."""
    losses = run["losses"]
    assert len(losses) == 60
    assert min(losses[:20]) < losses[0] / 2
    assert losses[-1] < 0.1


def samples(run: Run) -> None:
    """Greedy samples are the training text, twice the same."""
    for text, (first, second) in zip(run["texts"], run["sampled"], strict=True):
        assert text[:4] + first == text
        assert first == second


def samples_what_it_trained(run: Run) -> None:
    """At temperature 0 the untempered logprobs are reported; they come from the same weights."""
    width = len(run["texts"][0]) - 1
    for n, sampled in enumerate(run["sampled_logprobs"]):
        forward = run["logprobs"][n * width : (n + 1) * width]
        assert near(sampled, forward[3:], 1e-4)


def computes_logprobs(run: Run) -> None:
    """Prompt logprobs start with nothing and are those of a forward pass."""
    first, *rest = run["prompt_logprobs"]
    assert first is None
    assert near(rest, run["logprobs"][: len(rest)], 1e-4)


def saves_and_loads(run: Run) -> None:
    """A second client continues from the saved state, and so does one made from it."""
    assert run["path"].startswith("tinker://")
    assert run["path"].endswith("/weights/memorised")
    assert near(run["loaded_logprobs"], run["logprobs"], 1e-5)
    assert near(run["from_state_logprobs"], run["logprobs"], 1e-5)
    assert not near(run["untrained_logprobs"], run["logprobs"], 1e-1)


def lists_and_deletes(run: Run) -> None:
    """Checkpoints are listed, published, taken back and deleted; a deleted one cannot be loaded."""
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
    """A loss written in the client trains like the built-in one that is the same."""
    found = run["custom_loss"]
    assert near(found["custom"], found["built_in"], 1e-4)
    assert "by_hand" in found["custom_metrics"]


def knows_what_is_served(run: Run) -> None:
    """The server says what it serves, and metrics have the names clients merge by."""
    assert run["served"] == [TINY]
    assert run["model_name"] == TINY
    assert all(name.count(":") == 1 for name in run["step_metrics"])


#: Column of the matrix -> its check.
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
