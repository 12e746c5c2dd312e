# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm#52836 (reverts #49236; #41834): eager scratch is overwritten by the next layer's producer.

Symptom: BOS tokens in the output, only with prefill and decode at a time, in 7 of 7 rounds.
Here: layers and executions that use one workspace slot from several streams follow each other, in every order of the
streams. The smallest script without an arena is in tests/explorer/raw.py (4 of 6 orders wrong).
"""

from __future__ import annotations

import pytest

from afd_dsv4.geometry import CompressorKind, page_layout, preset
from afd_dsv4.workspace.order import Kind, check
from afd_dsv4.workspace.sizing import INT32, INT64, size_workspace, tail_shapes
from tests.regressions.machine import ORDERS, Machine, corrupted


def layers(machine: Machine) -> None:
    """Two layers of one execution; the second one runs on an auxiliary stream."""
    lease = machine.acquire(1)
    for layer, stream in enumerate((machine.a, machine.b)):
        lease.touch(stream, writes=["scratch"], step=layer)
        machine.use(stream, ("scratch", lease.slot.index), layer)
    lease.seal()


def executions(machine: Machine) -> None:
    """More executions than slots, prefill on one stream and decode on the other, three layers each."""
    for generation in range(1, 7):
        lease = machine.acquire(generation)
        stream = machine.streams[generation % 2]
        for layer in range(3):
            lease.touch(stream, writes=["scratch"], step=layer)
            machine.use(stream, ("scratch", lease.slot.index), (generation, layer))
        lease.seal()


@pytest.mark.parametrize("program", [layers, executions])
def test_no_order_of_the_streams_overwrites_what_a_layer_still_reads(program) -> None:
    assert corrupted(program, slots=1) == 0


@pytest.mark.parametrize("program", [layers, executions])
def test_without_the_events_most_orders_do(program) -> None:
    """Negative control."""
    assert corrupted(program, slots=1, ordered=False) > ORDERS / 3


def test_the_order_checker_names_both_layers_where_nothing_orders_them() -> None:
    machine = Machine(slots=1, ordered=False)
    layers(machine)
    (violation,) = check(machine.trace.records()).violations
    assert (violation.kind, violation.hazard, violation.resources) == (Kind.SLOT, "write after write", ("scratch",))
    assert violation.first is not None
    assert (violation.first.step, violation.second.step) == (0, 1)


def test_the_parts_of_a_slot_lie_beside_each_other_not_over_each_other() -> None:
    """The pool of the report was as large as the largest of its views, which shared their bytes."""
    geometry, layout, seqs, tokens = preset("flash"), page_layout("vllm-ascend-0.23.0", 128), 4, 32768
    parts = []
    for ratio, shape in tail_shapes(geometry, layout).items():
        page_bytes = sum(
            layout.page_rows(kind) * geometry.row_bytes(kind) for kind in CompressorKind if kind.ratio == ratio
        )
        parts += [
            seqs * shape.spare_pages * page_bytes,
            shape.layers * seqs * shape.list_ids * INT32,
            seqs * shape.list_ids * INT64,
            seqs * INT32,
            (seqs * shape.columns(tokens) + 1) * INT32,
        ]
    sizes = size_workspace(geometry, layout, max_num_seqs=seqs, max_num_batched_tokens=tokens, slots=1)
    idle_starts = seqs * INT32  # one for all slots
    assert sizes.slot_bytes == sum(parts) + idle_starts
    assert sizes.slot_bytes > max(parts)
