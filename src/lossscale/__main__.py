# SPDX-License-Identifier: Apache-2.0
"""Makes `python -m lossscale` the same as `lossscale`."""

from lossscale.cli import main

main()
