# SPDX-License-Identifier: Apache-2.0
"""Examining scales: what a policy does to a run, before or after it happened.

Uses the core and NumPy. Adapters do not import it.
"""

import lossscale.numpy  # noqa: F401  # without NumPy, it says what to install
from lossscale.diagnostics.recording import Recording, read_recording
from lossscale.diagnostics.simulation import Simulation, simulate

__all__ = ["Recording", "Simulation", "read_recording", "simulate"]
