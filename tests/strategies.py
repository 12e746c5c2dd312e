# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Shapes and workloads that property tests share."""

from __future__ import annotations

from hypothesis import strategies as st

from afd_dsv4.tail.rows import TailShape

# Ratio, overlap and the page sizes that vllm-ascend ships for it (block sizes 128, 64, 32).
SHIPPED = [(4, True, 8), (4, True, 4), (4, True, 2), (128, False, 32), (128, False, 16), (128, False, 8)]
LENGTHS = st.one_of(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 127, 128, 129, 300]), st.integers(1, 700))


@st.composite
def shapes(draw: st.DrawFn, drafts: st.SearchStrategy[int] = st.just(0)) -> TailShape:
    """A shape that some stack ships, with few layers."""
    ratio, overlap, page_rows = draw(st.sampled_from(SHIPPED))
    return TailShape(ratio, overlap, page_rows, layers=draw(st.integers(1, 3)), drafts=draw(drafts))
