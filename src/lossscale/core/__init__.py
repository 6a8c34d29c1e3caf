# SPDX-License-Identifier: Apache-2.0
"""The engine: the rule, its state, policies and saved forms. Standard library only.

Start with `rule.py`. Nothing here imports a framework, and no module of this package
imports anything outside it.
"""
