# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The format of checkpoints, written down: it cannot drift without this failing. `docs/checkpoint.md` explains it."""

from __future__ import annotations

import numpy as np

from afd_dsv4.geometry import CompressorKind, ModelGeometry
from afd_dsv4.tail.checkpoint import decode, encode

GEOMETRY = ModelGeometry("golden", 8, 2, (4, 128), head_dim=2, index_head_dim=1, qk_rope_head_dim=1)
GOLDEN = """
894146445441494c01003c00e8000000e0000000000000007758a514322d9999
54c7d30208715b6d2635200638f8e5d164c43d94ba11db063566607e05000000
0000000000000000030000000900000000000000010104000100000008000000
0500000001000000000000000000000002010400010000000400000005000000
0100000000000000000000000301800001000000040000000500000005000000
0000000000000000aab8443628383711e52b19e7720c8bf6b0703015c4cf287e
c589f493766a313644d81575c0e64aec306aca5851306d49aa8dc16ba07ea0bc
eba5e9726aca24db0000803f000000400000a0400000c0400000104100002041
000050410000604100008841000090410000a8410000b0410000c8410000d041
0000e8410000f041000004420000084200000c42000010420000144200001842
00001c42000020420000ca420000ce420000d2420000d6420000da420000de42
0000e2420000e6420000ea420000ec420000ee420000f0420000494300004a43
00004b4300004c4300004d4300004e4300004f43000050430000514300005243
0000534300005443000055430000564300005743000058430000594300005a43
00005b4300005c43
"""


def golden_rows() -> dict[CompressorKind, np.ndarray]:  # type: ignore[type-arg]
    """At position 5: values 1, 2, 3 and so on, through all rows of a layer, and 100 more per kind."""
    shapes = {CompressorKind.C4: (1, 5, 8), CompressorKind.C4_INDEXER: (1, 5, 4), CompressorKind.C128: (1, 5, 4)}
    return {
        kind: np.arange(1 + 100 * i, 1 + 100 * i + np.prod(shape), dtype=np.float32).reshape(shape)
        for i, (kind, shape) in enumerate(shapes.items())
    }


def test_the_bytes_of_a_checkpoint_are_those_written_down_here() -> None:
    written = encode(GEOMETRY, 5, golden_rows(), generation=9)
    lines = [written[at : at + 32].hex() for at in range(0, len(written), 32)]
    assert lines == GOLDEN.split()
    read = decode(bytes.fromhex("".join(GOLDEN.split())), GEOMETRY, position=5, generation=9)
    assert np.array_equal(read.rows[CompressorKind.C128], golden_rows()[CompressorKind.C128])
    # Of C4, rows 0 to 3 keep columns 0, 1 (kv, left) and 4, 5 (score, left); row 4 all eight.
    kept = ~np.isnan(read.rows[CompressorKind.C4][0])
    assert kept.tolist() == [[True, True, False, False] * 2] * 4 + [[True] * 8]
