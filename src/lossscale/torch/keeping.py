# SPDX-License-Identifier: Apache-2.0
"""What a scaler keeps: its settings, its state, and the book of the iteration.

torch's tensors and ours are changed in place and keep their identity: a CUDA graph that
was captured goes on to read and write them whatever is set or loaded later. (Intervals
are part of the graph itself, as they are with torch's class.)

Beside torch's `_per_optimizer_states` there is a book of what an iteration has come to
so far, `Iteration`. Whoever opens a new iteration by replacing torch's dictionary, as
`update` and some subclasses do, opens a new book with it.
"""

import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from lossscale.core.policies import Policy
from lossscale.core.portable import check_state
from lossscale.core.state import ScaleState
from lossscale.core.validation import format_value
from lossscale.errors import LossScaleError, SettingError, StateError
from lossscale.torch.calls import warn_caller
from lossscale.torch.compiling import uncompiled
from lossscale.torch.gradients import FirstGradient
from lossscale.torch.rules import Cells, Rule, shown_factors, torchs_policy
from lossscale.torch.steps import History, Names, Part
from lossscale.torch.verdict import Shelf

if TYPE_CHECKING:
    from lossscale.torch.accumulation import Sum


class Facts:
    """What is known of one optimizer's gradients, beside torch's stage and flags."""

    part: Part | None = None
    """The verdict on them, for the report."""
    divisor: Any = None
    """What divides them in the optimizer, if they were clipped and left as they are."""
    clipped: bool = False
    given_up: bool = False
    """Unscaling failed part-way; the gradients are in an unknown state."""
    unscaling: bool = False
    """Unscaling has begun. Still set in a later call, it was interrupted."""
    unscaled: FirstGradient | None = None
    """The first gradient when they were unscaled, and after how many losses."""
    losses: int = 0
    stepping: FirstGradient | None = None
    """The first gradient, while the optimizer is being stepped. Still set in a later
    call, the step raised or was interrupted."""
    raised: bool = False
    """The optimizer's step has raised an ordinary exception."""


class Iteration:
    """What one iteration has come to so far, beside torch's state of each optimizer."""

    def __init__(self, states: Any) -> None:
        self.states = states
        """torch's states, to which this belongs."""
        self._facts: dict[int, tuple[dict[str, Any], Facts]] = {}
        self.sums: dict[int, Sum] = {}
        self.dropped: list[Any] = []
        """The flags of micro-batches: a bad one lowers the scale, and skips nothing."""
        self.lost: list[Any] = []
        """The same of those whose loss was not finite: they leave the scale."""
        self.loss: Any = None
        """1.0 if a loss was not finite; `None` if that was not checked."""
        self.loss_nonfinite: bool | None = None
        """Whether a loss that the host could read was not finite."""
        self.raw_losses: list[Any] = []
        """Losses on a device, before they were scaled."""
        self.losses = 0
        """How many times `scale` was called."""
        self.accumulating = False
        """`accumulate` has begun. Still set in a later call, it was interrupted."""

    def of(self, state: dict[str, Any]) -> Facts:
        """Return the facts that go with torch's state of an optimizer."""
        # The state is kept with them: no other can have its id meanwhile.
        return self._facts.setdefault(id(state), (state, Facts()))[1]


class Keeping(torch.amp.GradScaler):
    """The settings and the state of a scaler."""

    _unpickled: tuple[str, ...] = (
        "_book",
        "_sorted",
        "_schedulers",
        "_shelf",
        "_captured",
    )
    """What `_open` makes."""

    def __init__(
        self,
        device: str,
        numbers: tuple[float, float, float, int],
        enabled: bool,
        policy: Policy | None,
        history: History,
        names: Names | None,
        on_no_gradients: str,
        allow_fp16: bool,
        measure_norm: bool,
        measure_amax: bool,
    ) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().__init__(device, *numbers, enabled=enabled)
        for warning in caught:  # that there is no CUDA: said of the caller's line
            warn_caller(str(warning.message), warning.category)
        self._history = history
        self._names = names
        self._on_no_gradients = on_no_gradients
        self._allow_fp16 = allow_fp16
        self._measure_norm = measure_norm
        self._measure_amax = measure_amax
        self._begun = 0
        """How many steps `update` has seen in this process."""
        self._open()
        if not self._enabled:
            return
        self._per_optimizer_states: Any = defaultdict(_refresh_per_optimizer_state)
        self._given_policy = policy
        if policy is not None:
            self._init_scale = float(policy.init().scale)
            factors = shown_factors(policy)
            self._growth_factor, self._backoff_factor, self._growth_interval = factors
        self._rule = self._made_rule()
        self._init_bad = 0
        self._init_counters: tuple[int, ...] = (0, 0, 0)
        self._own_cells: Any = None

    def _open(self) -> None:
        """Start with what is known of nothing yet, and is never pickled."""
        self._book: Iteration | None = None
        self._sorted: Any = WeakKeyDictionary()
        self._schedulers: Any = WeakKeyDictionary()
        self._shelf = Shelf()
        self._captured: list[Any] = []
        """What CUDA graphs read and write, kept for as long as the scaler is."""

    @property
    def _iteration(self) -> Iteration:
        """The book of this iteration."""
        if self._book is None or self._book.states is not self._per_optimizer_states:
            self._book = Iteration(self._per_optimizer_states)
        return self._book

    # -- the rule and its settings -----------------------------------------------------

    def _made_rule(self) -> Rule:
        """Return the rule that the settings stand for."""
        numbers = self._numbers()
        if self._given_policy is not None:
            rule = Rule(self._given_policy, wide=False)
        else:
            rule = Rule(torchs_policy(self._init_scale, *numbers), wide=True)
        self._rule_of = numbers
        return rule

    def _numbers(self) -> tuple[float, float, int]:
        return self._growth_factor, self._backoff_factor, self._growth_interval

    def _current_rule(self) -> Rule:
        """Return the rule; made anew if somebody has set a number by hand."""
        if self._given_policy is None and self._numbers() != self._rule_of:
            self._take(self._made_rule())
        return self._rule

    def _take(self, rule: Rule) -> None:
        """Go on by another rule; what a kernel reads of it stays where it is."""
        self._rule = rule
        if self._own_cells is not None:
            rule.fill(self._own_cells[-1])

    def _set(self, name: str, value: Any) -> None:
        """Set one of torch's numbers, unless it is of no use."""
        if self._given_policy is not None:
            message = (
                f"This scaler has a policy of its own, {self._given_policy!r}; give a "
                f"new GradScaler a policy with another {name}."
            )
            raise SettingError(message)
        before = getattr(self, f"_{name}")
        setattr(self, f"_{name}", value)
        try:
            self._take(self._made_rule())
        except LossScaleError:
            setattr(self, f"_{name}", before)
            raise

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor; it must be above 1."""
        self._set("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the back-off factor; it must lie between 0 and 1."""
        self._set("backoff_factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval. At or below the steps counted, growth comes next."""
        self._set("growth_interval", new_interval)

    # -- the state ---------------------------------------------------------------------

    @uncompiled
    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._cells()

    def _cells(self) -> Cells:
        """Return the tensors of the state; ours are made where torch's are."""
        device = self._scale.device
        if self._own_cells is None or self._own_cells[0].device != device:
            bad = torch.zeros((), dtype=torch.int32, device=device)
            counters = torch.zeros(3, dtype=torch.int32, device=device)
            self._own_cells = bad, counters, self._rule.room(device)
            self._fill_own_cells()
            self._rule.fill(self._own_cells[-1])
        return Cells(self._scale, self._growth_tracker, *self._own_cells)

    def _fill_own_cells(self) -> None:
        """Write what is known of our numbers into their tensors."""
        bad, counters, _ = self._own_cells
        bad.fill_(self._init_bad)
        # Not torch.tensor(..., device): that copies, which a graph cannot capture.
        for at, count in enumerate(self._init_counters):
            counters[at].fill_(count)

    def _own_numbers(self) -> tuple[int, tuple[int, ...]]:
        """Return overflows counted, and steps counted; waits for the device."""
        if not self._enabled:
            return 0, (0, 0, 0)
        if self._own_cells is None:
            return self._init_bad, self._init_counters
        bad, counters, _ = self._own_cells
        return int(bad.item()), tuple(counters.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries and four of ours; torch reads it and skips them.

        Entries: `scale`, `growth_factor`, `backoff_factor`, `growth_interval`,
        `_growth_tracker`; `bad` (overflows counted towards a back-off), `steps`,
        `skipped`, `consecutive_skips`. Empty if the scaler is disabled.
        """
        state: dict[str, Any] = super().state_dict()
        if self._enabled:
            bad, counted = self._own_numbers()
            state |= {"bad": bad, **dict(zip(_COUNTERS, counted, strict=True))}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` of this class or of torch's returned.

        A scaler that was made with `policy=` keeps its policy and takes the numbers of
        the state alone; otherwise torch's three settings are taken as well.

        Raises:
            StateError: If a number is of no use, such as a scale of 0; nothing changes.
        """
        if not self._enabled or not state_dict:
            super().load_state_dict(state_dict)  # which says what torch says
            return
        numbers = tuple(state_dict[name] for name in _SETTINGS)
        state = ScaleState(
            state_dict["scale"], state_dict["_growth_tracker"], state_dict.get("bad", 0)
        )
        policy = self._given_policy
        if policy is None:
            try:
                policy = torchs_policy(2.0**16, *numbers)
            except LossScaleError as error:
                raise StateError(str(error)) from error
        else:
            numbers = self._numbers()
        scale, good, bad = check_state(policy, state)
        counted = tuple(_count(state_dict, name) for name in _COUNTERS)
        taken = {**dict(zip(_SETTINGS, numbers, strict=True)), "scale": scale}
        super().load_state_dict({**taken, "_growth_tracker": good})
        self._init_bad, self._init_counters = bad, counted
        if self._own_cells is not None:
            self._fill_own_cells()
        self._take(self._made_rule())
        states = self._per_optimizer_states
        if any(self._iteration.of(state).given_up for state in states.values()):
            # A step that broke off is over: this is how to go on.
            self.discard()

    def discard(self) -> None:
        """Drop the current iteration: start again with a new backward pass.

        Call it together with `zero_grad` where an iteration is given up half-way: after
        an exception in a step, or to forget what `accumulate` has added up. Gradients
        that are still there count as scaled. The scale does not move, and nothing is
        reported. With several ranks, call it on all of them.

        Example:
            >>> import torch, lossscale.torch as ls
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> optimizer = torch.optim.SGD([weight], lr=1.0)
            >>> scaler = ls.GradScaler("cpu")
            >>> scaler.scale(weight.sum()).backward()
            >>> scaler.accumulate(optimizer)
            >>> scaler.discard()  # a bad batch: begin again
            >>> scaler.scale(2 * weight.sum()).backward()
            >>> scaler.step(optimizer)
            >>> scaler.update()
            >>> weight.item()
            -1.0
        """
        if self._enabled:
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: numbers and settings; no names or observers."""
        state: dict[str, Any] = super().__getstate__()
        if self._enabled:
            state["_init_bad"], state["_init_counters"] = self._own_numbers()
            state["_own_cells"] = None
            state["_rule"] = Rule(self._rule.policy, wide=self._given_policy is None)
        state["_history"] = self._history.emptied()
        state["_names"] = None
        for name in self._unpickled:
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on from what was pickled."""
        super().__setstate__(state)
        self._open()


def _count(state: dict[str, Any], name: str) -> int:
    """Return one of our counters from a state; torch's has none."""
    value = state.get(name, 0)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 0 <= value < 2**31 - 1:
        message = f"'{name}' must be a whole number of steps, 0 or more, got {format_value(value)}."
        raise StateError(message)
    return int(value)


_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_COUNTERS = ("steps", "skipped", "consecutive_skips")
