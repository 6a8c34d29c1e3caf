# SPDX-License-Identifier: Apache-2.0
"""`Kind`: what a tensor has that is not finite."""

from typing import NamedTuple


class Kind(NamedTuple):
    """What a tensor has that is not finite."""

    nan: bool
    plus: bool
    """Whether it has +inf."""
    minus: bool
    """Whether it has -inf."""

    @property
    def is_mask(self) -> bool:
        """Whether it has -inf only, as the masks of attention have on purpose."""
        return self.minus and not self.plus and not self.nan
