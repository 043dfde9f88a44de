"""Which data go into a micro-batch."""

from collections import Counter

import pytest

from tinkex.engine.training.batch import count_fitting
from tinkex.engine.training.batch_mixer import BatchMixer, ModelQueue, Selection


def queue(model_id: str, *lengths: int, backward: bool = True) -> ModelQueue:
    return ModelQueue(model_id=model_id, backward=backward, lengths=lengths)


def test_small_requests_of_several_models_share_a_batch() -> None:
    cuts = BatchMixer().next_batch([queue("a", 3, 3), queue("b", 5), queue("c", 1, 1, 1)], 100)
    assert cuts == [Selection("a", 2), Selection("b", 1), Selection("c", 3)]


def test_passes_with_and_without_gradients_do_not_mix() -> None:
    queues = [queue("a", 3), queue("b", 3, backward=False), queue("c", 3)]
    assert BatchMixer().next_batch(queues, 100) == [Selection("a", 1), Selection("c", 1)]


def test_a_large_request_leaves_room_for_a_small_one() -> None:
    queues = [queue("large", *[10] * 100), queue("small", 10, 10)]
    assert BatchMixer().next_batch(queues, 100) == [Selection("large", 8), Selection("small", 2)]


def test_a_datum_longer_than_a_batch_runs_alone() -> None:
    mixer = BatchMixer()
    queues = [queue("long", 500, 2), queue("other", 2)]
    assert mixer.next_batch(queues, 100) == [Selection("other", 1)]
    assert mixer.next_batch(queues, 100) == [Selection("long", 1)]
    queues = [queue("long", 2), queue("other", *[2] * 60)]
    assert mixer.next_batch(queues, 100) == [Selection("other", 50)]


def test_a_small_pass_that_has_just_arrived_runs_before_a_long_datum() -> None:
    mixer = BatchMixer()
    flood = [queue(f"long{number}", *[500] * 8) for number in range(3)]
    assert mixer.next_batch(flood, 100) == [Selection("long0", 1)]
    assert mixer.next_batch([*flood, queue("small", 20)], 100) == [Selection("small", 1)]


@pytest.mark.parametrize("lengths", [[3, 3, 3], [2, 9, 2], [9], [1] * 20, [7, 1, 7, 1]])
@pytest.mark.parametrize("max_tokens", [1, 6, 9])
def test_a_single_model_is_batched_like_a_single_pass(lengths: list[int], max_tokens: int) -> None:
    mixer = BatchMixer()
    while lengths:
        (cut,) = mixer.next_batch([queue("m", *lengths)], max_tokens)
        assert cut.size == count_fitting(lengths, max_tokens)
        lengths = lengths[cut.size :]


def test_models_get_equal_tokens_for_long_and_short_data() -> None:
    rows = {"long": [70] * 400, "short": [3] * 10_000, "middling": [20] * 1_400}
    order = list(rows)
    mixer = BatchMixer()
    served: Counter[str] = Counter()
    for _ in range(150):
        cuts = mixer.next_batch([queue(name, *rows[name]) for name in order], 100)
        assert cuts
        for name, count in cuts:
            served[name] += sum(rows[name][:count])
            rows[name] = rows[name][count:]
            order.remove(name)
            order.append(name)
    assert all(rows.values()), "no model ran out of data, so the token counts can be compared"
    assert max(served.values()) <= 1.1 * min(served.values())


def test_idle_time_earns_no_credit() -> None:
    mixer = BatchMixer()
    for _ in range(50):
        mixer.next_batch([queue("busy", 10, 10, 10)], 20)
    cuts = mixer.next_batch([queue("back", *[1] * 100), queue("busy", *[1] * 100)], 20)
    assert cuts == [Selection("back", 10), Selection("busy", 10)]
