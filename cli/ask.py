"""`shoal generate` and `shoal chat`: ask a running orchestrator."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cli.terminal import note, report, to_jsonable, write_json, write_text
from shoal.config import DEFAULT_PORT
from shoal.errors import ContextExceeded, InvalidRequest, SessionNotFound, ShoalError
from shoal.types import ContextOverflow, KVReuse, QosClass

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
Session = Annotated[
    str | None,
    typer.Option(help="A conversation that the server keeps under this name: what is asked is its next turn."),
]
Reuse = Annotated[
    KVReuse | None,
    typer.Option("--kv-reuse", help="Stored KV to use: as devices' policies say, only exact, or none (nor store any)."),
]
Overflow = Annotated[
    ContextOverflow | None,
    typer.Option(
        "--overflow",
        help="A session longer than the context: refuse it, or window: go on with its first and last tokens.",
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
    session: Session = None,
    kv_reuse: Reuse = None,
    overflow: Overflow = None,
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
    text = read_prompt(prompt)
    options = _options(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        seed=seed, stop=stop, qos_class=qos, tenant=tenant, deadline_s=deadline, max_tokens_per_s=pace, model=model,
        session_id=session, kv_reuse=kv_reuse, context_overflow=overflow,
    )  # fmt: skip
    from shoal.client import Client

    with Client(server) as client:
        if raw:
            answer = _stream(client, options, prompt=text, is_shown=not json)
        else:
            answer = _stream(client, options, messages=messages_of(system, text), is_shown=not json)
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
    session: Session = None,
    kv_reuse: Reuse = None,
    overflow: Overflow = None,
    model: Model = None,
    system: System = None,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Talk in turns; every turn knows the ones before it."""
    options = _options(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        seed=seed, qos_class=qos, tenant=tenant, max_tokens_per_s=pace, model=model, session_id=session,
        kv_reuse=kv_reuse, context_overflow=overflow,
    )  # fmt: skip
    from shoal.client import Client

    start = messages_of(system)
    with Client(server) as client:
        if sys.stdin.isatty():
            note(f"{client.status().model} at {server}: {HELP}")
        history = list(start)
        if session is not None and _goes_on(client, session, tenant or ""):
            if system is not None:
                note("the system message came with its first turn: the one given now is left out")
            history.clear()
        _converse(client, start, history, options)


def _converse(
    client: Client, start: list[dict[str, str]], history: list[dict[str, str]], options: GenerateOptions
) -> None:
    """Take lines until there are no more; history grows where the server keeps none, and is `start` again on /reset."""
    for line in _lines():
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                _forget_session(client, options)
                history[:] = start
                note("the conversation starts anew")
            case "/help":
                note(HELP)
            case command if command.startswith("/") and " " not in command and command.count("/") == 1:
                note(f"no command {command}: {HELP}")
            case text:
                _take_turn(client, history, text, options)


def _goes_on(client: Client, session: str, tenant: str) -> bool:
    """Whether the server has this conversation already: then its system message came with its first turn."""
    known = [one for one in client.sessions(tenant) if one.session_id == session]
    for one in known:
        note(f"session {session} goes on: {one.num_turns} turns, {one.num_tokens} tokens")
    return bool(known)


def _forget_session(client: Client, options: GenerateOptions) -> None:
    if "session_id" in options:
        with contextlib.suppress(SessionNotFound):
            client.delete_session(options["session_id"], options.get("tenant", ""))


def answer_to_jsonable(answer: Generation) -> object:
    """An answer as --json prints it; logprobs only if there are some."""
    fields = cast(dict[str, Any], to_jsonable(answer))
    if not answer.logprobs:
        del fields["logprobs"]
    return fields


def summary(answer: Generation) -> str:
    return (
        f"{answer.finish_reason.value}, {answer.completion_tokens} tokens, "
        f"first after {answer.ttft_ms:.0f} ms, {answer.tokens_per_s:.1f} tokens/s{_reuse(answer)}{_dropped(answer)}"
        f"{_interruptions(answer)}; "
        f"request {answer.request_id}"
    )


def _reuse(answer: Generation) -> str:
    cache = answer.cache
    if not cache.cached_tokens:
        return ""
    tiers = {0: "host", cache.cached_tokens: "redis"}.get(cache.from_redis_tokens, "host and redis")
    exact = "" if cache.is_exact else ", not exact"
    return f", reused {cache.cached_tokens} of {answer.prompt_tokens} prompt tokens ({tiers}, {cache.codec}{exact})"


def _dropped(answer: Generation) -> str:
    return f", {answer.dropped_tokens} tokens of the session left out" if answer.dropped_tokens else ""


def _interruptions(answer: Generation) -> str:
    """What the answer outlived."""
    told = ""
    if answer.num_recoveries:
        told += f", recovered {_times(answer.num_recoveries)} from the loss of a device"
    if answer.has_changed_kernels:
        told += ", on a processor of another kind (near-ties may have fallen differently)"
    if answer.num_resumes:
        told += f", resumed {_times(answer.num_resumes)} after its stream broke off"
    return told


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _options(**options: Any) -> GenerateOptions:
    """Only what was given: the server has the defaults."""
    return cast("GenerateOptions", {name: value for name, value in options.items() if value is not None})


def messages_of(system: str | None, prompt: str | None = None) -> list[dict[str, str]]:
    roles = (("system", system), ("user", prompt))
    return [{"role": role, "content": content} for role, content in roles if content is not None]


def read_prompt(prompt: str) -> str:
    """The prompt, or what standard input has where it is -."""
    if prompt != "-":
        return prompt
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
    """Ask, show, remember; a stopped answer is remembered as far as it came, a refused question not at all.

    Of a session, the server remembers: the history has only what it was not told yet.
    """
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
    if "session_id" not in options:
        history.append({"role": "assistant", "content": stream.text})
    elif stream.result.token_ids:
        history.clear()
    else:
        history.pop()


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
