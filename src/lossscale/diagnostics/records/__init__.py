# SPDX-License-Identifier: Apache-2.0
"""A run on the disk: written step by step, read as a whole or in part.

Recording and reading need the standard library alone.
"""
