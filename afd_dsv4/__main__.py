# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""`python -m afd_dsv4` is the command `afd-dsv4`."""

import sys

from afd_dsv4.cli import main

sys.exit(main())
