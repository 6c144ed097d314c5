"""`shoal generate` and `shoal chat`: ask a running orchestrator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cli.terminal import note, report, to_jsonable, write_json, write_text
from shoal.config import DEFAULT_PORT
from shoal.errors import ContextExceeded, InvalidRequest, ShoalError
from shoal.types import QosClass

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.generation import GenerateOptions, Generation

Server = Annotated[str, typer.Option(envvar="SHOAL_SERVER", help="The orchestrator's address.", show_envvar=True)]
Model = Annotated[str | None, typer.Option(help="Name of the model; by default the one that is served.")]
System = Annotated[str | None, typer.Option(help="A system message that comes first.")]
MaxTokens = Annotated[int | None, typer.Option(help="End the answer after so many tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; higher is more surprising.")]
TopP = Annotated[float | None, typer.Option(help="Choose among the likeliest tokens of this total probability.")]
TopK = Annotated[int | None, typer.Option(help="Choose among so many likeliest tokens.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens less likely than this times the likeliest one.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: less repetition.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Above 0: fewer tokens that the answer has used.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Above 0: the fewer, the more often it has.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, prompt, class and options: same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be given several times.")]
Qos = Annotated[QosClass | None, typer.Option(help="How to be served; latency computes rows alone: other last bits.")]
Tenant = Annotated[str | None, typer.Option(help="On whose account; tenants share fairly.")]
Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline", help="Seconds the answer may take; refused at once if not even its first token can make it."
    ),
]
Pace = Annotated[float | None, typer.Option("--pace", help="At most so many tokens a second.")]

DEFAULT_SERVER = f"127.0.0.1:{DEFAULT_PORT}"
HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    qos: Qos = None,
    tenant: Tenant = None,
    deadline: Deadline = None,
    pace: Pace = None,
    model: Model = None,
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw/--chat", help="Continue the text as it is / answer it as a chat.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the whole answer as one JSON object.")] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Ask once and print the answer as it comes."""
    if raw and system is not None:
        raise typer.BadParameter("a system message needs a chat: leave out --raw or --system")
    text = _read_stdin() if prompt == "-" else prompt
    options = _options(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        seed=seed, stop=stop, qos_class=qos, tenant=tenant, deadline_s=deadline, max_tokens_per_s=pace, model=model,
    )  # fmt: skip
    from shoal.client import Client

    with Client(server) as client:
        if raw:
            answer = _stream(client, options, prompt=text, is_shown=not json)
        else:
            answer = _stream(client, options, messages=_messages(system, text), is_shown=not json)
    if json:
        write_json(answer_to_jsonable(answer))
    else:
        note(summary(answer))


def chat(
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    qos: Qos = None,
    tenant: Tenant = None,
    pace: Pace = None,
    model: Model = None,
    system: System = None,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Talk in turns; every turn knows the ones before it."""
    options = _options(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        seed=seed, qos_class=qos, tenant=tenant, max_tokens_per_s=pace, model=model,
    )  # fmt: skip
    from shoal.client import Client

    start = _messages(system)
    with Client(server) as client:
        if sys.stdin.isatty():
            note(f"{client.status().model} at {server}: {HELP}")
        _converse(client, start, list(start), options)


def _converse(
    client: Client, start: list[dict[str, str]], history: list[dict[str, str]], options: GenerateOptions
) -> None:
    """Take lines until there are no more; history grows, and goes back to `start` on /reset."""
    for line in _lines():
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                history[:] = start
                note("the conversation starts anew")
            case "/help":
                note(HELP)
            case command if command.startswith("/") and " " not in command and command.count("/") == 1:
                note(f"no command {command}: {HELP}")
            case text:
                _take_turn(client, history, text, options)


def answer_to_jsonable(answer: Generation) -> object:
    """An answer as --json prints it; logprobs only if there are some."""
    fields = cast(dict[str, Any], to_jsonable(answer))
    if not answer.logprobs:
        del fields["logprobs"]
    return fields


def summary(answer: Generation) -> str:
    return (
        f"{answer.finish_reason.value}, {answer.completion_tokens} tokens, "
        f"first after {answer.ttft_ms:.0f} ms, {answer.tokens_per_s:.1f} tokens/s; request {answer.request_id}"
    )


def _options(**options: Any) -> GenerateOptions:
    """Only what was given: the server has the defaults."""
    return cast("GenerateOptions", {name: value for name, value in options.items() if value is not None})


def _messages(system: str | None, prompt: str | None = None) -> list[dict[str, str]]:
    roles = (("system", system), ("user", prompt))
    return [{"role": role, "content": content} for role, content in roles if content is not None]


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompt", f"standard input is not UTF-8 (byte {error.start})") from None


def _stream(client: Client, options: GenerateOptions, *, is_shown: bool, **source: Any) -> Generation:
    """Read an answer to its end, showing it on the way; leaves the cursor at the start of a line."""
    with client.stream(**source, **options) as stream:
        try:
            for delta in stream:
                if is_shown:
                    write_text(delta.text)
        finally:
            if is_shown and stream.text and not stream.text.endswith("\n"):
                write_text("\n")
        return stream.result


def _take_turn(client: Client, history: list[dict[str, str]], text: str, options: GenerateOptions) -> None:
    """Ask, show, remember; a stopped answer is remembered as far as it came, a refused question not at all."""
    history.append({"role": "user", "content": text})
    with client.stream(messages=history, **options) as stream:
        try:
            for delta in stream:
                write_text(delta.text)
            write_text("\n")
            if sys.stdin.isatty():
                note(summary(stream.result))
        except KeyboardInterrupt:
            write_text("\n")
            note("stopped")
        except ShoalError as error:
            history.pop()
            if not sys.stdin.isatty():
                raise
            report(error)
            if isinstance(error, ContextExceeded):
                note("the conversation is as long as the context allows: /reset starts anew")
            return
    history.append({"role": "assistant", "content": stream.text})


def _lines() -> Iterator[str]:
    """What the user enters, with a prompt and line editing where there is a terminal."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401 - gives input() its line editing

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            note(f"\n{HELP}")
        except EOFError:
            note("")
            return
