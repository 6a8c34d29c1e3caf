# SPDX-License-Identifier: Apache-2.0
"""Looking at scales: what a policy does to a run, before or after it happened.

Uses the core and NumPy. Adapters do not import it.
"""

from lossscale.diagnostics.simulation import Simulation, simulate

__all__ = ["Simulation", "simulate"]
