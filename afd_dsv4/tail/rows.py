# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Which rows of a compressor a position needs, and which pages they fall in.

A compressor pools windows of `ratio` rows anchored at absolute position 0; with overlap (ratio 4) a window also
reads the previous one. To resume at position p it needs `[trunc(p) - overlap * ratio, p)` and nothing else. This
module is that rule, its form under speculation, and the arithmetic of pages and re-based starts. It knows no request,
no layer and no physical page.

Sources: the stock operator's ReadState and SaveState (vllm-ascend v0.23.0,
csrc/attention/compressor/op_kernel/arch32/compressor_block_vec_perf.h); vllm-ascend#15204.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class TailShape:
    """How the rows of one ratio are windowed and paged, and for how many layers.

    Kinds of one ratio (C4 and its indexer) have the same shape in the same layers, so they share page ids and one
    state table; only their row widths differ.

    Attributes:
        ratio: rows in a window.
        overlap: whether a window also reads the previous window.
        page_rows: rows in a page.
        layers: number of layers with this ratio.
        drafts: most draft tokens that one forward may have to take back.
    """

    ratio: int
    overlap: bool
    page_rows: int
    layers: int
    drafts: int = 0

    def __post_init__(self) -> None:
        if self.ratio < 2:
            raise ValueError(f"ratio must be at least 2, got {self.ratio}")
        if self.page_rows < 2:
            # With one row per page the last row of a window, which nobody reads again, would be a page of its own.
            raise ValueError(f"page_rows must be at least 2, got {self.page_rows}")
        if self.layers < 0 or self.drafts < 0:
            raise ValueError(f"layers and drafts must not be negative, got {self.layers} and {self.drafts}")

    @property
    def period(self) -> int:
        """Rows after which window phase and page phase repeat together."""
        return math.lcm(self.ratio, self.page_rows)

    @property
    def reach(self) -> int:
        """Rows before the current window that it reads: one window with overlap, else none."""
        return self.ratio if self.overlap else 0

    def need(self, position: int) -> range:
        """Rows that a forward starting at `position` may read."""
        if position < 0:
            raise ValueError(f"position must not be negative, got {position}")
        return range(max(position // self.ratio * self.ratio - self.reach, 0), position)

    def live(self, low: int, high: int) -> range:
        """Rows that some forward starting in `[low, high]` may read: the tail while the accept length is open."""
        if not 0 <= low <= high:
            raise ValueError(f"0 <= low <= high must hold, got {low} and {high}")
        return range(self.need(low).start, high)

    def pages(self, rows: range) -> range:
        """Logical pages that hold `rows`."""
        if not rows:
            return range(rows.start // self.page_rows, rows.start // self.page_rows)
        return range(rows.start // self.page_rows, (rows.stop - 1) // self.page_rows + 1)

    def base(self, start: int) -> int:
        """What to subtract from `start` so that a state table stays short: a multiple of `period`.

        The operator uses its start only as phase, as page column and to ask whether a previous window exists, so any
        multiple of the period may go as long as `start - base >= ratio` whenever `start >= ratio` (overlap).
        """
        return max(start - self.reach, 0) // self.period * self.period

    def columns(self, tokens: int) -> int:
        """State-table columns that any launch of at most `tokens` tokens a request needs, wherever it starts."""
        return -(-(self.period - 1 + self.reach + tokens) // self.page_rows)

    @cached_property
    def tail_pages(self) -> int:
        """Most pages that one layer of one request keeps between forwards, over all phases and accept lengths."""
        phases = range(self.reach, self.reach + self.period)
        return max(len(self.pages(self.live(p, p + d))) for p in phases for d in range(self.drafts + 1))

    @property
    def spare_pages(self) -> int:
        """Most pages that one layer of one request may take from its slot in one launch.

        A launch may leave every page it reads and end in as many others, so this equals `tail_pages`.
        """
        return self.tail_pages

    @property
    def list_ids(self) -> int:
        """Most page ids that one launch maps for one request: its history and its tail."""
        return 2 * self.tail_pages

    def pool_pages(self, max_num_seqs: int, slots: int) -> int:
        """Pages of one pool: the null page, every request's worst tail in every layer, and every slot's spares."""
        return 1 + max_num_seqs * (self.layers * self.tail_pages + slots * self.spare_pages)
