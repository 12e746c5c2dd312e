# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/afd-plugin#210 (with #213): an FFN rank gets an item without tokens, and crashes.

Symptom: empty kernels on the FFN side, and a combine that does not take the dispatch buffer; fixed with a stand-in row.
Here: a stage without tokens is an execution without requests: it sends and receives at its places in the schedule like
any other, and leases nothing. The boundary audit lets stand-in rows and empty slices of a connector's own buffers
through; an empty slice of a workspace is one of a workspace, and is refused although it has no byte.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from afd_dsv4.execution.boundary import Boundary, BoundaryViolation  # noqa: E402
from afd_dsv4.execution.cam import CamForward  # noqa: E402
from afd_dsv4.tail.tables import RequestChunk, RequestId  # noqa: E402
from tests.model_runtime import ModelRuntime  # noqa: E402

BATCH = [RequestChunk(RequestId("a"), 0, 1)]


@pytest.mark.parametrize("stages", [[(0, 1), (1, 1)], [(0, 0), (0, 1)]], ids=["second", "first"])
def test_a_stage_without_tokens_goes_through_its_schedule_and_leases_nothing(stages: list[tuple[int, int]]) -> None:
    runtime = ModelRuntime(1)
    stream = runtime.device.stream()
    with CamForward.from_stages(runtime, BATCH, stages) as forward:
        for layer in range(runtime.shape.layers):
            for stage in (0, 1):
                forward[stage].launch(layer, stream)
                forward.sent(layer, stage)
                assert forward.received(stage) == layer
    runtime.device.run()
    assert runtime.wrong == []
    assert runtime.arena.counters.leases == 1
    assert [execution.lease is None for execution in forward.executions] == [begin == end for begin, end in stages]


def test_the_audit_lets_stand_ins_through_and_sees_workspace_without_a_byte() -> None:
    dispatched, pool = torch.zeros(8, 4, dtype=torch.int8), torch.zeros(8, 4)
    boundary = Boundary(None, {"pool": pool})
    boundary.check("send_ffn_output", {"ffn_output": torch.zeros(1, 4), "dispatched": dispatched[:0]})
    with pytest.raises(BoundaryViolation, match=r"send_ffn_output: ffn_output \(torch.float32 \[0, 4\]\) lies in pool"):
        boundary.check("send_ffn_output", {"ffn_output": pool[:0]})


def test_comparing_what_a_slice_covers_would_not_see_it() -> None:
    """Negative control: an empty slice covers nothing, and would be let through; grown in place, it is the pool."""
    pool = torch.ones(8, 4)
    empty = pool[:0]
    assert empty.nbytes == 0
    assert empty.data_ptr() in (0, pool.data_ptr())
    assert empty.as_strided((8, 4), (4, 1)).sum() == 32
