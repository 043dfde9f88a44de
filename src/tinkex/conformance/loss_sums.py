"""Checks that losses are sums: linear in the weights, and independent of how a batch is split.

Adam normalizes the gradient. With an `eps` far above its size, a step is the learning rate times
the gradient over `eps`: plain gradient descent, where a gradient twice as large is visible.
"""

from collections.abc import Sequence

from tinkex.conformance.raw_client import (
    TEXTS,
    Floats,
    Remote,
    Unexpected,
    all_logprobs,
    batch,
    max_difference,
)
from tinkex.conformance.registry import check, expect
from tinkex.wire.inputs import Datum

EPS = 1e6
#: Learning rates (divided by EPS) that are tried until a step has a visible effect.
RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
#: A change of logprobs that is visible, yet small enough to be almost linear.
VISIBLE = 0.02
#: Tolerance, relative to the change.
EQUAL = 0.02


def descend(remote: Remote, rate: float, *passes: Sequence[Datum]) -> Floats:
    """Logprobs after one step of gradient descent over the passes, on a new model."""
    model = remote.model(seed=11)
    for data in passes:
        model.backward(data)
    model.step(learning_rate=rate * EPS, eps=EPS)
    return model.logprobs()


def start(remote: Remote) -> tuple[Floats, float, Floats]:
    """Initial logprobs, a rate at which a step is visible, and logprobs after it; cached."""
    cached: tuple[Floats, float, Floats] | None = getattr(remote, "descent", None)
    if cached is None:
        before = remote.model(seed=11).logprobs()
        for rate in RATES:
            after = descend(remote, rate, batch())
            if max_difference(before, after) > VISIBLE:
                cached = before, rate, after
                remote.descent = cached  # type: ignore[attr-defined]
                break
        else:
            raise Unexpected("no learning rate changed the logprobs: steps have no effect")
    return cached


def compare(found: Floats, expected: Floats, moved: float) -> str:
    difference = max_difference(found, expected) / moved
    expect(difference < EQUAL, f"differs by {difference:.0%} of the change")
    return f"equal within {difference:.1%} of the change"


@check("S1")
def a_loss_is_the_weighted_sum(remote: Remote) -> str:
    """`loss:sum` is the negative sum of weight times logprob, and doubles with the weights."""
    model = remote.model()
    one, two = model.forward(batch()), model.forward(batch(weight=2.0))
    expected = -float(all_logprobs(one).astype("float64").sum())
    loss, doubled = one.metrics["loss:sum"], two.metrics["loss:sum"]
    expect(abs(loss - expected) <= 1e-3 * abs(expected), f"loss:sum {loss}, not {expected:.6g}")
    expect(abs(doubled - 2 * loss) <= 1e-3 * abs(loss), f"weights 2 give {doubled}, not {2 * loss}")
    return f"{loss:.5g}, with weights 2 {doubled:.5g}"


@check("S1")
def twice_the_weight_is_twice_the_gradient(remote: Remote) -> str:
    """A step with weights 2 equals a step with weights 1 at twice the learning rate."""
    before, rate, after = start(remote)
    expected = descend(remote, 2 * rate, batch())
    found = descend(remote, rate, batch(weight=2.0))
    expect(
        max_difference(expected, after) > VISIBLE / 4, "doubling the learning rate had no effect"
    )
    return compare(found, expected, max_difference(before, after))


@check("S1")
def a_datum_twice_counts_twice(remote: Remote) -> str:
    """A batch that contains every datum twice equals a batch with weights 2."""
    before, rate, after = start(remote)
    expected = descend(remote, rate, batch(weight=2.0))
    found = descend(remote, rate, batch([*TEXTS, *TEXTS]))
    return compare(found, expected, max_difference(before, after))


@check("S1")
def cutting_a_batch_changes_nothing(remote: Remote) -> str:
    """One request per datum gives the same gradient as one request for all."""
    before, rate, after = start(remote)
    found = descend(remote, rate, *([datum] for datum in batch()))
    return compare(found, after, max_difference(before, after))


@check("S1")
def a_negative_weight_pushes_the_other_way(remote: Remote) -> str:
    """A pass and the same pass with weights -1 cancel out: the step has no effect."""
    before, rate, after = start(remote)
    found = descend(remote, rate, batch(), batch(weight=-1.0))
    return compare(found, before, max_difference(before, after))


@check("S11")
def seeds_of_adapters_are_honoured(remote: Remote) -> str:
    """The same adapter seed gives the same training, another seed a different one."""
    results = []
    for seed in (21, 21, 22):
        model = remote.model(seed=seed)
        model.train(2)
        results.append(model.logprobs())
    same, other = max_difference(results[0], results[1]), max_difference(results[0], results[2])
    expect(same < 1e-4, f"two models of seed 21 differ by {same:.3g} after the same steps")
    expect(other > 10 * max(same, 1e-7), f"seeds 21 and 22 differ only by {other:.3g}")
    return f"same seed {same:.2g} apart, another {other:.2g}"
