"""Turns rows into tokens with weights, through the chat template of the model, and into batches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.data.rows import Row, check

if TYPE_CHECKING:
    from types import ModuleType

    from tinkex.types import Datum

S = TypeVar("S", bound=Sized)
T = TypeVar("T")

#: Batches whose examples are sorted by length together.
SORTED_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens, and how much each of them counts as a target: 0 is read, but not learned."""

    tokens: list[int]
    weights: list[float]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def weight(self) -> float:
        """The sum of the weights that count: the first token is never a target."""
        return sum(self.weights[1:])

    def datum(self, types: ModuleType | None = None) -> Datum:
        """
        The example for `cross_entropy`: the target of each position is the next token.

        Args:
            types: The types of the SDK in use, `tinkex.types` or `tinker.types`. None: tinkex.

        Returns:
            A `Datum` of that SDK.

        Example:
            datum = example.datum()
        """
        if types is None:
            from tinkex import types as ours

            types = ours
        count = len(self.tokens) - 1
        made: Datum = types.Datum(
            model_input=types.ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(
                    data=self.tokens[1:], dtype="int64", shape=[count]
                ),
                "weights": types.TensorData(data=self.weights[1:], dtype="float32", shape=[count]),
            },
        )
        return made


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt. Only the answers have weight."""

    chosen: Example
    rejected: Example

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


def examples(
    tokenizer: Any,
    row: Row | Mapping[str, Any],
    *,
    train_on: Collection[str] = ("assistant",),
    plain: bool = False,
) -> list[Example]:
    """
    The training examples of a chat, or of a prompt with its completion.

    A chat is one example in which all messages of the roles in `train_on` have weight 1, or the
    `weight` that the message has. If the chat template changes earlier messages when later ones
    follow (Qwen3 removes their reasoning), it is one example for each trained message, so that
    each is learned after the tokens that the model sees when it is sampled.

    Args:
        tokenizer: The tokenizer of the model, of transformers or tinkex.
        row: A row, or its fields.
        train_on: Roles that are learned.
        plain: Whether texts of prompt and completion are used as they are, followed by the end of
            text. Else they are a message of the user and one of the assistant.

    Returns:
        The examples.

    Raises:
        DataError: The row is not of these kinds, or has nothing to learn.

    Example:
        found = data.examples(tokenizer, {"prompt": "Who are you?", "completion": "A pirate."})
    """
    row = row if isinstance(row, Row) else check(row)
    fields = row.fields
    if row.kind == "chat":
        found = _chat(tokenizer, row, fields["messages"], train_on)
    elif row.kind == "completion":
        found = _answered(tokenizer, row, "completion", plain)
    else:
        raise row.error("", f"is a {row.kind}. Expected a chat, or a prompt with a completion")
    if not any(example.weight for example in found):
        raise row.error(
            "messages" if row.kind == "chat" else "completion",
            f"there is nothing to learn: no message of {' or '.join(train_on)} has weight",
        )
    return found


def pair(tokenizer: Any, row: Row | Mapping[str, Any], *, plain: bool = False) -> Pair:
    """
    The two answers of a preference.

    Without `prompt`, the messages with which both conversations begin are the prompt.

    Args:
        tokenizer: The tokenizer of the model.
        row: A row, or its fields: prompt, chosen and rejected.
        plain: Whether texts are used as they are; see `examples`.

    Returns:
        Both, as examples.

    Raises:
        DataError: The row is no preference, or an answer is not one message after the prompt.

    Example:
        pirate = {"prompt": "Who are you?", "chosen": "Arr, a pirate!", "rejected": "A model."}
        found = data.pair(tokenizer, pirate)
    """
    row = row if isinstance(row, Row) else check(row)
    if row.kind != "preference":
        raise row.error("", f"is a {row.kind}. Expected prompt, chosen and rejected")
    if "prompt" not in row.fields:
        chosen, rejected = row.fields["chosen"], row.fields["rejected"]
        both = zip(chosen, rejected, strict=False)
        shared = len(list(itertools.takewhile(lambda two: two[0] == two[1], both)))
        if not shared:
            raise row.error("chosen", "does not begin with the same message as rejected")
        fields = {
            **row.fields,
            "prompt": chosen[:shared],
            "chosen": chosen[shared:],
            "rejected": rejected[shared:],
        }
        row = Row(kind="preference", fields=fields, where=row.where)
    sides = []
    for name in ("chosen", "rejected"):
        found = _answered(tokenizer, row, name, plain) if row.fields[name] else []
        if len(found) != 1 or not found[0].weight:
            raise row.error(name, "must have one answer of the assistant after the prompt")
        sides.append(found[0])
    return Pair(*sides)


def prompt_tokens(
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    plain: bool = False,
) -> list[int]:
    """
    The tokens after which the model is to answer.

    Args:
        tokenizer: The tokenizer of the model.
        prompt: A text, which is a message of the user, or a conversation.
        tools: Tools for the chat template.
        plain: Whether a text is used as it is.

    Returns:
        The tokens.

    Example:
        tokens = data.prompt_tokens(tokenizer, "Who are you?")
    """
    if isinstance(prompt, str) and plain:
        return list(tokenizer.encode(prompt))
    return _encode(tokenizer, _rendered(tokenizer, _messages("user", prompt), tools, True))


def batches(items: Sequence[S], size: int, *, seed: int | str = 0) -> list[list[S]]:
    """
    One epoch: every item once, in shuffled batches of items of similar length.

    Args:
        items: What has a length, such as examples and pairs.
        size: Items in a batch; the last one of an epoch may have fewer.
        seed: The same seed gives the same batches.

    Returns:
        The batches.

    Example:
        for batch in data.batches(["one", "three", "two"], 2):
            print(batch)
    """
    if size < 1:
        raise ValueError(f"size is {size}; a batch has at least one item.")
    chooser = random.Random(seed)
    order = chooser.sample(range(len(items)), len(items))
    made = []
    for start in range(0, len(order), size * SORTED_TOGETHER):
        near = sorted(order[start : start + size * SORTED_TOGETHER], key=lambda n: len(items[n]))
        made += [near[at : at + size] for at in range(0, len(near), size)]
    chooser.shuffle(made)
    return [[items[index] for index in batch] for batch in made]


def stream(items: Sequence[S], size: int, *, seed: int = 0, start: int = 0) -> Iterator[list[S]]:
    """
    Batches without end, epoch after epoch. Batch N is the same wherever the stream starts.

    Args:
        items: What has a length.
        size: Items in a batch.
        seed: The same seed gives the same batches.
        start: Number of the first batch, for a run that goes on.

    Returns:
        An iterator of batches.

    Example:
        first = next(data.stream(["one", "three", "two"], 2))
    """
    if not items:
        raise ValueError("there are no items to make batches of.")
    per_epoch = -(-len(items) // size)
    for epoch in itertools.count(start // per_epoch):
        skipped = start % per_epoch if epoch == start // per_epoch else 0
        yield from batches(items, size, seed=f"{seed}/{epoch}")[skipped:]


def split(items: Sequence[T], fraction: float, *, seed: int = 0) -> tuple[list[T], list[T]]:
    """
    Items to train on, and items that are held out.

    Args:
        items: The items.
        fraction: Share that is held out: 0.1 is a tenth, at least one item.
        seed: The same seed holds out the same items.

    Returns:
        Both lists, in the order of `items`.

    Raises:
        ValueError: Nothing would be left to train on.

    Example:
        kept, held_out = data.split(range(20), 0.1)
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"fraction is {fraction}; it must be from 0 to below 1.")
    count = max(1, round(len(items) * fraction)) if fraction else 0
    if count >= len(items):
        raise ValueError(
            f"{len(items)} items are too few to hold out {count}. Add data, or hold out nothing."
        )
    held = set(random.Random(f"held out {seed}").sample(range(len(items)), count))
    kept = [item for index, item in enumerate(items) if index not in held]
    return kept, [items[index] for index in sorted(held)]


# -- rendering -------------------------------------------------------------------------------------


def _messages(role: str, value: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _answered(tokenizer: Any, row: Row, name: str, plain: bool) -> list[Example]:
    """The answer in field `name` to the prompt."""
    prompt, answer = row.fields["prompt"], row.fields[name]
    if plain and isinstance(prompt, str) and isinstance(answer, str):
        return [_plain(tokenizer, prompt, answer)]
    before = [{**message, "weight": 0} for message in _messages("user", prompt)]
    return _chat(tokenizer, row, [*before, *_messages("assistant", answer)], ("assistant",))


def _plain(tokenizer: Any, prompt: str, answer: str) -> Example:
    before = list(tokenizer.encode(prompt))  # with BOS, if the model has one
    after = _continued(tokenizer, _encode(tokenizer, prompt), prompt, prompt + answer)
    if tokenizer.eos_token_id is not None:
        after.append(tokenizer.eos_token_id)
    return Example(before + after, [0.0] * len(before) + [1.0] * len(after))


def _chat(
    tokenizer: Any, row: Row, messages: Sequence[Mapping[str, Any]], train_on: Collection[str]
) -> list[Example]:
    weights = [
        float(message.get("weight", 1)) if message["role"] in train_on else 0.0
        for message in messages
    ]
    bare = [{k: v for k, v in message.items() if k != "weight"} for message in messages]
    tools = row.fields.get("tools")
    ends = _special_ids(tokenizer)
    found: list[Example] = []
    tokens: list[int] = []
    counts: list[float] = []
    text = ""
    for index, weight in enumerate(weights):
        if not weight:
            continue
        answer = bare[index]["role"] == "assistant"
        try:
            before = _rendered(tokenizer, bare[:index], tools, answer) if index else ""
            after = _rendered(tokenizer, bare[: index + 1], tools, False)
        except ImportError:
            raise
        except Exception as error:  # the template is a program that may refuse a conversation
            raise row.error(f"messages[{index}]", f"the chat template fails: {error}") from error
        if not before.startswith(text):  # the template changed earlier messages
            found.append(Example(tokens, counts))
            tokens, counts, text = [], [], ""
        # A template may open the answer of a prompt with more than it repeats of a finished one.
        same = itertools.takewhile(lambda two: two[0] == two[1], zip(before, after, strict=False))
        before = before[: sum(1 for _ in same)]
        if len(before) < len(text):
            raise row.error(
                f"messages[{index}]", "the chat template does not keep the messages before it"
            )
        read = _continued(tokenizer, tokens, text, before)
        tokens, counts = tokens + read, counts + [0.0] * len(read)
        learned = _continued(tokenizer, tokens, before, after)
        text = after
        # What follows the end of the turn is never sampled: ChatML has a line break there.
        last = max((n for n, token in enumerate(learned) if token in ends), default=-1)
        if 0 <= last < len(learned) - 1 and _is_blank(tokenizer, learned[last + 1 :]):
            learned, text = learned[: last + 1], after.rstrip()
        tokens, counts = tokens + learned, counts + [weight] * len(learned)
    if tokens:
        found.append(Example(tokens, counts))
    return found


def _rendered(tokenizer: Any, messages: Any, tools: Any, answer: bool) -> str:
    optional = {} if tools is None else {"tools": tools}
    return str(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=answer, tokenize=False, **optional
        )
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _continued(tokenizer: Any, tokens: list[int], text: str, longer: str) -> list[int]:
    """
    The tokens that follow `tokens`, which encode `text`, in `longer`.

    If a token of the longer text would cross the end of the shorter one, the rest is encoded by
    itself: a model continues the tokens of its prompt, not its text.
    """
    if longer == text:
        return []
    whole = _encode(tokenizer, longer)
    if whole[: len(tokens)] == tokens:
        return whole[len(tokens) :]
    return _encode(tokenizer, longer[len(text) :])


def _special_ids(tokenizer: Any) -> set[int]:
    """Ids that text cannot contain by chance, such as the end of a turn."""
    return {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}


def _is_blank(tokenizer: Any, tokens: list[int]) -> bool:
    return not str(tokenizer.decode(tokens)).strip()
