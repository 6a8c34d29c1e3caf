# SPDX-License-Identifier: Apache-2.0
"""Reports of recorded runs: one page that opens from the disk, Markdown or JSON.

Needs NumPy. Nothing here prints, and nothing is fetched from a network.
"""
