# SPDX-License-Identifier: Apache-2.0
"""How a number that is not finite comes about, by name.

An origin is what one operation did: all that it read was finite and something that it
wrote was not, or it made a NaN of an infinity. `WORDS` has each as a part of a sentence
that starts with the operation.
"""

from typing import Literal, TypeAlias, get_args

Origin: TypeAlias = Literal[
    "overflow",
    "division by zero",
    "0 / 0",
    "inf - inf",
    "inf * 0",
    "inf / inf",
    "log of 0",
    "log of a negative number",
    "root of a negative number",
    "negative base",
    "outside the domain",
    "too few values",
    "row of -inf",
    "constant",
    "batch",
    "parameter",
    "buffer",
    "another rank",
    "changed afterwards",
    "unknown",
]
"""How a number that is not finite came about."""

ORIGINS: tuple[str, ...] = get_args(Origin)

WORDS: dict[str, str] = {
    "overflow": "gave a result beyond the largest number of its format",
    "division by zero": "divided by 0",
    "0 / 0": "divided 0 by 0",
    "inf - inf": "subtracted infinities from each other (inf - inf)",
    "inf * 0": "multiplied an infinity by 0 (inf * 0)",
    "inf / inf": "divided an infinity by an infinity (inf / inf)",
    "log of 0": "took the logarithm of 0",
    "log of a negative number": "took the logarithm of a negative number",
    "root of a negative number": "took the root of a negative number",
    "negative base": "raised a negative number to a power that is not whole",
    "outside the domain": "was given a number outside its domain",
    "too few values": "had too few values to compute it from",
    "row of -inf": "was given a row in which every number is -inf",
    "constant": "used a constant that is not finite",
    "batch": "was so before the model read it",
    "parameter": "was so before the batch was run",
    "buffer": "was so before the batch was run",
    "another rank": "arrived from another rank",
    "changed afterwards": (
        "was finite when the backward pass made it, and was changed after that by a "
        "hook or by the step's own code"
    ),
    "unknown": "gave a result that is not finite",
}
"""What an operation did, for a sentence whose subject it is."""

GIVEN: frozenset[str] = frozenset(
    {"batch", "parameter", "buffer", "another rank", "changed afterwards"}
)
"""Origins outside the operations that were run: no operation is to blame."""
