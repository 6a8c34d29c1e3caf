# SPDX-License-Identifier: Apache-2.0
"""What `unscale` can measure when asked, and how it is asked."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from lossscale.core.validation import as_float32, check_bool, check_scale
from lossscale.errors import SettingError

MEASUREMENTS = ("nan", "amax", "norm", "zero_fraction", "subnormal_fraction")
"""The fields of a `Signal` that `unscale` measures by their name."""


@dataclass(frozen=True)
class AboveEdge:
    """Asks for `Signal.above_edge`: the fraction of gradient values above an edge.

    An infinite value is above every edge, and NaN above none. A policy that reads the
    fraction has this among its `wants`.

    Example:
        >>> import numpy as np, lossscale, lossscale.numpy as ls
        >>> state = ls.init(lossscale.Fixed(4.0))
        >>> scaled = [np.float16([1.0, 8.0, -9.0, np.inf])]
        >>> edge = lossscale.AboveEdge(8.0)
        >>> ls.unscale(scaled, state, measure=["amax", edge])[1].above_edge
        np.float32(0.5)
    """

    edge: float
    """The magnitude of a gradient that is still scaled; rounded to float32."""

    inclusive: bool = False
    """Whether a value at the edge counts as above it."""

    def __post_init__(self) -> None:
        """Check both, and keep the edge as a float32 number."""
        edge = as_float32(check_scale("edge", self.edge))
        object.__setattr__(self, "edge", edge)
        check_bool("inclusive", self.inclusive)


Measurement: TypeAlias = str | AboveEdge
"""One of `MEASUREMENTS`, or an `AboveEdge`."""


def check_measurements(
    measure: Measurement | Iterable[Measurement],
) -> frozenset[Measurement]:
    """Return the measurements that `unscale` is asked for, validated."""
    if isinstance(measure, (str, AboveEdge)):
        measure = [measure]
    wanted = frozenset(measure)
    edges = [item for item in wanted if isinstance(item, AboveEdge)]
    unknown = sorted(map(str, wanted - set(MEASUREMENTS) - set(edges)))
    if unknown:
        message = (
            f"Cannot measure {unknown}; there are {', '.join(MEASUREMENTS)} and "
            "lossscale.AboveEdge(edge)."
        )
        raise SettingError(message)
    if len(edges) > 1:
        message = f"There is one Signal.above_edge; got {len(edges)} edges for it."
        raise SettingError(message)
    return wanted


def list_fields(wanted: Collection[Measurement]) -> list[str]:
    """Return the fields of a `Signal` that measurements fill, in a fixed order."""
    return sorted(
        "above_edge" if isinstance(item, AboveEdge) else item for item in wanted
    )


def find_edge(wanted: Collection[Measurement]) -> AboveEdge | None:
    """Return the edge among some measurements, if there is one."""
    edges = [item for item in wanted if isinstance(item, AboveEdge)]
    return edges[0] if edges else None
