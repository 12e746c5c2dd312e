# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""An evidence file in which no figure is like another, so that one in the wrong place is noticed; and a trace."""

from __future__ import annotations

import itertools
from typing import Any

from afd_dsv4.evidence.report import SECTIONS, Source, figure

RFC = 7
#: ns, op, fields: two slots, three leases.
TRACE = [
    (5_000_000, "acquire", 1, 0, "generation 1", "live"),
    (6_000_000, "acquire", 2, 1, "generation 2", "dummy"),
    (7_000_000, "touch", 1, 0, 3, (), ("pages",), ("c4", 1)),
    (8_000_000, "record", 4, 3),
    (9_000_000, "seal", 1, True),
    (9_500_000, "wait", 4, 5),
    (9_750_000, "touch", 2, 1, 5, (), ("pages",), None),
    (10_000_000, "seal", 2, True),
    (11_000_000, "settle", 1, "released"),
    (12_000_000, "acquire", 3, 0, "generation 3", "live"),
    (15_000_000, "settle", 3, "released"),
]


def evidence(device: Source = Source.SOFTNPU, tokens: int = 32768) -> dict[str, Any]:
    """A whole file, of primes."""
    primes = (n for n in itertools.count(1009) if all(n % p for p in range(2, int(n**0.5) + 1)))

    def count(source: Source = device, unit: str = "rows") -> dict[str, Any]:
        return figure(next(primes), unit, source)

    def side() -> dict[str, Any]:
        groups = {name: next(primes) for name in ("c4_mla", "swa", "c4_state")}
        return {
            "blocks_needed": sum(groups.values()),
            "by_group": groups,
            "free_blocks": next(primes),
            "block_bytes": next(primes),
            "admitted": False,
            "prompts_started": next(primes),
        }

    def compared() -> dict[str, Any]:
        return {name: count() for name in ("compressed", "compressed_different", "tail", "tail_different")}

    memory = {
        name: figure(next(primes) << 20, "bytes", Source.PLAN if name.startswith("native") else device)
        for name in (
            *("native_state_payload", "native_state_padding", "native_state_allocated_for_32768_tokens"),
            *("plugin_tails", "plugin_spares", "plugin_lists", "plugin_tables", "plugin_staging", "plugin_host"),
            *("plugin_tails_spares_staging_lists", "plugin_held_by_the_allocator", "activations_peak", "device_peak"),
            *("tail_bytes_per_request", "slot_bytes", "native_state_unused_of_allocated"),
        )
    }
    scaling = [
        {
            "what": what,
            "scale": scale,
            "tails": count(unit="bytes"),
            **({"transient": count(unit="bytes")} if more else {}),
        }
        for what, scale, more in (("layers", 1, False), ("layers of a forward", 2, True))
    ]
    touches = {name: count() for name in ("mismatched_rows_touches_on", "mismatched_rows_touches_off")} | {
        name: count(unit="count") for name in ("unordered_reuses_touches_on", "unordered_reuses_touches_off")
    }
    points = [
        {
            "number": number,
            "text": f"what point {number} asks for",
            "verdict": ("pass", "not_shown_here", "fail")[number % 3],
            "because": f"reason {number} <&>",
            "source": device.value,
        }
        for number in range(1, RFC + 1)
    ]
    found = {
        "stack": {
            "python": "3.11.7",
            "torch": "2.13.0",
            "vllm_commit": None,
            "device": device.value,
            "block_size": 128,
        },
        "command": ["afd-dsv4", "evidence", "--out", "a folder"],
        "batch": {"tokens": tokens, "requests": [{"name": "request 0", "start": 0, "end": tokens, "tokens": tokens}]},
        "admission": {
            "source": "plan",
            "scenarios": [
                {
                    "scenario": name,
                    "prompts": [next(primes) for _ in range(count)],
                    "max_num_seqs": seqs,
                    "budget_bytes": next(primes) << 20,
                    "native": {**side(), "prompts_started": 0},
                    "plugin": side(),
                }
                for name, seqs, count in (("published", 16, 1), ("one_32k_prompt", 128, 1), ("packed_batch", 128, 4))
            ],
            "engine": {
                "prompt": next(primes),
                "blocks": {"native": next(primes), "plugin": next(primes)},
                "steps_waited": {"native": count(unit="steps"), "plugin": count(unit="steps")},
                "tokens": count(unit="tokens"),
                "tokens_that_differ": count(unit="tokens"),
            },
        },
        "memory": {**memory, "scaling": scaling},
        "parity": {
            "rows": [{"cut": f"cut at phase {phase}", "seconds": 1.5 + phase, **compared()} for phase in (1, 127)],
            "rows_total": compared(),
            "rows_full_hidden": compared(),
            "tokens": {
                "tolerance": 0.00059187,
                "layer_types": ["sliding_attention", "compressed_sparse_attention"],
                "free_running": {"decided": next(primes), "mismatches": next(primes), "max_difference": "inf"},
                "controls": [{"name": "zeroed", "mismatches": next(primes), "caught": True}],
                "source": device.value,
            },
        },
        "order": {
            "trace": {"file": "trace.jsonl", **{name: count(unit="count") for name in _TRACE}},
            "waits": count(unit="count"),
            "negative_controls": {
                "touches": [{"load": "a uBatch on each stream", **touches}],
                "table_rules": [
                    {"rule": "TAIL_MAPPED", "mutant": "drop", "ratio": 4, "caught": at > 0} for at in range(3)
                ],
                "launched_broken": [{"rule": "TAIL_MAPPED", "sabotage": "forget", **compared()}],
            },
        },
        "performance": {
            "device_time": "not_shown_here",
            "evidence_seconds": figure(219.25, "s", device),
            "reuse": {
                "32,768 tokens": {
                    "throughput_of": {
                        "slots": {
                            "over_private": figure(1.0141, "ratio", device),
                            "over_synchronised": figure(1.0313, "ratio", device),
                        }
                    }
                }
            },
            "parts_seconds": {"rows: 1/2 of ~all": figure(50.3, "s", device)},
        },
        "isolation": {"symbols_compared": next(primes), "changed": [], "planted_changes_seen": ["vllm.a", "vllm.b"]},
        "verdicts": {
            "points": points,
            "checks": [
                {"name": "rows: all", "passed": True, "expected": "0 rows", "found": "0 rows"},
                {"name": "memory: <none>", "passed": False, "expected": "less", "found": "more & more"},
            ],
        },
        "passed": False,
    }
    assert tuple(found) == SECTIONS
    return found


_TRACE = ("unordered_reuses", "records", "leases", "touches", "edges", "dropped")
