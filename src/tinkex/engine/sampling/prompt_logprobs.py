"""Prompt logprobs of a sample request: checks, computation and results.

Source i is prompt token i, whose hidden state predicts position i + 1. Logprobs of the prompt, of
the most likely tokens and of target tokens are at temperature 1; alternatives are sampled at the
temperature of the request, without top-k and top-p.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.model.image_places import NO_IMAGES
from tinkex.engine.sampling.sequences import (
    PromptLogprobRequest,
    PromptTargets,
    Request,
    SamplingConfig,
)
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

# t sources of one call, V vocabulary, K targets of one source

#: Value of a target cell that requests nothing.
NO_TARGET = -1

#: Maximum numbers in one result: a table over a long prompt easily becomes too large.
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
                f"in total; at most {MAX_PROMPT_LOGPROBS} are allowed. Request fewer."
            )
    last_n = sample_request.prompt_logprobs_last_n
    if last_n is not None:
        if not sample_request.prompt_logprobs:
            raise UserFailure("prompt_logprobs_last_n needs prompt_logprobs = true.")
        if not 1 <= last_n <= prompt - 1:
            raise UserFailure(
                f"prompt_logprobs_last_n is {last_n}; allowed for this prompt are 1 to "
                f"{prompt - 1}."
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
        raise UserFailure(f"{name} is {count}; allowed are 0 to {vocab_size}, the vocabulary size.")


# -- target tokens --------------------------------------------------------------------------------


def check_targets(targets: TensorData, sources: int, vocab_size: int) -> PromptTargets:
    """The cells that request a logprob, in order of their sources."""
    shape = targets.shape
    if targets.dtype != "int64" or shape is None or len(shape) != 2 or shape[0] != sources:
        raise UserFailure(
            f"target_prompt_logprobs is {targets.dtype} of shape {shape}; for this prompt it must "
            f"be int64 of shape [{sources}, K], with a row for each token after the first."
        )
    tokens = target_tokens(targets)
    if len(tokens) > MAX_PROMPT_LOGPROBS:
        raise UserFailure(
            f"target_prompt_logprobs has {len(tokens)} cells; at most {MAX_PROMPT_LOGPROBS} are "
            "allowed."
        )
    if bad := [int(token) for token in tokens if not NO_TARGET <= token < vocab_size][:1]:
        raise UserFailure(
            f"target_prompt_logprobs contains token {bad[0]}; allowed ids are 0 to "
            f"{vocab_size - 1}, and {NO_TARGET} for cells that request nothing."
        )
    used = tokens != NO_TARGET
    if not used.any():
        raise UserFailure("target_prompt_logprobs contains no token: every cell is -1.")
    return PromptTargets(source=target_sources(targets)[used], token=tokens[used])


def target_tokens(targets: TensorData) -> npt.NDArray[np.int64]:
    """The values of all cells, or of the listed cells of a sparse tensor."""
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
    """The logprobs in the same form as the targets; NaN for cells that request nothing."""
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


# -- results --------------------------------------------------------------------------------------


class PromptLogprobResults:
    """Collects the results. Sources may be added in any order, and repeatedly."""

    def __init__(self, sample_request: SampleRequest, request: Request) -> None:
        wanted = request.prompt_logprobs
        self._sample_request, self._prompt, self._wanted = sample_request, request.prompt, wanted
        length = len(request.prompt)
        #: An image is no tokens, so its places have neither logprobs nor top tokens.
        self._is_image = (request.images or NO_IMAGES).mask(length)
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
        """The needed sources among prompt tokens `start` to `stop`."""
        wanted, last = self._wanted, len(self._prompt) - 1
        first = last
        if wanted.logprobs or wanted.top:
            first = wanted.first_position - 1
        if wanted.alternatives:
            first = 0
        sources = np.arange(max(start, first), min(stop, last))
        if not wanted.alternatives:
            sources = sources[~self._is_image[sources + 1]]
        if wanted.targets is not None:
            of_targets = wanted.targets.source
            inside = (of_targets >= start) & (of_targets < stop)
            sources = np.union1d(sources, of_targets[inside])
        return sources

    def add_logits(
        self, sources: npt.NDArray[np.int64], logits_tV: Tensor, sampling: SamplingConfig
    ) -> None:
        """Adds the logits of some sources, in ascending order. Overwrites the logits."""
        wanted = self._wanted
        if wanted.alternatives:
            tokens, logprobs = sample_alternatives(
                logits_tV, sources.tolist(), wanted.alternatives, sampling
            )
            self._alt_tokens[sources], self._alt_logprobs[sources] = tokens, logprobs
        logprobs_tV = logits_tV.sub_(logits_tV.logsumexp(dim=1, keepdim=True))
        if wanted.logprobs or wanted.top:
            mine = (sources >= wanted.first_position - 1) & ~self._is_image[sources + 1]
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
        targets = self._sample_request.target_prompt_logprobs
        return None if targets is None else target_logprobs(targets, self._targets)

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
