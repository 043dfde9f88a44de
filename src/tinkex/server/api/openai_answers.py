"""
The answers of OpenAI's API: sampled tokens as text, in one piece or as a stream of chunks.

A `Choice` is one sequence. Tokens go in as they are sampled, and text comes out as soon as it cannot
be the beginning of a stop text.
"""

import functools
import math
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinkex.models.text_stream import TextStream, TokenTexts
from tinkex.models.tokenizer import Tokenizer
from tinkex.models.tool_calls import ToolCall, ToolCallReader, ToolFormat
from tinkex.server.api.openai_prompts import stops_of
from tinkex.wire.codec import encode_plain_json
from tinkex.wire.openai import ChatRequest, CompletionRequest
from tinkex.wire.partial_sample import SampledTokens
from tinkex.wire.sampling import SampledSequence, SampleResponse

#: The logprob of a token that cannot be sampled.
IMPOSSIBLE = -9999.0
FinishReason = Literal["stop", "length", "tool_calls"]


class StopText:
    """Cuts a text at the first stop text, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The text that is certainly before a stop text."""
        if self.found or not self._stops:
            return "" if self.found else text
        held = self._held + text
        starts = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if starts:
            self.found, self._held = True, ""
            return held[: min(starts)]
        kept = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def end(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class Choice:
    """The text and the tool calls of one sequence, as its tokens arrive."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], tools: ToolFormat | None
    ) -> None:
        self._text = TextStream(tokenizer)
        self._stop = StopText(stops)
        self._tools = None if tools is None else ToolCallReader(tools)
        #: How many calls there were.
        self.calls = 0

    def add(self, tokens: Sequence[int]) -> tuple[str, list[dict[str, Any]]]:
        """The new text, and the new calls."""
        text = self._stop.add(self._text.add(tokens))
        if self._tools is None:
            return text, []
        return self._with_calls(*self._tools.add(text))

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left when the sequence is complete."""
        text = self._stop.add(self._text.end()) + self._stop.end()
        if self._tools is None:
            return text, []
        shown, calls = self._tools.add(text)
        rest, more = self._tools.end()
        return self._with_calls(shown + rest, calls + more)

    def _with_calls(self, text: str, calls: Sequence[ToolCall]) -> tuple[str, list[dict[str, Any]]]:
        found = []
        for call in calls:
            found.append(
                {
                    "index": self.calls,
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            )
            self.calls += 1
        return text, found


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A token with its logprob, and the most likely tokens in its place."""

    token: int
    logprob: float | None
    tops: Sequence[tuple[int, float]] = ()


def token_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[float | None] | None,
    tops: Sequence[Sequence[tuple[int, float]] | None] | None,
) -> list[TokenLogprob]:
    """One for each token; None instead of what was not requested."""
    nothing = [None] * len(tokens)
    return [
        TokenLogprob(
            token=token,
            logprob=None if logprob is None else _finite(logprob),
            tops=[(other, _finite(value)) for other, value in top or ()],
        )
        for token, logprob, top in zip(tokens, logprobs or nothing, tops or nothing, strict=True)
    ]


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this for a token that is next to impossible."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def usage(prompt_tokens: int, responses: Iterable[SampleResponse]) -> dict[str, Any]:
    responses = list(responses)
    sampled = sum(len(one.tokens) for response in responses for one in response.sequences)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": {
            "cached_tokens": sum(one.prompt_cache_hit_tokens or 0 for one in responses)
        },
    }


@dataclass(kw_only=True)
class Answer:
    """The answer to one request: its choices, and the frame around them."""

    message: ChatRequest | CompletionRequest
    tokenizer: Tokenizer
    request_id: str
    #: The tokens of each prompt; a chat has one.
    prompts: Sequence[Sequence[int]]
    tool_format: ToolFormat | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _choices: dict[int, Choice] = field(default_factory=dict, init=False)
    #: Characters of each choice so far, for `text_offset`.
    _offsets: dict[int, int] = field(default_factory=dict, init=False)

    @functools.cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    @property
    def _is_chat(self) -> bool:
        return isinstance(self.message, ChatRequest)

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.message.model,
            "choices": choices,
        }

    def _choice(self, index: int) -> Choice:
        if index not in self._choices:
            stops = stops_of(self.message)
            self._choices[index] = Choice(self.tokenizer, stops, self.tool_format)
        return self._choices[index]

    # -- in one piece ------------------------------------------------------------------------

    def complete(self, responses: Sequence[SampleResponse]) -> dict[str, Any]:
        """The whole answer; one response for each prompt."""
        choices = [
            self._complete_choice(at * self.message.n + number, prompt, response, sequence)
            for at, (prompt, response) in enumerate(zip(self.prompts, responses, strict=True))
            for number, sequence in enumerate(response.sequences)
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        counted = usage(sum(map(len, self.prompts)), responses)
        if not self._samples:
            counted |= {"completion_tokens": 0, "total_tokens": counted["prompt_tokens"]}
        return {**self._frame(kind, choices), "usage": counted}

    @property
    def _samples(self) -> bool:
        """Whether the sampled tokens are part of the answer, and not only its prompt."""
        return isinstance(self.message, ChatRequest) or self.message.max_tokens != 0

    def _complete_choice(
        self,
        index: int,
        prompt: Sequence[int],
        response: SampleResponse,
        sequence: SampledSequence,
    ) -> dict[str, Any]:
        choice = self._choice(index)
        (text, calls), (rest, more) = choice.add(sequence.tokens), choice.end()
        text, calls = text + rest, calls + more
        logprobs = token_logprobs(sequence.tokens, sequence.logprobs, sequence.topk_logprobs)
        reason = self._finish_reason(index, sequence)
        if isinstance(self.message, CompletionRequest):
            if not self._samples:
                text, logprobs, reason = "", [], "length"
            if self.message.echo:
                text = self.tokenizer.decode(list(prompt), skip_special_tokens=True) + text
                tops = response.topk_prompt_logprobs
                logprobs = token_logprobs(prompt, response.prompt_logprobs, tops) + logprobs
            body: dict[str, Any] = {"text": text}
        else:
            said: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                said["content"] = text or None
                said["tool_calls"] = [
                    {name: value for name, value in call.items() if name != "index"}
                    for call in calls
                ]
            body = {"message": said}
        found = {
            "index": index,
            **body,
            "logprobs": self._logprobs(index, logprobs),
            "finish_reason": reason,
        }
        if self.message.return_token_ids:
            found |= {"prompt_token_ids": list(prompt), "token_ids": sequence.tokens}
        return found

    # -- as a stream -------------------------------------------------------------------------

    def first_chunks(self) -> list[bytes]:
        """What a stream begins with."""
        if not self._is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta, None, None) for index in range(self.message.n)]

    def chunks(self, news: SampledTokens) -> list[bytes]:
        """The chunks for new tokens: none, while their text is held back."""
        text, calls = self._choice(news.sequence).add(news.tokens)
        logprobs = None
        if self._has_logprobs:
            found = token_logprobs(news.tokens, news.logprobs, news.tops)
            logprobs = self._logprobs(news.sequence, found)
        return self._new_chunks(news.sequence, text, calls, logprobs, news.tokens)

    def last_chunks(self, response: SampleResponse) -> list[bytes]:
        """What a stream ends with."""
        chunks = []
        for index, sequence in enumerate(response.sequences):
            text, calls = self._choice(index).end()
            chunks += self._new_chunks(index, text, calls, None, [])
            chunks.append(self._chunk(index, {}, None, self._finish_reason(index, sequence)))
        if self.message.include_usage:
            counted = usage(len(self.prompts[0]), [response])
            chunks.append(event_of({**self._frame(self._chunk_kind, []), "usage": counted}))
        return [*chunks, DONE]

    def _new_chunks(
        self,
        index: int,
        text: str,
        calls: list[dict[str, Any]],
        logprobs: dict[str, Any] | None,
        tokens: list[int],
    ) -> list[bytes]:
        chunks = []
        ids = {"token_ids": tokens} if self.message.return_token_ids and tokens else {}
        if text or logprobs is not None or ids:
            chunks.append(self._chunk(index, {"content": text}, logprobs, None, **ids))
        if calls:
            chunks.append(self._chunk(index, {"tool_calls": calls}, None, None))
        return chunks

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _finish_reason(self, index: int, sequence: SampledSequence) -> FinishReason:
        if sequence.stop_reason == "stop" and self._choice(index).calls:
            return "tool_calls"
        return sequence.stop_reason

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: FinishReason | None,
        **others: Any,
    ) -> bytes:
        body = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason, **others}
        frame = self._frame(self._chunk_kind, [choice])
        if self.message.include_usage:
            frame["usage"] = None
        return event_of(frame)

    # -- logprobs ----------------------------------------------------------------------------

    @property
    def _has_logprobs(self) -> bool:
        # In a completion, 0 means logprobs without alternatives.
        return self.message.logprobs is not None and self.message.logprobs is not False

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        if self._is_chat:
            return {"content": [self._chat_logprob(one) for one in tokens], "refusal": None}
        return self._completion_logprobs(index, tokens)

    def _chat_logprob(self, one: TokenLogprob) -> dict[str, Any]:
        return {
            **self._token(one.token, one.logprob),
            "top_logprobs": [self._token(token, logprob) for token, logprob in one.tops],
        }

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        spelled = self._token_texts.bytes_of(token)
        return {
            "token": spelled.decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(spelled),
        }

    def _completion_logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        texts = [self._token_texts.text_of(one.token) for one in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        tops = [
            {self._token_texts.text_of(token): logprob for token, logprob in one.tops} or None
            for one in tokens
        ]
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


DONE = b"data: [DONE]\n\n"


def event_of(data: dict[str, Any]) -> bytes:
    """An event of a stream: a chunk, or an error."""
    return b"data: %s\n\n" % encode_plain_json(data)
