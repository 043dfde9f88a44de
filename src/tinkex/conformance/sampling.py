"""Checks of sampling: seeds, stops, temperatures, and logprobs that agree with training."""

import math

from tinkex.conformance.raw_client import (
    TEXTS,
    Failure,
    Remote,
    TrainingModel,
    Unexpected,
    max_difference,
)
from tinkex.conformance.registry import Skipped, check, expect
from tinkex.wire.sampling import SampledSequence

PROMPT = TEXTS[0][:6]
#: Tolerance between sampling and training logprobs: different kernels may round differently.
TOLERANCE = 0.02


def trained(remote: Remote) -> TrainingModel:
    model = remote.model()
    model.train(3)
    return model


def tokens(sequence: SampledSequence) -> list[int]:
    return [int(token) for token in sequence.tokens]


def forward_logprobs(
    model: TrainingModel, prompt: list[int], sequence: SampledSequence
) -> list[float]:
    """The logprobs of the sampled tokens in a forward pass."""
    found = model.logprobs([[*prompt, *tokens(sequence)]])
    return [float(value) for value in found[len(prompt) - 1 :]]


@check("S13")
def sampled_logprobs_are_trained_logprobs(remote: Remote) -> str:
    """At temperature 1 the logprobs of sampled tokens are those of a forward pass over them."""
    model = trained(remote)
    found = model.sampler().sample(PROMPT, samples=2, max_tokens=12, seed=3, stop=[])
    worst = 0.0
    for sequence in found.sequences:
        expect(sequence.logprobs_np is not None, "the response has no logprobs")
        assert sequence.logprobs_np is not None
        expected = forward_logprobs(model, PROMPT, sequence)
        expect(len(expected) == len(sequence.logprobs_np), "not one logprob for each token")
        pairs = zip(expected, sequence.logprobs_np, strict=True)
        worst = max(worst, *(abs(a - float(b)) for a, b in pairs))
    expect(worst < TOLERANCE, f"they differ by up to {worst:.3g}")
    return f"largest difference {worst:.2g}"


@check("S13", "needs: sampling")
def prompt_logprobs_are_trained_logprobs(remote: Remote) -> str:
    """`prompt_logprobs` has one entry per token, null first, and agrees with a forward pass."""
    model = trained(remote)
    found = model.sampler().prompt_logprobs(TEXTS[1])
    expect(len(found) == len(TEXTS[1]), f"{len(found)} entries for {len(TEXTS[1])} tokens")
    expect(math.isnan(found[0]), f"the first entry is {found[0]}, not null")
    difference = max_difference(found[1:], model.logprobs([TEXTS[1]]))
    expect(difference < TOLERANCE, f"they differ by {difference:.3g}")
    return f"largest difference {difference:.2g}"


@check("S12")
def seeds_are_honoured(remote: Remote) -> str:
    """The same seed gives the same tokens; another seed or another sample gives others."""
    sampler = remote.sampler(base_model=remote.base_model)

    def draw(seed: int) -> list[list[int]]:
        found = sampler.sample(PROMPT, samples=2, max_tokens=12, seed=seed, stop=[])
        return [tokens(sequence) for sequence in found.sequences]

    first, again, other = draw(1), draw(1), draw(2)
    expect(first == again, f"seed 1 gave {first}, then {again}")
    expect(first != other, f"seeds 1 and 2 both gave {first}")
    expect(first[0] != first[1], f"both samples of one request are {first[0]}")
    return "the same for the same seed, others for another seed and sample"


@check("S12")
def temperature_zero_is_greedy(remote: Remote) -> str:
    """At temperature 0 the most likely token is chosen for any seed, with its plain logprob."""
    model = trained(remote)
    sampler = model.sampler()
    draws = [
        sampler.sample(PROMPT, max_tokens=8, temperature=0.0, seed=seed, stop=[]).sequences[0]
        for seed in (1, 2)
    ]
    first, second = (tokens(draw) for draw in draws)
    expect(first == second, f"two seeds gave {first} and {second}")
    expect(draws[0].logprobs_np is not None, "no logprobs at temperature 0")
    assert draws[0].logprobs_np is not None
    expected = forward_logprobs(model, PROMPT, draws[0])
    worst = max(abs(a - float(b)) for a, b in zip(expected, draws[0].logprobs_np, strict=True))
    expect(worst < TOLERANCE, f"its logprobs differ from a forward pass by {worst:.3g}")
    return f"greedy; logprobs within {worst:.2g}"


@check("S12")
def logprobs_are_of_the_tempered_distribution(remote: Remote) -> str:
    """At temperature T the logprobs of two first tokens differ by 1/T of their difference at 1."""
    model = trained(remote)
    sampler = model.sampler()
    temperature = 2.0
    found = sampler.sample(
        PROMPT, samples=8, max_tokens=1, temperature=temperature, seed=1, stop=[]
    )
    seen: dict[int, tuple[float, float]] = {}
    for sequence in found.sequences:
        first = tokens(sequence)[0]
        if sequence.logprobs_np is not None and first not in seen:
            plain = forward_logprobs(model, PROMPT, sequence)[0]
            seen[first] = float(sequence.logprobs_np[0]), plain
    if len(seen) < 2:
        raise Skipped("eight samples at temperature 2 gave only one token")
    (hot, plain), *others = seen.values()
    worst = max(abs((hot - h) - (plain - p) / temperature) for h, p in others)
    expect(worst < TOLERANCE, f"off by {worst:.3g} at temperature 2")
    return f"{len(seen)} tokens, off by {worst:.2g} at most"


@check("S12", "needs: sampling")
def stops_are_honoured(remote: Remote) -> str:
    """A stop token ends the sample and is its last token; with `[]` nothing does, not even EOS."""
    sampler = remote.sampler(base_model=remote.base_model)
    free = sampler.sample(PROMPT, max_tokens=12, seed=4, stop=[]).sequences[0]
    drawn = tokens(free)
    expect(
        len(drawn) == 12 and free.stop_reason == "length",
        f"stop [] gave {len(drawn)} tokens and {free.stop_reason!r}, not 12 and 'length'",
    )
    position = next((n for n, token in enumerate(drawn) if n and token not in drawn[:n]), None)
    if position is None:
        raise Skipped("the model repeats only one token")
    cut = sampler.sample(PROMPT, max_tokens=12, seed=4, stop=[drawn[position]]).sequences[0]
    expect(
        tokens(cut) == drawn[: position + 1] and cut.stop_reason == "stop",
        f"stop at {drawn[position]} gave {tokens(cut)} and {cut.stop_reason!r} out of {drawn}",
    )
    expect(
        cut.logprobs_np is not None and len(cut.logprobs_np) == position + 1,
        "the stop token has no logprob",
    )
    return f"12 tokens without stops, {position + 1} with one"


@check("S12")
def batch_mates_do_not_change_a_sample(remote: Remote) -> str:
    """A seeded sample gives the same tokens alone and in a batch."""
    sampler = remote.sampler(base_model=remote.base_model)
    alone = tokens(sampler.sample(PROMPT, max_tokens=12, seed=9, stop=[]).sequences[0])
    bodies = [
        sampler.body(text, max_tokens=12, seed=9 if n == 2 else n, stop=[])
        for n, text in enumerate([TEXTS[1], TEXTS[2], PROMPT, TEXTS[3]])
    ]
    ids = [remote.request_id(remote.post("asample", body)) for body in bodies]
    found = [remote.sample_result(request_id) for request_id in ids][2]
    if isinstance(found, Failure):
        raise Unexpected(f"a sample failed: {found}")
    among = tokens(found.sequences[0])
    # Rounding may change one token in a tie, and then all tokens after it.
    pairs = zip(alone, among, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(among))
    expect(same >= 6, f"alone {alone}, in a batch {among}")
    return f"the same {same} of 12 tokens"
