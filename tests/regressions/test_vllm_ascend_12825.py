# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#12825 (review): temporaries of the auxiliary stream are freed early.

Symptom: memory that the auxiliary stream still reads is given out again on the main stream.
Here: torch_npu's own truth table of who must wait for whom, over every order of the streams; and a workspace slot,
whose touches always give both directions. The same table as traces: tests/property/test_order.py
(test_the_truth_table_of_torch_npu). The allocator itself, with and without record_stream:
tests/integration/test_softnpu_streams.py
(test_freed_memory_is_reused_in_stream_order_so_another_stream_needs_record_stream).
"""

from __future__ import annotations

import pytest

from tests.explorer.raw import HostOp, Program, Query, Queue, Record, Sync, Wait, reads, run, writes
from tests.regressions.machine import ORDERS, Machine, corrupted

MAIN, SIDE = 0, 1
CREATE, USE, REUSE = Queue(MAIN, writes(1)), Queue(SIDE, reads(1)), Queue(MAIN, writes(2))
MADE = (Queue(MAIN, Record("made")), Queue(SIDE, Wait("made")))
USED = (Queue(SIDE, Record("used")), Queue(MAIN, Wait("used")))
HOST_MADE = (Queue(MAIN, Record("made")), Sync("made"))
HOST_USED = (Queue(SIDE, Record("used")), Sync("used"))
SAME = Queue(MAIN, reads(1))
# The allocator records on the noted stream when the memory is freed, and gives it out only once that has passed.
NOTED = (Queue(SIDE, Record("freed")), Query("freed", passed=(REUSE,)))


@pytest.mark.parametrize(
    ("use", "before_use", "reuse", "race", "keep_alive"),
    [
        pytest.param(USE, (), (REUSE,), True, True, id="no sync"),
        pytest.param(USE, MADE, (REUSE,), False, True, id="usage waits for creation only"),
        pytest.param(USE, (), (*USED, REUSE), True, False, id="creation waits for usage only"),
        pytest.param(USE, MADE, (*USED, REUSE), False, False, id="both directions"),
        pytest.param(USE, HOST_MADE, (*HOST_USED, REUSE), False, False, id="device synchronize"),
        pytest.param(USE, (), NOTED, True, False, id="record_stream only"),
        pytest.param(SAME, (), (REUSE,), False, False, id="same stream"),
    ],
)
def test_the_truth_table_over_every_order(
    use: HostOp, before_use: tuple[HostOp, ...], reuse: tuple[HostOp, ...], race: bool, keep_alive: bool
) -> None:
    streams = ((), ())
    assert (run(Program(streams, (CREATE, *before_use, use))).violating > 0) == race
    # Was it created for certain, only the reuse can be too early.
    created = (CREATE, *HOST_MADE)
    assert (run(Program(streams, (*created, use, *reuse))).violating > 0) == keep_alive


def temporaries(machine: Machine) -> None:
    """Each layer's temporary is made on the main stream and read on the auxiliary one, in one place of the slot."""
    for generation in (1, 2):
        lease = machine.acquire(generation)
        for layer in range(4):
            lease.touch(machine.a, writes=["temporary"], step=layer)
            machine.write(machine.a, "temporary", (generation, layer))
            lease.touch(machine.b, reads=["temporary"], step=layer)
            machine.read(machine.b, "temporary", (generation, layer))
        lease.seal()


def test_touches_give_both_directions() -> None:
    assert corrupted(temporaries, slots=1) == 0


def test_without_them_the_temporaries_are_overwritten() -> None:
    """Negative control."""
    assert corrupted(temporaries, slots=1, ordered=False) > ORDERS / 2
