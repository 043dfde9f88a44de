"""Checks of a sample request, before it is queued."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.engine.input_checks import Limits, PreparedImages, check_input
from tinkex.engine.sampling.guides import Guides
from tinkex.engine.sampling.kv_pages import Pages
from tinkex.engine.sampling.prompt_logprobs import check_count, check_prompt_logprobs
from tinkex.engine.sampling.sequences import AdapterKey, Decode, Request, SamplingConfig, Stops
from tinkex.wire.errors import UserFailure
from tinkex.wire.sample_controls import SampleControls, StoredSampleRequest
from tinkex.wire.sampling import SampleRequest, SamplingParams

if TYPE_CHECKING:
    from tinkex.models.tokenizer import Tokenizer

#: Below this temperature sampling is greedy, as for 0. Logits are float32: at this temperature
#: their smallest difference is decisive, and at far lower temperatures they would overflow.
MIN_TEMPERATURE = 1e-6

#: More samples in one request are most likely a mistake.
MAX_SAMPLES = 1024

#: Maximum numbers of one sample: top logprobs of every token easily become too many.
MAX_SAMPLE_LOGPROBS = 1 << 22


class SampleChecks:
    def __init__(
        self, limits: Limits, *, pages: Pages, eos_token_ids: frozenset[int], folder: Path
    ) -> None:
        self._limits = limits
        self._pages = pages
        self._eos_token_ids = eos_token_ids
        #: Folder of the base model, which has the tokenizer.
        self._folder = folder
        self._tokenizer: Tokenizer | None = None
        self._guides = Guides(
            folder, vocab_size=limits.vocab_size, end_tokens=sorted(eos_token_ids)
        )

    def check(
        self,
        ticket: int,
        sample_request: SampleRequest,
        adapter: AdapterKey,
        owner: str,
        streams: bool,
        images: PreparedImages,
    ) -> Request:
        refuse_unsupported(sample_request)
        tokens_N, places = check_input(sample_request.prompt, self._limits, images, where="prompt")
        prompt: list[int] = tokens_N.tolist()
        params = sample_request.sampling_params
        if not 1 <= sample_request.num_samples <= MAX_SAMPLES:
            raise UserFailure(
                f"num_samples is {sample_request.num_samples}; allowed are 1 to {MAX_SAMPLES}."
            )
        new = self._new_tokens(len(prompt), params.max_tokens)
        if not self._pages.fits(len(prompt) + new):
            raise UserFailure(
                f"prompt ({len(prompt)} tokens) and max_tokens ({new}) need room for "
                f"{len(prompt) + new} tokens; the server's KV cache holds "
                f"{self._pages.count * self._pages.size}. Request fewer tokens, or start the "
                "server with a larger cache."
            )
        top = sample_request.topk_sample_logprobs
        if top * new > MAX_SAMPLE_LOGPROBS:
            raise UserFailure(
                f"topk_sample_logprobs is {top} for up to {new} tokens, {top * new} numbers for each "
                f"sample; at most {MAX_SAMPLE_LOGPROBS} are allowed. Request fewer, or set "
                "max_tokens."
            )
        sampling = check_sampling(sample_request, self._limits.vocab_size)
        guide = None
        if isinstance(sample_request, StoredSampleRequest) and sample_request.controls:
            sampling = with_controls(sampling, sample_request.controls, self._limits.vocab_size)
            if (grammar := sample_request.controls.grammar) is not None:
                guide = self._guides.start(grammar)
        return Request(
            ticket=ticket,
            adapter=adapter,
            prompt=prompt,
            images=places or None,
            samples=sample_request.num_samples,
            max_new_tokens=new,
            sampling=sampling,
            stops=self._stops(params),
            prompt_logprobs=check_prompt_logprobs(
                sample_request, len(prompt), self._limits.vocab_size
            ),
            owner=owner,
            streams=streams,
            guide=guide,
        )

    def _new_tokens(self, prompt: int, max_tokens: int | None) -> int:
        context = self._limits.max_context_length
        if max_tokens is None:
            if prompt >= context:
                raise UserFailure(
                    f"the prompt has {prompt} tokens and fills the context of {context}, so no "
                    "token can be sampled. Shorten the prompt."
                )
            return context - prompt
        if max_tokens < 1:
            raise UserFailure(f"max_tokens is {max_tokens}; it must be at least 1.")
        if prompt + max_tokens > context:
            raise UserFailure(
                f"the prompt's {prompt} tokens and max_tokens {max_tokens} are "
                f"{prompt + max_tokens} in total; the model's context is {context}. "
                f"Request at most {max(0, context - prompt)} tokens."
            )
        return max_tokens

    def _stops(self, params: SamplingParams) -> Stops:
        stop = params.stop
        if stop is None:
            return Stops(token_ids=self._eos_token_ids)
        given = [stop] if isinstance(stop, str) else list(stop)
        ids = frozenset(item for item in given if isinstance(item, int))
        texts = tuple(item for item in given if isinstance(item, str))
        if "" in texts:
            raise UserFailure("sampling_params.stop contains an empty text; remove it.")
        vocabulary = self._limits.vocab_size
        if outside := [item for item in ids if not 0 <= item < vocabulary]:
            raise UserFailure(
                f"sampling_params.stop contains token {outside[0]}; allowed ids are 0 to "
                f"{vocabulary - 1}."
            )
        if not texts:
            return Stops(token_ids=ids)
        # Stop texts are added to the model's own end tokens: a program that stops at a line break
        # does not expect text after the end of the turn. Token ids, and the empty list, replace
        # them.
        return Stops(token_ids=ids | self._eos_token_ids, texts=texts, decode=self._decoder())

    def _decoder(self) -> Decode:
        if self._tokenizer is None:
            from tinkex.models.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(self._folder)
        return self._tokenizer.decode


def refuse_unsupported(sample_request: SampleRequest) -> None:
    if sample_request.record_stability_info:
        raise UserFailure(
            "record_stability_info is not supported by this server: it is used only by the loss "
            "stable_reinforce, which is not public. Create the sampling client without it."
        )


def check_sampling(sample_request: SampleRequest, vocab_size: int) -> SamplingConfig:
    params = sample_request.sampling_params
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise UserFailure(
            f"sampling_params.temperature is {params.temperature}; it must be 0 (greedy) or "
            "positive."
        )
    if params.top_k != -1 and params.top_k < 1:
        raise UserFailure(
            f"sampling_params.top_k is {params.top_k}; use -1 for all tokens, or at least 1."
        )
    if not 0 < params.top_p <= 1:
        raise UserFailure(f"sampling_params.top_p is {params.top_p}; it must be in (0, 1].")
    check_count("topk_sample_logprobs", sample_request.topk_sample_logprobs, vocab_size)
    return SamplingConfig(
        temperature=params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0,
        top_k=None if params.top_k == -1 else params.top_k,
        top_p=None if params.top_p == 1 else params.top_p,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        top_logprobs=sample_request.topk_sample_logprobs,
    )


def with_controls(
    sampling: SamplingConfig, controls: SampleControls, vocab_size: int
) -> SamplingConfig:
    if outside := [token for token in controls.bias_tokens if not 0 <= token < vocab_size]:
        raise UserFailure(
            f"logit_bias names token {outside[0]}; allowed ids are 0 to {vocab_size - 1}."
        )
    return replace(
        sampling,
        bias_tokens=tuple(controls.bias_tokens),
        biases=tuple(controls.biases),
        presence_penalty=controls.presence_penalty,
        frequency_penalty=controls.frequency_penalty,
        is_guided=controls.grammar is not None,
    )
