# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""``python -m afd_dsv4.softnpu -- CMD...``: run a command on the software NPU. See ``launcher``."""

import sys

from afd_dsv4.softnpu.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
