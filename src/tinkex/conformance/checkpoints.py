"""Checks that checkpoints stay as saved, load exactly, and do not affect the model in training."""

from tinkex.conformance.raw_client import TEXTS, Failure, Remote, max_difference
from tinkex.conformance.registry import check, expect

#: Maximum difference of logprobs of the same weights.
SAME = 1e-4
#: Minimum difference of logprobs after training.
MOVED = 1e-2


@check("S2")
def a_saved_sampler_does_not_follow_training(remote: Remote) -> str:
    """A sampler gives the same logprobs after further steps; a new sampler gives others."""
    model = remote.model()
    model.train(2)
    old = model.sampler()
    first = old.prompt_logprobs(TEXTS[0])[1:]
    model.train(3)
    new = model.sampler().prompt_logprobs(TEXTS[0])[1:]
    again = old.prompt_logprobs(TEXTS[0])[1:]
    expect(
        max_difference(first, new) > MOVED,
        f"three steps changed a new sampler by {max_difference(first, new):.3g}",
    )
    drift = max_difference(first, again)
    expect(drift < SAME, f"the old sampler changed by {drift:.3g} during training")
    return f"old sampler changed by {drift:.2g}, new by {max_difference(first, new):.2g}"


@check("S2")
def sampling_leaves_training_alone(remote: Remote) -> str:
    """Sampling from an old checkpoint does not change the weights in training."""
    model = remote.model()
    model.train(1)
    old = model.sampler()
    model.train(3)
    before = model.logprobs()
    old.sample(TEXTS[0], max_tokens=4, stop=[])
    difference = max_difference(before, model.logprobs())
    expect(difference < SAME, f"training logprobs changed by {difference:.3g}")
    return f"changed by {difference:.2g}"


@check("S2", "S13")
def a_loaded_state_is_what_was_saved(remote: Remote) -> str:
    """A model that loads a state has the logprobs of the first model at the time of the save."""
    model = remote.model()
    model.train(2)
    saved = model.logprobs()
    path = model.save_state("before")
    model.train(2)
    other = remote.model(seed=99)
    loaded = other.load(path)
    expect(not isinstance(loaded, Failure), f"load_weights returned {loaded!r}")
    difference = max_difference(other.logprobs(), saved)
    expect(difference < SAME, f"logprobs differ by {difference:.3g} from those at the save")
    return f"within {difference:.2g}"


@check("needs: training")
def a_state_with_its_optimizer_goes_on_as_if_uninterrupted(remote: Remote) -> str:
    """After loading with the optimizer state, training continues as in the original run."""
    model = remote.model()
    model.train(3)
    path = model.save_state("resume")
    other = remote.model(seed=98)
    loaded = other.load(path, optimizer=True)
    expect(not isinstance(loaded, Failure), f"load_weights returned {loaded!r}")
    model.train(2)
    other.train(2)
    difference = max_difference(model.logprobs(), other.logprobs())
    expect(difference < SAME, f"logprobs differ by {difference:.3g} two steps later")
    return f"within {difference:.2g} two steps later"
