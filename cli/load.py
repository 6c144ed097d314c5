"""`shoal load`: put a server under load and report what came of it; and make the traces that runs replay.

Owns commands and options. Runs and what is shown of them are in `cli.load_run`, plans and traces are made by `loadtest`.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.ask import DEFAULT_SERVER, Server
from cli.load_report import Files
from cli.load_run import KEY_VARIABLE, Ramping, Settings, ramp_and_report, run_and_report
from cli.parameters import with_parameters
from cli.terminal import say
from shoal.errors import ConfigError
from shoal.types import QosClass

if TYPE_CHECKING:
    from loadtest.plan import Plan
    from loadtest.traces import Trace

app = typer.Typer(no_args_is_help=True, help="Put a server under load and report latencies, goodput and errors.")

DEFAULT_DURATION_S = 60.0
FIRST_RATE_PER_S = 1.0

OutFile = Annotated[Path, typer.Argument(help="The file to write.", dir_okay=False)]
WorkloadName = Annotated[str, typer.Option("--workload", help="What is asked: a shipped workload, or a .toml file.")]
NumRequests = Annotated[int, typer.Option("--requests", help="How many requests.", min=1)]
MaxRequests = Annotated[
    int | None, typer.Option("--requests", help="How many requests; by default all.", show_default=False, min=1)
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same requests at the same times.", min=0)]


def _settings(
    seed: Seed = 1,
    server: Server = DEFAULT_SERVER,
    openai: Annotated[
        str | None,
        typer.Option(
            help=f"Ask this server with OpenAI's HTTP interface instead; its key: {KEY_VARIABLE}.", metavar="URL"
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model; by default the one that is served.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw/--chat", help="Prompts are continued as they are / are messages of a chat.")
    ] = False,
    ttft_ms: Annotated[
        float | None, typer.Option(help="Objective of all classes for the first token; 0: none.", min=0)
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(help="Objective of all classes for each further token; 0: none.", min=0)
    ] = None,
    timeout: Annotated[float, typer.Option(help="End after so many seconds, with what there is.", min=0.1)] = 3600.0,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON; - to stdout.", dir_okay=False)
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as a page.", dir_okay=False)] = None,
    records: Annotated[bool, typer.Option("--records", help="In the JSON: every request by itself.")] = False,
    ray: Annotated[
        int,
        typer.Option(
            "--ray", help="Ask from so many harnesses on a Ray cluster; for `server` and `trace`.", min=0, max=1024
        ),
    ] = 0,
    ray_address: Annotated[
        str, typer.Option(help="With --ray: the cluster's head, HOST:PORT; auto: of this machine.")
    ] = "auto",
) -> Settings:
    files = Files(json, html, records)
    return Settings(seed, server, openai, model, raw, ttft_ms, tpot_ms, timeout, files, ray, ray_address)


# The options of _settings(), which makes Settings of their values.
with_settings = with_parameters(list(inspect.signature(_settings, eval_str=True).parameters.values()))


@app.command("single-stream")
@with_settings
def single_stream(workload: WorkloadName = "chat", requests: NumRequests = 20, **values: Any) -> None:
    """Ask one after the other, as one user alone would."""
    settings = _settings(**values)
    from loadtest import scenarios
    from loadtest.workloads import load_workload

    loaded = load_workload(workload)
    plan = scenarios.single_stream(loaded, seed=settings.seed, num_requests=requests)
    run_and_report(settings, plan, loaded.slos)


@app.command("server")
@with_settings
def server_scenario(
    workload: WorkloadName = "chat",
    rate: Annotated[
        float | None, typer.Option(help="Requests a second; with --ramp the first rate to try.", show_default=False)
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="1: Poisson; less: in bursts; more: steadier; inf: constant.")
    ] = 1.0,
    duration: Annotated[
        float | None, typer.Option(help=f"Seconds in which requests come.  [default: {DEFAULT_DURATION_S:g}]")
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="How many, instead of a duration.", min=1)] = None,
    ramp: Annotated[bool, typer.Option("--ramp", help="Find the highest rate that keeps the objectives.")] = False,
    good_share: Annotated[float, typer.Option(help="With --ramp: share of requests that must meet theirs.")] = 0.99,
    probes: Annotated[int, typer.Option(help="With --ramp: how many rates to try at most.", min=1, max=50)] = 12,
    **values: Any,
) -> None:
    """Ask at a rate, whatever the server does."""
    settings = _settings(**values)
    from loadtest import scenarios
    from loadtest.workloads import load_workload

    if requests is None and duration is None:
        duration = DEFAULT_DURATION_S
    loaded = load_workload(workload)

    def make(rate_per_s: float | None) -> Plan:
        return scenarios.server(
            loaded,
            seed=settings.seed,
            rate_per_s=rate_per_s,
            num_requests=requests,
            duration_s=duration,
            burstiness=burstiness,
        )

    if ramp:
        first = rate or loaded.rate_per_s or FIRST_RATE_PER_S
        ramp_and_report(settings, make, loaded.slos, Ramping(first, good_share, probes))
    else:
        run_and_report(settings, make(rate), loaded.slos)


@app.command("offline")
@with_settings
def offline(
    workload: WorkloadName = "batch",
    requests: NumRequests = 32,
    concurrency: Annotated[
        int | None, typer.Option(help="How many at once; by default all.", show_default=False, min=1)
    ] = None,
    **values: Any,
) -> None:
    """Ask all at once: how much gets done."""
    settings = _settings(**values)
    from loadtest import scenarios
    from loadtest.workloads import load_workload

    loaded = load_workload(workload)
    plan = scenarios.offline(loaded, seed=settings.seed, num_requests=requests, concurrency=concurrency)
    run_and_report(settings, plan, loaded.slos)


@app.command("trace")
@with_settings
def trace_scenario(
    trace: Annotated[str, typer.Argument(help="A shipped trace, or a .jsonl file.")] = "small",
    speed_up: Annotated[float, typer.Option(help="Replay so many times as fast.")] = 1.0,
    requests: MaxRequests = None,
    qos: Annotated[QosClass, typer.Option(help="Class of requests that name none.")] = QosClass.BALANCED,
    **values: Any,
) -> None:
    """Ask at the times and lengths of a trace."""
    settings = _settings(**values)
    from loadtest import scenarios
    from loadtest.traces import read_trace
    from loadtest.workloads import DEFAULT_SLOS

    recorded = read_trace(trace)
    plan = scenarios.trace(recorded, seed=settings.seed, speed_up=speed_up, num_requests=requests, qos=qos)
    run_and_report(settings, plan, DEFAULT_SLOS)


@app.command("make-trace")
def make_trace(
    out: OutFile,
    seed: Seed = 1,
    conversations: Annotated[int, typer.Option(help="How many conversations.", min=1)] = 24,
    rate: Annotated[float, typer.Option(help="Conversations that begin a second.")] = 0.5,
    max_turns: Annotated[int, typer.Option(help="Most turns of one.", min=1)] = 4,
    block_tokens: Annotated[int, typer.Option(help="Length of the blocks that may be shared.", min=3)] = 8,
    max_input_tokens: Annotated[int, typer.Option(help="Longest prompt.", min=64)] = 256,
) -> None:
    """Make a trace of conversations with shared prefixes."""
    from loadtest import traces

    made = traces.make_trace(
        seed,
        num_conversations=conversations,
        rate_per_s=rate,
        max_turns=max_turns,
        block_tokens=block_tokens,
        max_input_tokens=max_input_tokens,
    )
    _write_trace(out, made)


@app.command("convert-mooncake")
def convert_mooncake(
    source: Annotated[Path, typer.Argument(help="A trace of Mooncake's, in JSON lines.", exists=True, dir_okay=False)],
    out: OutFile,
    scale: Annotated[int, typer.Option(help="Divide lengths by this; must divide the block's 512.", min=1)] = 64,
    output_scale: Annotated[int | None, typer.Option(help="Divide those of answers by this.", min=1)] = None,
    floor: Annotated[int, typer.Option(help="Shortest length.", min=1)] = 8,
    ceiling: Annotated[int | None, typer.Option(help="Longest length.", min=1)] = None,
    speed_up: Annotated[float, typer.Option(help="Divide the times between requests by this.")] = 1.0,
    max_requests: Annotated[int | None, typer.Option(help="Take so many from the start.", min=1)] = None,
) -> None:
    """Shrink a trace of Mooncake to small devices."""
    from loadtest import traces

    try:
        lines = source.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 (byte {error.start})", field="source") from None
    converted = traces.convert_mooncake(
        lines,
        where=source.name,
        scale=scale,
        output_scale=output_scale,
        floor=floor,
        ceiling=ceiling,
        speed_up=speed_up,
        max_requests=max_requests,
    )
    _write_trace(out, converted)


def _write_trace(out: Path, trace: Trace) -> None:
    from loadtest.traces import write_trace

    write_trace(out, trace)
    last_s = trace.entries[-1].timestamp_ms / 1000
    say(f"{out}: {len(trace.entries)} requests over {last_s:.0f} s, blocks of {trace.block_tokens} tokens")
