# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The stock operator with names instead of numbers.

A row is its name (request, position) and a compressed row the tuple of the names it was pooled from, so a wrong page, a
lost row or a race shows as a wrong name, and never hides in rounding. It follows the recorded contract: every row of
the chunk is saved before any history is read, page 0 is skipped by writes and not by reads, reads lie before the start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.tables import Int32Array, RequestChunk

Name = tuple[str, int]
POISON: Name = ("poison", -1)


@dataclass
class SymbolicPool:
    """Pages of names; never-written rows hold poison."""

    shape: TailShape
    rows: dict[tuple[int, int], Name] = field(default_factory=dict)
    saved: int = 0

    def launch(self, chunks: tuple[RequestChunk, ...], table: Int32Array, starts: Int32Array) -> dict[Name, list[Name]]:
        """One launch: compressed row (request, window) -> the names of the rows pooled, oldest first."""
        shape = self.shape
        for chunk, row, start in zip(chunks, table, starts, strict=True):
            for i in range(chunk.tokens):
                page = int(row[(start + i) // shape.page_rows])
                if page:
                    self.rows[page, (start + i) % shape.page_rows] = (chunk.request, chunk.start + i)
                    self.saved += 1
        out: dict[Name, list[Name]] = {}
        for chunk, row, start in zip(chunks, table, starts, strict=True):
            base = chunk.start - int(start)
            for end in range(int(start), int(start) + chunk.tokens):
                if (end + 1) % shape.ratio:
                    continue
                first = end + 1 - shape.ratio - (shape.reach if end + 1 - shape.ratio >= shape.reach else 0)
                names = []
                for position in range(first, end + 1):
                    if position >= start:
                        names.append((chunk.request, position + base))
                    else:
                        page = int(row[position // shape.page_rows])
                        names.append(self.rows.get((page, position % shape.page_rows), POISON))
                out[chunk.request, (end + base) // shape.ratio] = names
        return out


def expected(shape: TailShape, chunk: RequestChunk) -> dict[Name, list[Name]]:
    """What the definition says a chunk compresses: windows anchored at position 0, the long way."""
    out: dict[Name, list[Name]] = {}
    for position in range(chunk.start, chunk.end):
        if position % shape.ratio == shape.ratio - 1:
            window = position // shape.ratio
            first = window * shape.ratio
            if shape.overlap and window > 0:
                first -= shape.ratio
            out[chunk.request, window] = [(chunk.request, p) for p in range(first, position + 1)]
    return out
