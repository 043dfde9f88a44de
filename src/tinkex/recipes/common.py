"""What the recipes share: where a run starts, what a step reports, rates and defaults."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from tinkex.data import prompt_tokens

Method = Literal["sft", "dpo", "rl", "distill"]

#: Checkpoints on the way expire, unless the run goes on from them before.
CHECKPOINT_TTL_S = 7 * 86_400
#: Steps of linear warm-up; the rate then falls linearly to zero.
WARMUP_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every recipe needs to know. Each one adds its own."""

    #: Name of the base model, as the service lists it.
    model: str
    steps: int
    rank: int = 16
    learning_rate: float = 1e-3
    #: Of the adapter's first weights and of the order of the data.
    seed: int = 0
    #: Name of the run in lists.
    name: str = "recipe"
    #: Save the training state after so many steps; 0: only at the end.
    save_every: int = 0
    #: Measure held-out data after so many steps; 0: only before and after training.
    evaluate_every: int = 0


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """For recipes that train on answers of the model itself."""

    prompts_per_step: int = 8
    #: Answers to each prompt.
    group_size: int = 8
    max_tokens: int = 64
    temperature: float = 1.0
    #: Whether prompts are used as they are, without the chat template.
    plain: bool = False


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Where an earlier run stopped."""

    #: `tinker://RUN/weights/NAME`
    checkpoint: str
    #: Steps that it had done.
    step: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step reports. Step 0 has the metrics before training."""

    #: Steps done so far.
    number: int
    metrics: Mapping[str, float]
    #: Tokens that the step trained on.
    tokens: int = 0
    #: The training state after this step, if it was saved.
    checkpoint: str | None = None
    #: Weights to sample from, after the last step.
    sampler: str | None = None


def never() -> bool:
    return False


def types_of(client: Any) -> ModuleType:
    """The types of the SDK that a client belongs to: `tinkex.types` or `tinker.types`."""
    return importlib.import_module(f"{type(client).__module__.partition('.')[0]}.types")


def start(service: Any, settings: Settings, resume: Resume | None) -> Any:
    """A training client: a new adapter, or a saved one with its optimizer."""
    name = {"name": settings.name}
    if resume is not None:
        return service.create_training_client_from_state_with_optimizer(
            resume.checkpoint, user_metadata=name
        )
    return service.create_lora_training_client(
        base_model=settings.model, rank=settings.rank, seed=settings.seed, user_metadata=name
    )


class Saves:
    """The checkpoints of one step, submitted with it, so that they have exactly its weights."""

    def __init__(self, training: Any, settings: Settings, number: int, last: bool) -> None:
        self._state = self._sampler = None
        if last or (settings.save_every and number % settings.save_every == 0):
            # The end of a run stays, and so does the place where it was interrupted.
            ttl = None if last else CHECKPOINT_TTL_S
            self._state = training.save_state(f"step-{number:05}", ttl_seconds=ttl)
        if last:
            self._sampler = training.save_weights_for_sampler(f"step-{number:05}")

    def paths(self) -> dict[str, str | None]:
        """For `Step`, when they are saved."""
        return {
            "checkpoint": None if self._state is None else self._state.result().path,
            "sampler": None if self._sampler is None else self._sampler.result().path,
        }


def is_due(settings: Settings, number: int, last: bool) -> bool:
    """Whether to measure held-out data after this step."""
    return last or bool(settings.evaluate_every and number % settings.evaluate_every == 0)


def learning_rate_at(step: int, settings: Settings) -> float:
    """The rate of a step, counted from 0."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return settings.learning_rate * warm * (1 - step / settings.steps)


def weighted_logprobs(datum: Any, output: Any) -> float:
    """The sum of the logprobs of a datum's targets, each times its weight."""
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    return float((output["logprobs"].to_numpy() * weights).sum())


def sample_groups(
    sampling: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    settings: SamplingSettings,
    seed: int,
) -> list[tuple[list[int], list[Any]]]:
    """For each row the tokens of its prompt, and the sampled sequences. All are sampled at once."""
    types = types_of(sampling)
    prompts = [prompt_tokens(tokenizer, row["prompt"], plain=settings.plain) for row in rows]
    futures = []
    for number, prompt in enumerate(prompts):
        params = types.SamplingParams(
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=seed + number,  # one seed for all would give similar answers to all
        )
        tokens = types.ModelInput.from_ints(prompt)
        futures.append(sampling.sample(tokens, settings.group_size, params))
    return [
        (prompt, future.result().sequences) for prompt, future in zip(prompts, futures, strict=True)
    ]


def policy_datum(
    types: ModuleType,
    prompt: Sequence[int],
    sampled: Sequence[int],
    logprobs: Sequence[float],
    advantages: Sequence[float],
) -> Any:
    """Sampled tokens for a policy loss. The prompt has no advantage, so it is not trained."""
    tokens = [*prompt, *sampled]
    before = [0.0] * (len(prompt) - 1)

    def tensor(values: list[Any], dtype: str) -> Any:
        return types.TensorData(data=values, dtype=dtype, shape=[len(tokens) - 1])

    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tensor(tokens[1:], "int64"),
            "logprobs": tensor([*before, *logprobs], "float32"),
            "advantages": tensor([*before, *advantages], "float32"),
        },
    )


# -- defaults --------------------------------------------------------------------------------------

#: Up to so many parameters: rank, and learning rate of supervised training. Larger models need
#: smaller rates. The scale of an adapter is 32 / rank, so the rate does not depend on the rank.
BY_SIZE = (
    (0.5e9, 16, 1e-3),
    (2e9, 32, 5e-4),
    (15e9, 32, 3e-4),
    (float("inf"), 32, 2e-4),
)
#: A policy moves in small steps: its data are answers that it gives already.
RATE_FACTOR: Mapping[Method, float] = {"sft": 1.0, "dpo": 0.1, "rl": 0.5, "distill": 0.5}
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([MB])(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    rank: int
    learning_rate: float
    #: Parameters of the model, as its name says; None: it does not say.
    parameters: float | None


def defaults(model: str, method: Method) -> Defaults:
    """Rank and learning rate for a model, by the size in its name, such as `Qwen3-8B`."""
    found = [
        float(number) * {"M": 1e6, "B": 1e9}[unit.upper()] for number, unit in _SIZE.findall(model)
    ]
    size = max(found, default=None)
    rank, rate = next((r, lr) for most, r, lr in BY_SIZE if (size or 1e9) <= most)
    # Two digits: people read it.
    return Defaults(
        rank=rank, learning_rate=float(f"{rate * RATE_FACTOR[method]:.2g}"), parameters=size
    )
