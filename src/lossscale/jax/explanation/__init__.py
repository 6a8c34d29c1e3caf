# SPDX-License-Identifier: Apache-2.0
"""Why a batch was not finite: its jaxpr, evaluated equation by equation.

explainer.py    explain: trace, evaluate, find the cause, try lower scales
evaluation.py   evaluate a jaxpr, and keep what each equation made of what
control.py      jit, scan, while, cond and other equations that contain jaxprs
values.py       values, what they have that is not finite, and what made them
locations.py    the layer and the line of an equation
origins.py      what an equation did to make a number that is not finite
magnitudes.py   how large a result would be in a wider format

The way back from a gradient to the first fault is in core/explanation/evaluated.py.
"""
