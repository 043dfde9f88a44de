"""What a sample request asks about its prompt: checked, answered row by row, and put together.

CheckedDatum i is what the model says after prompt token i, so it is about position i + 1. Own logprobs, the
top_tokens tokens and those of given tokens are at temperature 1; alternatives are drawn at the
request's temperature, without cuts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.sampling.sequences import PromptLogprobRequest, PromptTargets, SamplingConfig
from tinkex.engine.sampling.token_sampling import sample_alternatives
from tinkex.wire.errors import UserFailure
from tinkex.wire.sampling import (
    EMPTY_LOGPROB,
    EMPTY_TOKEN,
    PromptAltTokens,
    SampleRequest,
    TopkLogprobs,
)
from tinkex.wire.tensors import TensorData

# N rows of a prompt (one less than its tokens), t rows at hand, V vocabulary, K tokens for one row

#: A target cell that asks for nothing.
NO_TARGET = -1

#: Most numbers in one answer: a table over a long prompt is easily larger than anybody wants.
MAX_PROMPT_LOGPROBS = 1 << 22


def check_prompt_logprobs(
    sample_request: SampleRequest, prompt: int, vocab_size: int
) -> PromptLogprobRequest:
    check_count("topk_prompt_logprobs", sample_request.topk_prompt_logprobs, vocab_size)
    check_count("prompt_alt_tokens_k", sample_request.prompt_alt_tokens_k, vocab_size)
    for name, width in (
        ("topk_prompt_logprobs", sample_request.topk_prompt_logprobs),
        ("prompt_alt_tokens_k", sample_request.prompt_alt_tokens_k),
    ):
        if width * prompt > MAX_PROMPT_LOGPROBS:
            raise UserFailure(
                f"{name} is {width} for a prompt of {prompt} tokens, {width * prompt} numbers "
                f"together; at most {MAX_PROMPT_LOGPROBS} are answered. Ask for fewer."
            )
    last_n = sample_request.prompt_logprobs_last_n
    if last_n is not None:
        if not sample_request.prompt_logprobs:
            raise UserFailure("prompt_logprobs_last_n needs prompt_logprobs = true.")
        if not 1 <= last_n <= prompt - 1:
            raise UserFailure(
                f"prompt_logprobs_last_n is {last_n}; for this prompt it goes from 1 to {prompt - 1}."
            )
    targets = sample_request.target_prompt_logprobs
    return PromptLogprobRequest(
        logprobs=bool(sample_request.prompt_logprobs),
        top=sample_request.topk_prompt_logprobs,
        first_position=1 if last_n is None else prompt - last_n,
        targets=None if targets is None else check_targets(targets, prompt - 1, vocab_size),
        alternatives=sample_request.prompt_alt_tokens_k,
    )


def check_count(name: str, count: int, vocab_size: int) -> None:
    if not 0 <= count <= vocab_size:
        raise UserFailure(f"{name} is {count}; it goes from 0 to the vocabulary of {vocab_size}.")


# -- given tokens ---------------------------------------------------------------------------------


def check_targets(targets: TensorData, sources: int, vocab_size: int) -> PromptTargets:
    """The cells that ask for something, row by row."""
    shape = targets.shape
    if targets.dtype != "int64" or shape is None or len(shape) != 2 or shape[0] != sources:
        raise UserFailure(
            f"target_prompt_logprobs is {targets.dtype} of shape {shape}; it is int64 of shape "
            f"[{sources}, K] for this prompt, a row for each token after the first."
        )
    tokens = target_tokens(targets)
    if len(tokens) > MAX_PROMPT_LOGPROBS:
        raise UserFailure(
            f"target_prompt_logprobs has {len(tokens)} cells; at most {MAX_PROMPT_LOGPROBS} are answered."
        )
    if bad := [int(token) for token in tokens if not NO_TARGET <= token < vocab_size][:1]:
        raise UserFailure(
            f"target_prompt_logprobs holds token {bad[0]}; ids go from 0 to {vocab_size - 1}, and "
            f"{NO_TARGET} asks for nothing."
        )
    used = tokens != NO_TARGET
    if not used.any():
        raise UserFailure("target_prompt_logprobs names no token: every cell is -1.")
    return PromptTargets(source=target_sources(targets)[used], token=tokens[used])


def target_tokens(targets: TensorData) -> npt.NDArray[np.int64]:
    """What the listed cells hold: all of them when dense."""
    if targets.sparse_crow_indices is not None:
        return np.asarray(targets.data, np.int64)
    return targets.to_numpy().astype(np.int64).reshape(-1)


def target_sources(targets: TensorData) -> npt.NDArray[np.int64]:
    assert targets.shape is not None
    sources, width = targets.shape
    if targets.sparse_crow_indices is not None:
        return np.repeat(np.arange(sources), np.diff(targets.sparse_crow_indices))
    return np.repeat(np.arange(sources), width)


def target_logprobs(targets: TensorData, logprobs: npt.NDArray[np.float32]) -> TensorData:
    """The logprobs where the tokens were, in the same form; NaN where nothing was wanted."""
    tokens = target_tokens(targets)
    values = np.full(len(tokens), np.nan, np.float32)
    values[tokens != NO_TARGET] = logprobs
    if targets.sparse_crow_indices is None:
        assert targets.shape is not None
        return TensorData.from_numpy(values.reshape(targets.shape))
    return TensorData(
        data=values,
        dtype="float32",
        shape=targets.shape,
        sparse_crow_indices=targets.sparse_crow_indices,
        sparse_col_indices=targets.sparse_col_indices,
    )


# -- answers --------------------------------------------------------------------------------------


class PromptLogprobResults:
    """What is known so far. Rows may come in any order, and again."""

    def __init__(
        self, sample_request: SampleRequest, prompt: list[int], wanted: PromptLogprobRequest
    ) -> None:
        self._sample_request, self._prompt, self._wanted = sample_request, prompt, wanted
        length = len(prompt)
        self._logprobs = np.full(length, np.nan, np.float32)
        self._top_ids = np.full((length, wanted.top), EMPTY_TOKEN, np.int32)
        self._top_logprobs = np.full((length, wanted.top), EMPTY_LOGPROB, np.float32)
        self._targets = np.full(
            0 if wanted.targets is None else len(wanted.targets.source), np.nan, np.float32
        )
        shape = (max(0, length - 1), wanted.alternatives)
        self._alt_tokens = np.zeros(shape, np.int64)
        self._alt_logprobs = np.zeros(shape, np.float32)

    def needed_sources(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Which of the rows `start` to `stop` are wanted about."""
        wanted, last = self._wanted, len(self._prompt) - 1
        first = last
        if wanted.logprobs or wanted.top:
            first = wanted.first_position - 1
        if wanted.alternatives:
            first = 0
        sources = np.arange(max(start, first), min(stop, last))
        if wanted.targets is not None:
            of_targets = wanted.targets.source
            inside = (of_targets >= start) & (of_targets < stop)
            sources = np.union1d(sources, of_targets[inside])
        return sources

    def add_logits(
        self, sources: npt.NDArray[np.int64], logits_tV: Tensor, sampling: SamplingConfig
    ) -> None:
        """The model's word on some rows, in rising order. Overwrites the logits."""
        wanted = self._wanted
        if wanted.alternatives:
            tokens, logprobs = sample_alternatives(
                logits_tV, sources.tolist(), wanted.alternatives, sampling
            )
            self._alt_tokens[sources], self._alt_logprobs[sources] = tokens, logprobs
        logprobs_tV = logits_tV.sub_(logits_tV.logsumexp(dim=1, keepdim=True))
        if wanted.logprobs or wanted.top:
            mine = sources >= wanted.first_position - 1
            where = sources[mine] + 1
            scored_tV = logprobs_tV[torch.from_numpy(mine).to(logprobs_tV.device)]
            own = torch.tensor([self._prompt[at] for at in where], device=scored_tV.device)
            if len(where):
                self._logprobs[where] = _numpy(scored_tV.gather(1, own[:, None]).squeeze(1))
            if wanted.top and len(where):
                values, ids = scored_tV.topk(wanted.top, dim=1)
                self._top_ids[where], self._top_logprobs[where] = _numpy(ids), _numpy(values)
        if wanted.targets is not None:
            wanted_here = np.flatnonzero(np.isin(wanted.targets.source, sources))
            at = torch.from_numpy(np.searchsorted(sources, wanted.targets.source[wanted_here]))
            token = torch.from_numpy(wanted.targets.token[wanted_here])
            device = logprobs_tV.device
            self._targets[wanted_here] = _numpy(logprobs_tV[at.to(device), token.to(device)])

    @property
    def logprobs(self) -> npt.NDArray[np.float32] | None:
        return self._logprobs if self._wanted.logprobs else None

    @property
    def top(self) -> TopkLogprobs | None:
        if not self._wanted.top:
            return None
        return TopkLogprobs(self._top_ids, self._top_logprobs)

    @property
    def targets(self) -> TensorData | None:
        sample_request = self._sample_request.target_prompt_logprobs
        return None if sample_request is None else target_logprobs(sample_request, self._targets)

    @property
    def alternatives(self) -> PromptAltTokens | None:
        if not self._wanted.alternatives:
            return None
        return PromptAltTokens(
            tokens=TensorData.from_numpy(self._alt_tokens),
            logprobs=TensorData.from_numpy(self._alt_logprobs),
        )


def _numpy(tensor: Tensor) -> npt.NDArray[np.generic]:
    return tensor.cpu().numpy()
