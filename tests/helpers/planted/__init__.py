"""Faults planted into small models, each with what an explanation must say of it.

fault.py      Fault: the model, the step, and what is expected
forward.py    faults that make the forward pass or the loss not finite
backward.py   faults that only the backward pass shows
"""

from helpers.planted import backward, forward
from helpers.planted.fault import FAULTS, Fault

__all__ = ["FAULTS", "Fault", "backward", "forward"]
