"""`tinkex chat`: a conversation with a base model or a checkpoint, in the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import tinkex
from tinkex.cli.chat_display import Screen
from tinkex.cli.completion import complete_checkpoints
from tinkex.cli.errors import CommandFailed, as_command_failure
from tinkex.cli.output import examples
from tinkex.cli.sample import light_tokenizer, sampler_of
from tinkex.cli.service_options import service_arguments, service_options
from tinkex.models.text_stream import TextStream

YOU, MORE = "you> ", "...> "
BLOCK = '"""'
GREETING = "Type a message and press Enter. /help lists the commands, Ctrl-D leaves.\n"
HELP = f"""\
Type a message and press Enter. A line that ends with \\ goes on in the next one; {BLOCK} begins and
ends a message of several lines. Ctrl-C stops an answer, Ctrl-D or /quit leaves.

/system [TEXT]     set the system message and start over; without TEXT: remove it
/regenerate        answer the last message again
/compare base      answer the last message with the base model; or with a MODEL or PATH
/save FILE         add the conversation to FILE as one line of JSON: training data for SFT
/clear             start over
/help              show this
/quit              leave"""


@dataclass
class Conversation:
    """The messages so far. Its last message is the model's, or there is none."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """What the model sees; with one more question of the user."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        more = [] if question is None else [{"role": "user", "content": question}]
        return [*first, *self.turns, *more]

    def add(self, question: str, answer: str) -> None:
        self.turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def take_last(self) -> tuple[str, str] | None:
        """Remove the last question and its answer; None if there is none."""
        if not self.turns:
            return None
        *self.turns, question, answer = self.turns
        return question["content"], answer["content"]

    def restart(self, system: str | None) -> None:
        self.system, self.turns = system, []


class Model:
    """A model that answers: its sampler, its tokenizer and its name."""

    def __init__(self, service: tinkex.ServiceClient, name: str | None) -> None:
        is_path = name is not None and name.startswith("tinker://")
        self._sampling = sampler_of(service, None if is_path else name, name if is_path else None)
        self._tokenizer = light_tokenizer(self._sampling, "`tinkex chat`")
        self.base = self._sampling.get_base_model()
        self.name = name or self.base
        offered = service.get_server_capabilities().supported_models
        #: None: the service does not say it.
        self._context = next(
            (one.max_context_length for one in offered if one.model_name == self.base), None
        )

    def answer(
        self, messages: list[dict[str, str]], params: tinkex.SamplingParams, screen: Screen
    ) -> str:
        """Show an answer while it is generated, and return it; Ctrl-C ends it early."""
        text, said = TextStream(self._tokenizer), []

        def add(new: str) -> None:
            said.append(new)
            screen.show(new)

        try:
            prompt = list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True))
            room = self._room_after(len(prompt), params)
            fitting = params.model_copy(update={"max_tokens": room})
            sampled = tinkex.ModelInput.from_ints(prompt), 1, fitting
            with screen.notices(), self._sampling.sample_stream(*sampled) as stream:
                for event in stream:
                    add(text.add(event.tokens))
                add(text.end())
                if stream.response().sequences[0].stop_reason == "length":
                    screen.note(
                        f"(cut after {room} tokens; --max-tokens allows more)"
                        if room == params.max_tokens
                        else "(cut: the context of the model is full; /clear starts over)"
                    )
        except KeyboardInterrupt:
            screen.note("(stopped)")
        except Exception:
            screen.break_off()
            raise
        screen.end()
        return "".join(said)

    def _room_after(self, tokens: int, params: tinkex.SamplingParams) -> int | None:
        """How many tokens an answer may have."""
        most = params.max_tokens
        if self._context is None or most is None:
            return most
        if tokens >= self._context:
            raise CommandFailed(
                f"the conversation has {tokens:,} tokens, and the context of the model is "
                f"{self._context:,}.",
                hint="/clear starts over.",
            )
        return min(most, self._context - tokens)


class Chat:
    """Reads messages and commands until the user leaves."""

    def __init__(
        self,
        service: tinkex.ServiceClient,
        model: Model,
        params: tinkex.SamplingParams,
        conversation: Conversation,
    ) -> None:
        self._service = service
        self._model = model
        self._params = params
        self._conversation = conversation
        self._screen = Screen()
        #: Models of `/compare`, by name.
        self._others: dict[str, Model] = {}
        #: How often the last message was answered again, each time with the next seed.
        self._again = 0

    def run(self) -> None:
        while (text := read_message()) is not None:
            if not text.strip():
                continue
            try:
                if text.startswith("/"):
                    if not self._command(*_words(text)):
                        return
                else:
                    self._ask(text)
            except KeyboardInterrupt:
                click.echo("", err=True)
            except Exception as error:
                failure = error if isinstance(error, CommandFailed) else as_command_failure(error)
                if failure is None:
                    raise
                failure.show()

    def _command(self, name: str, rest: str) -> bool:
        """Run a command; False to leave."""
        match name:
            case "quit" | "exit":
                return False
            case "help":
                click.echo(HELP, err=True)
            case "system":
                self._conversation.restart(rest or None)
                said = "The system message is set" if rest else "There is no system message now"
                click.echo(f"{said}. The conversation starts over.", err=True)
            case "clear":
                self._conversation.restart(self._conversation.system)
                click.echo("The conversation starts over.", err=True)
            case "regenerate":
                self._regenerate()
            case "compare":
                self._compare(rest or "base")
            case "save":
                self._save(rest)
            case _:
                raise CommandFailed(f"there is no command /{name}.", hint="/help lists them.")
        return True

    def _ask(self, question: str, *, again: int = 0) -> None:
        self._again = again
        answer = self._answer_of(self._model, question)
        self._conversation.add(question, answer)

    def _answer_of(self, model: Model, question: str) -> str:
        params = self._params
        if params.seed is not None:
            params = params.model_copy(update={"seed": params.seed + self._again})
        return model.answer(self._conversation.messages(question), params, self._screen)

    def _last(self) -> tuple[str, str]:
        if (last := self._conversation.take_last()) is None:
            raise CommandFailed("there is no message yet.", hint="Type one and press Enter.")
        return last

    def _regenerate(self) -> None:
        question, answer = self._last()
        try:
            self._ask(question, again=self._again + 1)
        except BaseException:
            self._conversation.add(question, answer)
            raise

    def _compare(self, name: str) -> None:
        question, answer = self._last()
        try:
            name = self._model.base if name == "base" else name
            if name not in self._others:
                self._others[name] = Model(self._service, name)
            click.echo(f"{name}:", err=True)
            self._answer_of(self._others[name], question)
        finally:
            self._conversation.add(question, answer)

    def _save(self, file: str) -> None:
        if not file:
            raise CommandFailed("/save needs a file.", hint="For example: /save chats.jsonl")
        if not self._conversation.turns:
            raise CommandFailed("there is no message yet.", hint="Type one and press Enter.")
        line = json.dumps({"messages": self._conversation.messages()}, ensure_ascii=False)
        try:
            with Path(file).expanduser().open("a", encoding="utf-8") as opened:
                opened.write(line + "\n")
        except OSError as error:
            raise CommandFailed(f"{file} cannot be written: {error.strerror}.") from error
        click.echo(f"Added to {file}.", err=True)


def _words(text: str) -> tuple[str, str]:
    name, _, rest = text[1:].strip().partition(" ")
    return name.lower(), rest.strip()


def read_message() -> str | None:
    """The next message or command, of one or several lines; None at the end of the input."""
    while True:
        try:
            first = input(YOU if sys.stdin.isatty() else "")
            return _rest_of(first)
        except EOFError:
            if sys.stdin.isatty():
                click.echo("", err=True)
            return None
        except KeyboardInterrupt:
            click.echo("\nCtrl-D or /quit leaves.", err=True)


def _rest_of(line: str) -> str:
    """The whole message that begins with this line."""
    prompt = MORE if sys.stdin.isatty() else ""
    if line.strip().startswith(BLOCK):
        lines = [line.strip().removeprefix(BLOCK)]
        if lines[0].endswith(BLOCK):
            return lines[0].removesuffix(BLOCK)
        while not lines[-1].rstrip().endswith(BLOCK) or len(lines) == 1:
            lines.append(input(prompt))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(input(prompt))
    return "\n".join(lines)


@click.command(
    "chat",
    epilog=examples(
        "tinkex chat",
        "tinkex chat tinker://RUN/sampler_weights/final",
        'tinkex chat --system "Be brief." --temperature 0.7',
    ),
)
@click.argument(
    "model", required=False, metavar="[PATH|MODEL]", shell_complete=complete_checkpoints
)
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--max-tokens", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=1.0, show_default=True)
@click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True)
@click.option("--seed", type=int, help="The same seed and conversation give the same answer.")
@service_options
def command(model: str | None, system: str | None, **sampling: Any) -> None:
    """Talk to a base model, or to a checkpoint: tinker://RUN/sampler_weights/NAME.

    Without an argument, the first base model of the service answers. /help in the conversation
    lists its commands.

    Uses the service at TINKER_BASE_URL or --base-url; `--base-url local` starts a local server.
    """
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # some builds of Python do not have it
            import readline  # noqa: F401  gives `input` history and editing

    with tinkex.ServiceClient(**service_arguments()) as service:
        answering = Model(service, model)
        click.echo(f"{answering.name}\n{GREETING}", err=True)
        params = tinkex.SamplingParams(**sampling)
        Chat(service, answering, params, Conversation(system)).run()
