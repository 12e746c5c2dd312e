# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Says why a queue stands still, and which only seem to.

Problem: vLLM counts a request that does not fit as `waiting, reason="capacity"`, at 0 % usage, and no more.
Way: a queue in which nobody runs and nothing is in use is stuck where a log says that nothing was computed for a whole
interval, or where the prompt that is asked about cannot fit: then nobody will free anything. One instant, which is all
that a metrics page shows, looks the same between two steps of requests that end where they start. Where the length of
the first prompt is not known, it is said which lengths start.
Not here: blocks (`case.py`, `fits.py`), and what a request would find later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from afd_dsv4.admission import NULL_BLOCKS
from afd_dsv4.doctor import fits, prefix
from afd_dsv4.doctor.case import Case
from afd_dsv4.doctor.facts import Engine, Finding, Server, Severity

#: Batches for which the largest prompt is shown where the server's own is not known.
TYPICAL_BATCHES: Final = (4096, 8192, 16384, 32768, 65536)

_STUCK: Final = (*fits.NEVER_ADMITTED, "vllm-project/vllm-metal#479")
_SECOND_LOOK: Final = (
    "take a second page 10 s later: where it shows the same, and vllm:prompt_tokens_total and "
    "vllm:generation_tokens_total have not grown, the queue is stuck; a log, with --log, says so by itself"
)


def findings(case: Case | None, server: Server, prompt: int | None = None) -> Iterator[Finding]:
    """Everything that the numbers say.

    Args:
        case: the server with its model, None where blocks cannot be counted.
        server: the same numbers.
        prompt: tokens of the prompt that is asked about, the same as the case's where there is one.
    """
    explained = False
    sure = [engine for engine in server.engines if engine.stuck]
    unsure = [engine for engine in server.engines if engine.looks_stuck and not engine.stuck]
    if case is None and prompt is not None:
        yield fits.not_judged(case, server, prompt)
    if case is not None:
        if small := fits.startup(case):
            yield small
        here = [f"So it is here: {_queue(engine)}." for engine in server.engines if engine.looks_stuck]
        verdict = fits.prompt(case, here)
        if verdict and verdict.code == "prompt-fits" and sure:
            verdict, sure = _fits_and_waits(case, verdict, sure[0]), []
        explained = verdict is not None and verdict.code == "prompt-never-fits"
        if verdict:
            yield verdict
    if not explained:
        yield from (_stuck(engines, case, server) for engines in (sure, unsure) if engines)
    yield from _moving(server)
    yield from prefix.findings(case)


def _fits_and_waits(case: Case, fitting: Finding, stuck: Engine) -> Finding:
    side = fitting.numbers["plugin" if case.plugin else "native"]
    return Finding(
        "stuck-although-it-fits",
        Severity.PROBLEM,
        f"{_queue(stuck)}, although a prompt of {case.prompt:,} tokens needs {side['blocks_needed']:,} of "
        f"{side['free_blocks']:,} blocks",
        (
            (
                "By these numbers it starts. So the first request of the queue is another, longer one, behind which "
                "this one waits; or a number here is not the server's."
            ),
        ),
        ("compare the numbers above with the server's log (give it with --log)",),
        _STUCK,
        fitting.numbers,
    )


def _stuck(engines: list[Engine], case: Case | None, server: Server) -> Finding:
    """A queue that is stuck, or looks so, with nobody knowing of what length its first prompt is."""
    sure = engines[0].stuck
    batch = server.max_num_batched_tokens
    if case:
        free = case.free(batch or TYPICAL_BATCHES[-1], plugin=case.plugin)
    else:
        free = server.num_blocks - NULL_BLOCKS if server.num_blocks else None
    blocks = f"all {'' if free is None else f'{free:,} '}blocks are free"
    certain = (
        f"Nobody runs and nothing was computed, so {blocks}, and still the first request of the queue wants more. "
        "Nobody will free any: it waits until it is aborted or the server is restarted, and nothing behind it is tried."
    )
    perhaps = (
        f"Nobody runs, so {blocks}. Either the first request of the queue wants more, and then it waits until it is "
        "aborted or the server is restarted; or this is an instant between two steps, as of a server whose requests "
        "end in the step in which they start, for one token each. One page cannot tell which."
    )
    why = [
        certain if sure else perhaps,
        *(f"The same elsewhere: {_queue(engine)}." for engine in engines[1:]),
    ]
    remedies = [] if sure else [_SECOND_LOOK]
    numbers: dict[str, Any] = {
        "engines": {engine.name: engine.for_capacity for engine in engines},
        "free_blocks": free,
    }
    if case and free is not None:
        rows = [
            (tokens, case.largest_prompt(tokens, plugin=False), case.largest_prompt(tokens, plugin=True))
            for tokens in ((batch,) if batch else TYPICAL_BATCHES)
        ]
        numbers["largest_prompt"] = {str(tokens): {"native": one, "plugin": two} for tokens, one, two in rows}
        why += [
            f"{'tokens a step':<16}{'largest prompt that starts, natively':>38}{'with this plugin':>20}",
            *(
                f"{tokens:<16,}{_prompt_shown(one, case):>38}{_prompt_shown(two, case):>20}"
                for tokens, one, two in rows
            ),
        ]
        if all(row[1 + case.plugin] == case.max_model_len - 1 for row in rows):
            why.append(
                "By these numbers every prompt starts: one of them is not the server's, or its model is another."
            )
        elif not case.plugin:
            why.append(
                f"Who multiplies: the compressors' states, one block for every {case.layout.c4_page_rows} tokens "
                f"(C4) and one for every {case.layout.c128_page_rows} (C128) of the batch."
            )
            helps = any(with_it > without for _, without, with_it in rows)
            remedies.append(f"a smaller --max-num-batched-tokens{', or this plugin' * helps}: see the table")
    if case and batch:
        why += case.should_not_run(batch)
    if case is None and _another_model(server):
        why.append(f"Blocks are counted for DeepSeek-V4 only, and {server.model} is not called so (--model decides).")
    elif missing := fits.missing(case, server):
        remedies.append(f"to know more, give {', '.join(missing)}")
    if not sure:
        title = f"{_queue(engines[0])}: it looks stuck"
        return Finding("looks-stuck", Severity.PROBLEM, title, tuple(why), tuple(remedies), _STUCK, numbers)
    return Finding(
        "stuck-queue",
        Severity.PROBLEM,
        f"{_queue(engines[0])}: the first of the queue never starts",
        tuple(why),
        tuple(remedies),
        _STUCK,
        numbers,
    )


def _another_model(server: Server) -> bool:
    return server.model is not None and "deepseek" not in server.model.lower()


def _prompt_shown(tokens: int, case: Case) -> str:
    return "any" if tokens == case.max_model_len - 1 else f"{tokens:,}" if tokens else "none"


def _moving(server: Server) -> Iterator[Finding]:
    """Queues that stand in line, and are not stuck."""
    for engine in server.engines:
        if engine.deferred:
            held = f" ({server.kv_connector})" if server.kv_connector else ""
            yield Finding(
                "deferred",
                Severity.NOTE,
                f"{engine.label}: {_requests(engine.deferred)} deferred, for a KV transfer{held}, a LoRA adapter or a "
                "grammar, not for blocks",
                ("More blocks do not help them; look at the connector's own log and metrics.",),
                numbers={"engine": engine.name, "deferred": engine.deferred},
            )
        if engine.asleep:
            yield _asleep(engine)
        elif engine.for_capacity and (engine.running or engine.usage or engine.throughput):
            in_use = "an unknown share" if engine.usage is None else f"{100 * engine.usage:.1f} %"
            who = f"{engine.running} running" if engine.running else "nobody runs"
            who += f", {engine.throughput:,.1f} tokens a second" if engine.throughput else ""
            if not engine.name.isdigit() and not engine.name.startswith("1 "):
                yield _of_several(engine, who)
                continue
            yield Finding(
                "queue-moves",
                Severity.NOTE,
                f"{engine.label}: {_requests(engine.for_capacity)} waiting behind others: {who}, {in_use} of the KV "
                "cache is in use",
                (
                    (
                        "Not stuck as long as running requests end. A second look that shows the same numbers says "
                        "otherwise."
                    ),
                ),
                (),
                (),
                {"engine": engine.name, "waiting": engine.for_capacity, "running": engine.running},
            )


def _of_several(engine: Engine, who: str) -> Finding:
    return Finding(
        "queue-not-known",
        Severity.NOTE,
        f"{engine.label}: {_requests(engine.for_capacity)} waiting, {who}: whether they wait behind others or in an "
        "engine that is stuck is not known",
        ("That line of the log adds all engines up: one may run while another stands still.",),
        ("give the metrics page, which shows every engine by itself, with --metrics",),
        numbers={"engines": engine.name, "waiting": engine.for_capacity, "running": engine.running},
    )


def _asleep(engine: Engine) -> Finding:
    waiting = engine.for_capacity
    return Finding(
        "asleep",
        Severity.PROBLEM if waiting else Severity.NOTE,
        f"{engine.label} sleeps, with {_requests(waiting)} waiting",
        ("A sleeping engine starts nothing, however many blocks are free.",),
        ("wake it: POST /wake_up, or LLM.wake_up()",),
        (),
        {"engine": engine.name, "waiting": waiting},
    )


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"


def _queue(engine: Engine) -> str:
    waiting = _requests(engine.for_capacity)
    return f"{engine.label}: {waiting} waiting for capacity, none running, 0 % of the KV cache in use"
