# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Notes every replay of a graph in a worker, and where the memory lies that the plugin writes for it.

Problem: a graph reads the addresses that it was captured with. If the plugin's tables, lists or pages moved, a replay
would go on reading the old ones, without any error.
Way: `torch.npu.NPUGraph.replay` is wrapped in the worker's process. After each replay the software NPU tells which
bytes the graph touches, by the accesses recorded at its capture; beside them stands where the runtime's tensors of the
leased slot lie now, and whether the graph touches those. `move_tables` is the fault that must be seen.
Not here: the tensors of vllm-ascend itself, which the plugin does not own.
"""

from __future__ import annotations

import importlib
from typing import Any

from afd_dsv4.softnpu import runtime


def watch(worker: Any) -> None:
    """Note the replays of this worker's process from now on."""
    npu: Any = importlib.import_module("torch_npu").npu
    notes: list[dict[str, Any]] = []
    worker.replays_noted = notes
    worker.replays_before = runtime.replays()
    graphs: list[Any] = []
    replay = npu.NPUGraph.replay

    def noted(graph: Any) -> None:
        replay(graph)
        if not any(graph is known for known in graphs):
            graphs.append(graph)
        number = next(i for i, known in enumerate(graphs) if graph is known)
        notes.append({"graph": number, "memory": _memory(getattr(worker.model_runner, "tails", None))})

    npu.NPUGraph.replay = noted


def take(worker: Any) -> dict[str, Any]:
    """What was noted since the last call.

    Returns:
        `count`: replays by the software NPU's own count; `notes`: one a replay, with the number of its graph, and
        `memory`: {name: [address, bytes, whether the graph touches them]} of the plugin, empty without it.
    """
    count = runtime.replays()
    found = {"count": count - worker.replays_before, "notes": list(worker.replays_noted)}
    worker.replays_before = count
    worker.replays_noted.clear()
    return found


def move_tables(worker: Any) -> None:
    """The planted fault: give all state tables other memory than the graphs know. The old one is kept, as it was."""
    tails = worker.model_runner.tails
    worker.moved_tables = [table.flat for slot in tails.tables for table in slot.values()]
    for slot in tails.tables:
        for table in slot.values():
            table.flat = table.flat.clone()
            table.rows = table.flat[:-1].view(table.rows.shape)


def _memory(tails: Any) -> dict[str, list[int]]:
    """The tensors of the slot that is leased at this moment, and the pages that all slots share."""
    if tails is None:
        return {}
    slots = {lease.slot.index for lease in tails.arena.live() if lease.state.name == "ACQUIRED"}
    if len(slots) != 1:
        raise RuntimeError(f"a graph is replayed while slots {sorted(slots)} are leased; expected one")
    slot = slots.pop()
    tensors = {f"pages of {kind.value}": pool for kind, pool in tails.pools.items()}
    for ratio, table in tails.tables[slot].items():
        part = tails.lists[slot].parts[ratio]
        for what, tensor in (("table", table.flat), ("cells", part.cells), ("starts", part.starts), ("ids", part.ids)):
            tensors[f"{what} of ratio {ratio}"] = tensor
    touched = runtime.replayed_bytes()
    found = {}
    for name, tensor in tensors.items():
        begin, size = tensor.data_ptr(), tensor.nbytes
        hit = any(begin < there + length and there < begin + size for there, length in touched)
        found[name] = [begin, size, int(hit)]
    return found
