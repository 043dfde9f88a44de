"""From a request of OpenAI's API to a sample request: chat template, tokenizer, sampling parameters."""

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.models.image_header import ImageRefused
from tinkex.models.patch_rules import PatchRules, placeholder_of
from tinkex.models.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tinkex.models.tool_calls import CLOSE, ToolFormat, renders_tools, tool_format
from tinkex.server.api.errors import Refusal
from tinkex.server.api.openai_guides import grammar_of
from tinkex.server.executor import ServedModel
from tinkex.wire.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinkex.wire.openai import (
    ChatRequest,
    CompletionRequest,
    images_of,
    is_image,
    text_of_content,
)
from tinkex.wire.prompt_chunks import Chunk
from tinkex.wire.sample_controls import SampleControls, StoredSampleRequest
from tinkex.wire.sampling import SamplingParams

#: New tokens of a completion without `max_tokens`, as in OpenAI's API. A chat may fill the context.
COMPLETION_TOKENS = 16
#: Characters of a prompt for each token of the context. Hardly any token has more; a prompt with more
#: cannot fit, and to tokenize it would take long.
MAX_CHARS_PER_TOKEN = 256
#: Logprobs of one answer, alternatives included.
MAX_LOGPROBS = 2**20
#: Variables of a chat template that a request must not set: they have fields of their own.
OWN_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "return_dict", "chat_template", "conversation"),
    }
)


class Tokenizers:
    """The tokenizers of the served models, each loaded when it is needed first."""

    def __init__(self) -> None:
        self._loads: dict[Path, asyncio.Future[Tokenizer]] = {}

    async def of(self, model: ServedModel) -> Tokenizer:
        """Raises a 400 for a model without a tokenizer."""
        load = self._loads.get(model.folder)
        if load is None or (load.done() and load.exception() is not None):
            load = asyncio.ensure_future(
                asyncio.to_thread(load_tokenizer, model.folder, name=model.name)
            )
            self._loads[model.folder] = load
        try:
            return await asyncio.shield(load)
        except (TokenizerError, OSError, ValueError) as error:
            raise Refusal(
                400, f"{model.name} has no tokenizer that can be used: {error}", field="model"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A prompt and how to sample from it."""

    #: With the placeholder of an image as often as the image has tokens.
    tokens: list[int]
    sample: StoredSampleRequest
    #: How calls are written in the answer; None: it has none.
    tool_format: ToolFormat | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLimits:
    """How long a prompt for a model may be."""

    chars: int
    #: The context of the model; None: not known before its engine has loaded it.
    tokens: int | None

    @classmethod
    def of(cls, max_context_length: int | None, *, max_message_bytes: int) -> "PromptLimits":
        chars = max_message_bytes
        if max_context_length is not None:
            chars = MAX_CHARS_PER_TOKEN * max_context_length
        return cls(chars=chars, tokens=max_context_length)

    def check_text(self, text: str, *, field: str) -> None:
        if len(text) > self.chars:
            raise Refusal(
                400,
                f"the prompt has {len(text)} characters; at most {self.chars} are allowed. "
                "Shorten it.",
                field=field,
            )

    def check_tokens(self, tokens: Sequence[int], *, field: str) -> None:
        if self.tokens is not None and len(tokens) > self.tokens:
            raise Refusal(
                400,
                f"the prompt has {len(tokens)} tokens; the model's context is {self.tokens}. "
                "Shorten it.",
                field=field,
            )


def prepare_chat(
    message: ChatRequest, tokenizer: Tokenizer, limits: PromptLimits, folder: Path
) -> Prepared:
    """`folder` is that of the model, which says how it reads images."""
    template = _template(tokenizer, message.tools)
    format = _tool_format(message, template)
    grammar = grammar_of(message, format, tokenizer)
    tokens = _render(message, tokenizer, template, limits, with_tools=format is not None)
    prompt = ModelInput.from_ints(tokens)
    if images := images_of(message):
        prompt, tokens = _with_images(tokens, images, folder)
    limits.check_tokens(tokens, field="messages")
    sample = _sample(message, prompt, max_tokens=message.most_tokens, grammar=grammar)
    return Prepared(
        tokens=tokens,
        sample=sample.model_copy(update={"topk_sample_logprobs": message.top_logprobs}),
        tool_format=format,
    )


def _with_images(
    tokens: Sequence[int], images: Sequence[ImageChunk], folder: Path
) -> tuple[ModelInput, list[int]]:
    """The prompt with images in place of the template's placeholders, and its tokens."""
    try:
        rules, placeholder = PatchRules.read(folder), placeholder_of(folder)
        counts = [rules.count(image.data, image.format) for image in images]
    except ImageRefused as refused:
        raise Refusal(400, str(refused), field="messages") from None
    places = [at for at, token in enumerate(tokens) if token == placeholder]
    if len(places) != len(images):
        raise Refusal(
            400,
            f"the messages have {len(images)} images, and the chat template of this model makes "
            f"{len(places)} places for images of them. The text of a message must not contain the "
            "model's token for images.",
            field="messages",
        )
    chunks: list[Chunk] = []
    counted: list[int] = []
    begin = 0
    for at, image, count in zip(places, images, counts, strict=True):
        chunks += [EncodedTextChunk(tokens[begin:at]), image]
        counted += [*tokens[begin:at], *[placeholder] * count]
        begin = at + 1
    chunks.append(EncodedTextChunk(tokens[begin:]))
    filled = [chunk for chunk in chunks if not isinstance(chunk, EncodedTextChunk) or chunk.length]
    return ModelInput(chunks=filled), [*counted, *tokens[begin:]]


def _tool_format(message: ChatRequest, template: str) -> ToolFormat | None:
    """How this model writes calls; None if the request has no tools."""
    if not message.tools or message.tool_choice == "none":
        return None
    if message.tool_choice not in (None, "auto", "required") and not isinstance(
        message.tool_choice, dict
    ):
        raise Refusal(
            400,
            f"{message.tool_choice[:60]!r} is not one of none, auto, required, or an object that "
            "names a function.",
            field="tool_choice",
        )
    if not renders_tools(template):
        raise Refusal(
            400,
            "the chat template of this model has no tools, so the model would not see them. Serve "
            "a model with a template for tools, or describe them in a message.",
            field="tools",
        )
    if (format := tool_format(template)) is None:
        raise Refusal(
            400,
            "calls in the format of this model's chat template are not supported. Supported are "
            "the formats of Hermes and Qwen, and of Llama 3.",
            field="tools",
        )
    return format


def prepare_completion(
    message: CompletionRequest, tokenizer: Tokenizer, limits: PromptLimits
) -> list[Prepared]:
    """One sample request for each prompt."""
    most = COMPLETION_TOKENS if message.max_tokens is None else message.max_tokens
    top = message.logprobs or 0
    prepared = []
    for prompt in message.prompts:
        if isinstance(prompt, str):
            limits.check_text(prompt, field="prompt")
            tokens = tokenizer.encode(prompt)
        else:
            tokens = list(prompt)
        limits.check_tokens(tokens, field="prompt")
        # The engine samples at least one token; the answer leaves it out if none was requested.
        sample = _sample(message, ModelInput.from_ints(tokens), max_tokens=most or 1)
        update: dict[str, Any] = {"topk_sample_logprobs": top}
        if message.echo and message.logprobs is not None:
            update |= {"prompt_logprobs": True, "topk_prompt_logprobs": top}
        prepared.append(Prepared(tokens=tokens, sample=sample.model_copy(update=update)))
    return prepared


def check_logprobs(
    message: ChatRequest | CompletionRequest,
    prepared: Sequence[Prepared],
    max_context_length: int | None,
) -> None:
    """Refuse an answer with too many logprobs: each takes about a hundred bytes of JSON."""
    count = 0
    for one in prepared:
        most = one.sample.sampling_params.max_tokens or max_context_length or 0
        count += message.n * most * (1 + one.sample.topk_sample_logprobs)
        count += len(one.tokens) * (1 + one.sample.topk_prompt_logprobs)
    if message.logprobs and count > MAX_LOGPROBS:
        raise Refusal(
            400,
            f"the answer may have {count} logprobs; at most {MAX_LOGPROBS} are allowed. Request "
            "fewer tokens, choices, prompts or alternatives.",
            field="logprobs",
        )


def _sample(
    message: ChatRequest | CompletionRequest,
    prompt: ModelInput,
    *,
    max_tokens: int | None,
    grammar: str | None = None,
) -> StoredSampleRequest:
    # Fixed here, so that a sample that is repeated after a crash has the same tokens.
    seed = secrets.randbits(31) if message.seed is None else message.seed
    return StoredSampleRequest(
        num_samples=message.n,
        prompt=prompt,
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            stop=stops_of(message) or None,
            temperature=message.temperature,
            top_k=message.top_k or -1,
            top_p=message.top_p,
        ),
        controls=_controls(message, grammar),
    )


def _controls(
    message: ChatRequest | CompletionRequest, grammar: str | None
) -> SampleControls | None:
    biases = message.logit_bias or {}
    if not (biases or message.presence_penalty or message.frequency_penalty or grammar):
        return None
    return SampleControls(
        bias_tokens=[int(token) for token in biases],
        biases=list(biases.values()),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        grammar=grammar,
    )


def stops_of(message: ChatRequest | CompletionRequest) -> list[str]:
    """The texts that end a sequence."""
    if isinstance(message, ChatRequest) and message.tools and not message.parallel_tool_calls:
        return [*message.stops, CLOSE]  # after the first call
    return message.stops


# -- chats ---------------------------------------------------------------------------------------


def _render(
    message: ChatRequest,
    tokenizer: Tokenizer,
    template: str,
    limits: PromptLimits,
    *,
    with_tools: bool,
) -> list[int]:
    variables = dict(message.chat_template_kwargs or {})
    if own := OWN_VARIABLES.intersection(variables):
        raise Refusal(
            400,
            f"chat_template_kwargs has {min(own)!r}, which is a field of its own.",
            field="chat_template_kwargs",
        )
    if message.reasoning_effort is not None:
        if "reasoning_effort" not in template:
            raise Refusal(
                400,
                "the chat template of this model has no `reasoning_effort`. Leave it out.",
                field="reasoning_effort",
            )
        variables["reasoning_effort"] = message.reasoning_effort
    try:
        text: str = tokenizer.apply_chat_template(
            [_for_template(one) for one in message.messages],
            tools=message.tools if with_tools else None,
            chat_template=template,
            add_generation_prompt=message.add_generation_prompt,
            continue_final_message=message.continue_final_message,
            tokenize=False,
            **variables,
        )
        limits.check_text(text, field="messages")
        # The template itself writes special tokens such as BOS.
        return tokenizer.encode(text, add_special_tokens=False)
    except Refusal:
        raise
    except Exception as error:
        # Templates are programs of the model's authors: they fail in any way.
        raise Refusal(
            400,
            f"the chat template of this model cannot render these messages: {error}",
            field="messages",
        ) from error


def _template(tokenizer: Tokenizer, tools: Any) -> str:
    try:
        return tokenizer.get_chat_template(tools=tools)
    except TokenizerError as error:
        raise Refusal(400, f"{error} Or use /v1/completions.", field="messages") from error


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it."""
    rendered = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list) and any(map(is_image, content)):
        # The data stays out of the template, which writes a placeholder.
        rendered["content"] = [
            {"type": "image"}
            if is_image(part)
            else {"type": "text", "text": text_of_content([part])}
            for part in content
        ]
    else:
        rendered["content"] = text_of_content(content)
    if message["role"] == "developer":  # OpenAI's newer word, which templates do not know
        rendered["role"] = "system"
    if isinstance(calls := message.get("tool_calls"), list):
        rendered["tool_calls"] = [_call_for_template(call) for call in calls]
    return rendered


def _call_for_template(call: Any) -> Any:
    """A call with its arguments as an object; OpenAI's API has them as JSON in a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
