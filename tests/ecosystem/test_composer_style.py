"""Subclasses and wrappers of the kinds that other packages write, on either class.

None of these packages is here; what is written down below is how they use torch's
scaler, in our words: which methods they override, which private names they read and
set. Every kind runs with `torch.amp.GradScaler` and with ours under it, through the
same random row of finite steps and overflows, and has to come to the same numbers.

The originals: `composer/trainer/_scaler.py` (Composer), `torch_xla/amp/grad_scaler.py`,
`apex/transformer/amp/grad_scaler.py`, `nlp_overrides.py` (NeMo),
`fairseq2/optim/_dynamic_loss_scaler.py`, `timm/utils/cuda.py` and
`mmengine/optim/optimizer/amp_optimizer_wrapper.py`.
"""

import io
import math
import random
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from helpers.limits import HANG  # noqa: E402
from helpers.torch_steps import BAD, parameter, snapshot  # noqa: E402
from torch.amp.grad_scaler import (  # noqa: E402
    OptState,
    _refresh_per_optimizer_state,
)

import lossscale.torch as ls  # noqa: E402

THEIRS, OURS = torch.amp.GradScaler, ls.GradScaler
SETTINGS = {"init_scale": 2.0**10, "growth_interval": 3}


# What is trained


class Fault(NamedTuple):
    """Where a step is bad: one entry of one gradient, in one pass, on one rank."""

    place: int
    value: float
    call: int
    rank: int


def plan(steps=30, seed=0):
    """Return a row of steps; `None` is a clean one."""
    choose = random.Random(seed)
    return [
        Fault(choose.randrange(3), choose.choice(BAD), choose.randrange(2), at % 2)
        if choose.random() < 0.3
        else None
        for at in range(steps)
    ]


class Problem:
    """A small network, its rows, and the faults of one rank."""

    def __init__(self, style, kind, rank=0):
        self.rank = rank
        self.ranks = style.ranks
        self.passes = style.passes
        self.random = torch.Generator().manual_seed(rank)
        self.weights = [
            torch.nn.Parameter(torch.randn(shape, generator=self.random).to(dtype))
            for shape, dtype in (
                ((4, 3), torch.float32),
                ((3,), style.dtype),
                ((3, 1), torch.float32),
            )
        ]
        make = OPTIMIZERS[kind] if style.optimizer is None else style.optimizer
        self.optimizer = make(self.weights)

    def losses(self, at, fault):
        """Return a function of which each call gives the loss of the next pass."""
        rows = torch.randn(
            8, 4, generator=torch.Generator().manual_seed(100 * at + self.rank)
        )
        calls = iter(range(10))

        def loss():
            call = next(calls)
            first, middle, last = (weight.float() for weight in self.weights)
            found = torch.tanh(rows @ first + middle) @ last
            loss = (found - rows.sum(1, keepdim=True)).square().mean() / self.passes
            if (
                fault is not None
                and fault.call % self.passes == call
                and fault.rank % self.ranks == self.rank
            ):
                loss = loss + fault.value * self.weights[fault.place].flatten()[0]
            return loss

        return loss


OPTIMIZERS = {
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9),
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.05),
    "fused": lambda weights: torch.optim.AdamW(weights, lr=0.05, fused=True),
}


class Style:
    """How a package trains with a scaler; the settings are those of most."""

    ranks = 1
    passes = 1
    dtype = torch.float32
    optimizer = None
    """Makes the optimizer, where only a special one will do."""
    fuses = True
    """Whether the package's own methods are reached with fused optimizers."""
    skips = True
    """Whether the weights stay where they are at an overflow."""
    floored = True
    """Whether the scale is moved by the class below, which may have a floor."""

    def __init__(self, base, problem, group=None):
        self.optimizer = problem.optimizer
        self.group = group
        self.scaler = self.make(base)

    def make(self, base):
        """Return a scaler of a subclass of the base."""
        return base("cpu", **SETTINGS)

    def step(self, losses):
        """Take one step; the usual loop, if a package has no other."""
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            self.scaler.scale(losses()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state_dict(self):
        """Return what goes into a checkpoint."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, saved):
        """Load a checkpoint."""
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])


def largest(flags):
    """Return the largest of the flags of an optimizer."""
    return torch.stack(list(flags.values())).amax()


def updated_by_hand(scaler, found):
    """End an iteration as subclasses do that have an `update` of their own."""
    torch._amp_update_scale_(
        scaler._scale,
        scaler._growth_tracker,
        found,
        scaler._growth_factor,
        scaler._backoff_factor,
        scaler._growth_interval,
    )
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


# Closures, as Composer does


class TwoPasses(torch.optim.SGD):
    """Asks for the loss twice, the second time a little up the slope."""

    def step(self, closure):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        loss = closure()
        if loss is None:
            return None
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.add_(weight.grad, alpha=0.05)
        again = closure()
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
        if again is None:
            return None
        super().step()
        return loss


class Composer(Style):
    passes = 2
    floored = False

    @staticmethod
    def optimizer(weights):
        return TwoPasses(weights, lr=0.05, momentum=0.9)

    def make(self, base):
        class Closures(base):
            def _force_scaler_ready(self, optimizer):
                self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY

            def _empty_all_grads(self, optimizer):
                for group in optimizer.param_groups:
                    for weight in group["params"]:
                        weight.grad = None

            def _unscale_grads_and_get_amp_state(self, optimizer):
                state = self._per_optimizer_states[id(optimizer)]
                if state["stage"] is OptState.READY:
                    self.unscale_(optimizer)
                return not largest(self._found_inf_per_device(optimizer)).item()

            def step(self, optimizer, *args, closure):
                def wrapped():
                    self._force_scaler_ready(optimizer)
                    self._empty_all_grads(optimizer)
                    loss = closure()
                    goes_on = self._unscale_grads_and_get_amp_state(optimizer)
                    return loss if goes_on else None

                return optimizer.step(wrapped)

            def update(self, new_scale=None):
                flags = [
                    flag
                    for state in self._per_optimizer_states.values()
                    for flag in state["found_inf_per_device"].values()
                ]
                updated_by_hand(self, torch.stack(flags).sum())

        return Closures("cpu", **SETTINGS)

    def step(self, losses):
        def closure():
            loss = losses()
            self.scaler.scale(loss).backward()
            return loss.detach()

        self.scaler.step(self.optimizer, closure=closure)
        self.scaler.update()


# Zeros in place of a skipped step, as torch_xla does


def zeroed(optimizer, found):
    """Set an optimizer's gradients to zero on the device if a flag says so."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad.nan_to_num_(0.0, 0.0, 0.0).mul_(found == 0)


class Xla(Style):
    fuses = skips = False

    def make(self, base):
        class Zeroing(base):
            def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
                zeroed(optimizer, largest(optimizer_state["found_inf_per_device"]))
                return optimizer.step(*args, **kwargs)

        return Zeroing("cpu", **SETTINGS)


class XlaStep(Style):
    skips = False

    def make(self, base):
        class Zeroing(base):
            def step(self, optimizer, *args, **kwargs):
                state = self._per_optimizer_states[id(optimizer)]
                if state["stage"] is OptState.READY:
                    self.unscale_(optimizer)
                zeroed(optimizer, largest(state["found_inf_per_device"]))
                state["stage"] = OptState.STEPPED
                return optimizer.step(*args, **kwargs)

        return Zeroing("cpu", **SETTINGS)


# Flags of several ranks, as Apex, NeMo and FSDP 1 do


def reduced(group, flag):
    """Return the largest of what the ranks have found."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    found = flag.reshape(1).clone()
    group.allreduce([found], options).wait()
    return found[0]


class Apex(Style):
    ranks = 2
    fuses = floored = False

    def make(self, base):
        group = self.group

        class ModelParallel(base):
            def _unscale_grads_(self, optimizer, *args):
                if getattr(optimizer, "_custom_amp_unscale_grads", False):
                    return optimizer.unscale_grads(*args)
                return super()._unscale_grads_(optimizer, *args)

            def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
                found = largest(optimizer_state["found_inf_per_device"])
                if reduced(group, found).item():
                    return None
                return optimizer.step(*args, **kwargs)

            def update(self, new_scale=None):
                (state,) = self._per_optimizer_states.values()
                found = largest(state["found_inf_per_device"])
                updated_by_hand(self, reduced(group, found))

        return ModelParallel("cpu", **SETTINGS)


class Nemo(Style):
    """Keeps the scale for the first overflow of a row, and says who was skipped."""

    ranks = 2
    fuses = floored = False

    def make(self, base):
        group = self.group

        class Patient(base):
            optimizer_update_skipped = None
            patience = left = 2

            def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
                found = reduced(group, largest(optimizer_state["found_inf_per_device"]))
                self.optimizer_update_skipped = bool(found)
                if self.optimizer_update_skipped:
                    return None
                return optimizer.step(*args, **kwargs)

            def update(self, new_scale=None):
                if not self.optimizer_update_skipped:
                    self.left = self.patience
                    updated_by_hand(self, torch.zeros(()))
                    return
                self.left -= 1
                if self.left > 0:
                    self._growth_tracker.fill_(0)
                    self._per_optimizer_states = defaultdict(
                        _refresh_per_optimizer_state
                    )
                else:
                    updated_by_hand(self, torch.ones(()))

            def state_dict(self):
                return {**super().state_dict(), "_hysteresis_tracker": self.left}

            def load_state_dict(self, saved):
                super().load_state_dict(saved)
                self.left = saved["_hysteresis_tracker"]

        return Patient("cpu", **SETTINGS)


class Sharded(Style):
    """Reduces where the gradients are unscaled, which fused optimizers reach too."""

    ranks = 2

    def make(self, base):
        group = self.group

        class Reducing(base):
            def _unscale_grads_(self, optimizer, *args):
                found = super()._unscale_grads_(optimizer, *args)
                return {key: reduced(group, flag) for key, flag in found.items()}

        return Reducing("cpu", **SETTINGS)


# Wrappers that hold a scaler, as fairseq2, timm and mmengine do


class Fairseq2(Style):
    """Adds a floor from outside, and takes float16 gradients."""

    dtype = torch.float16
    floor = 2.0**8

    def make(self, base):
        class Internal(base):
            def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
                return super()._unscale_grads_(
                    optimizer, inv_scale, found_inf, allow_fp16=True
                )

        return Internal("cpu", **SETTINGS)

    def step(self, losses):
        self.optimizer.zero_grad()
        self.scaler.scale(losses()).backward()
        self.scaler.step(self.optimizer, None)
        before = self.scaler.get_scale()
        self.scaler.update()
        if self.scaler.get_scale() < min(before, self.floor):
            self.scaler.update(self.floor)


class Timm(Style):
    """Is called with the loss; two micro-batches, then clipping by norm."""

    passes = 2

    def __call__(self, loss, optimizer, clip_grad, parameters, *, need_update):
        self.scaler.scale(loss).backward()
        if need_update:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self.scaler.step(optimizer)
            self.scaler.update()

    def step(self, losses):
        weights = self.optimizer.param_groups[0]["params"]
        self(losses(), self.optimizer, 0.5, weights, need_update=False)
        self(losses(), self.optimizer, 0.5, weights, need_update=True)
        self.optimizer.zero_grad()


class Mmengine(Style):
    """Puts the scaler's state next to the optimizer's; "dynamic" or one number."""

    passes = 2
    fixed = None

    def step(self, losses):
        for _ in range(self.passes):
            self.scaler.scale(losses()).backward()
        self.scaler.unscale_(self.optimizer)
        weights = self.optimizer.param_groups[0]["params"]
        torch.nn.utils.clip_grad_value_(weights, 0.2)
        self.scaler.step(self.optimizer)
        self.scaler.update(self.fixed)
        self.optimizer.zero_grad()

    def state_dict(self):
        saved = self.optimizer.state_dict()
        saved["loss_scaler"] = self.scaler.state_dict()
        return saved

    def load_state_dict(self, saved):
        self.scaler.load_state_dict(saved.pop("loss_scaler"))
        self.optimizer.load_state_dict(saved)


class MmengineFixed(Mmengine):
    fixed = 512.0


# Running them


class Outcome(NamedTuple):
    """What came out of a run, on one rank."""

    scales: list
    weights: list
    """Copies of all weights: those of the start, and those after every step."""
    optimizer: object


def copies(problem):
    """Return what the weights are now."""
    return [weight.detach().clone() for weight in problem.weights]


def same(first, second):
    """Whether two lists of tensors are the same to the bit, none of them NaN."""
    return all(map(torch.equal, first, second))


def run_rank(style, base, kind, faults, resume_at, rank, store):
    """Train on one rank; take a new start from a checkpoint at one of the steps."""
    group = None
    if style.ranks > 1:
        group = dist.ProcessGroupGloo(store, rank, style.ranks, HANG)
    problem = Problem(style, kind, rank)
    trainer = style(base, problem, group)
    scales, weights = [], [copies(problem)]
    for at, fault in enumerate(faults):
        if at == resume_at:
            file = io.BytesIO()
            torch.save((weights[-1], trainer.state_dict()), file)
            trained, saved = torch.load(io.BytesIO(file.getvalue()))
            problem = Problem(style, kind, rank)
            trainer = style(base, problem, group)
            with torch.no_grad():
                torch._foreach_copy_(problem.weights, trained)
            trainer.load_state_dict(saved)
        trainer.step(problem.losses(at, fault))
        scales.append(trainer.scaler.get_scale())
        weights.append(copies(problem))
    return Outcome(scales, weights, problem.optimizer)


def run(style, base, kind, faults, resume_at=None):
    """Return the outcome of each rank; the ranks are threads of this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(style.ranks) as threads:
        waiting = [
            threads.submit(run_rank, style, base, kind, faults, resume_at, rank, store)
            for rank in range(style.ranks)
        ]
        return [one.result() for one in waiting]


STYLES = [
    Composer,
    Xla,
    XlaStep,
    Apex,
    Nemo,
    Sharded,
    Fairseq2,
    Timm,
    Mmengine,
    MmengineFixed,
]
SPOILT = [Apex, Nemo, Sharded, Timm, Mmengine]
"""Have NaN weights with torch's class after a long row of overflows. The others have a
floor or a fixed scale of their own, write zeros over NaN, or put weights back."""
CASES = [
    pytest.param(style, kind, id=f"{style.__name__}-{kind}")
    for style in STYLES
    for kind in (["own"] if style.optimizer is not None else OPTIMIZERS)
    if style.fuses or kind != "fused"
]


def check_same(expected, found):
    """Raise unless two runs came to the same on every rank, with finite weights."""
    for one, other in zip(expected, found, strict=True):
        assert one.scales == other.scales
        for theirs, ours in zip(one.weights, other.weights, strict=True):
            assert same(theirs, ours)
        assert snapshot(one.optimizer) == snapshot(other.optimizer)
        assert all(weight.isfinite().all() for weight in other.weights[-1])


@pytest.mark.parametrize(("style", "kind"), CASES)
def test_a_style_comes_to_the_same_numbers_on_either_class(style, kind):
    faults = plan()
    ours = run(style, OURS, kind, faults)
    check_same(run(style, THEIRS, kind, faults), ours)
    for outcome in ours:
        assert ours[0].scales == outcome.scales  # on all ranks
        moved = [
            not same(before, after)
            for before, after in zip(outcome.weights, outcome.weights[1:], strict=False)
        ]
        expected = [fault is None or not style.skips for fault in faults]
        assert expected == moved


@pytest.mark.parametrize(("style", "kind"), CASES)
def test_a_checkpoint_in_the_middle_makes_no_difference(style, kind):
    faults = plan(seed=1)
    parted = run(style, OURS, kind, faults, resume_at=13)
    check_same(run(style, THEIRS, kind, faults), parted)


@pytest.mark.filterwarnings("ignore::lossscale.errors.CollapseWarning")
@pytest.mark.parametrize("style", STYLES)
def test_no_weight_is_nan_after_170_overflows_and_a_finite_step(style):
    """torch's scale is 0 by then, and its reciprocal infinite."""
    faults = [None, *(Fault(0, math.inf, at % 2, at % 2) for at in range(170)), None]
    kind = "own" if style.optimizer is not None else "momentum"
    for theirs, ours in zip(
        run(style, THEIRS, kind, faults), run(style, OURS, kind, faults), strict=True
    ):
        assert all(weight.isfinite().all() for weight in ours.weights[-1])
        spoilt = any(weight.isnan().any() for weight in theirs.weights[-1])
        assert spoilt == (style in SPOILT)
        trains = not same(*ours.weights[-2:])
        # A subclass that moves the scale by hand moves it to 0, also with ours: every
        # step from there on is skipped, without a warning.
        assert (style.floored, style.floored) == (trains, ours.scales[-1] > 0)


# Gradients that an optimizer keeps to itself, as the distributed ones of Apex do


class Buffered(torch.optim.Optimizer):
    """Takes the gradients off the weights, and unscales them when it is asked."""

    _custom_amp_unscale_grads = True

    def __init__(self, weight, *, hands_over):
        super().__init__([weight], {})
        self.weight = weight
        self._step_supports_amp_scaling = hands_over

    def backward(self, loss):
        loss.backward()
        self.buffer, self.weight.grad = self.weight.grad, None

    def unscale_grads(self, inv_scale, found_inf, allow_fp16):
        found = found_inf.clone()
        torch._amp_foreach_non_finite_check_and_unscale_(
            [self.buffer], found, inv_scale
        )
        return {found.device: found}

    def step(self, closure=None):
        if getattr(self, "found_inf", None):
            return
        divisor = getattr(self, "grad_scale", None)
        with torch.no_grad():
            self.weight -= self.buffer if divisor is None else self.buffer / divisor


@pytest.mark.parametrize(
    ("base", "hands_over"),
    [
        (THEIRS, False),
        (THEIRS, True),
        (OURS, False),
        (OURS, True),
    ],
)
def test_an_optimizer_may_keep_its_gradients_to_itself(base, hands_over):
    class Asking(base):
        def _unscale_grads_(self, optimizer, *args):
            return optimizer.unscale_grads(*args)

    weight = parameter([8.0])
    optimizer = Buffered(weight, hands_over=hands_over)
    scaler = Asking("cpu", init_scale=8.0)
    seen = []
    for factor in (1.0, math.inf, 2.0):
        optimizer.backward(scaler.scale((weight * factor).sum()))
        scaler.step(optimizer)
        scaler.update()
        seen.append((weight.item(), scaler.get_scale()))
    assert [(7.0, 8.0), (7.0, 4.0), (5.0, 4.0)] == seen


def test_a_schedule_is_not_silently_left_behind_by_an_update_of_ones_own():
    class Alone(OURS):
        def update(self, new_scale=None):
            self._per_optimizer_states.clear()

    weight = parameter([8.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = Alone("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(ValueError, match=r"super\(\).update"):
        scaler.step_scheduler(schedule)
