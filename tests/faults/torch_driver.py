"""Faults in a loop of PyTorch: our scaler and torch's own, torch's optimizers and ours.

The optimizers of `lossscale.torch.optim` also have weights in half precision.
"""

import io
import math
import warnings
from contextlib import ExitStack

import numpy as np
import torch
from helpers.faults import (
    BrokenError,
    InjectedError,
    Outcome,
    check_finite,
    check_scale,
    check_unchanged,
    plan,
    value,
)

from lossscale.errors import CollapseWarning
from lossscale.testing.torch import inject
from lossscale.torch import GradScaler, optim

CLASSES = {
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {}),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
}
FUSED = {"SGD", "SGD momentum", "Adam", "Adam amsgrad", "AdamW", "Adagrad"}
NOT_CAPTURABLE = {"SGD", "SGD momentum", "Adagrad"}
MASTERS = {"master_weights": True}
OURS = {
    "our AdamW": (optim.AdamW, {}, torch.float32),
    "our AdamW, float16": (optim.AdamW, {}, torch.float16),
    "our AdamW, float16, masters": (optim.AdamW, MASTERS, torch.float16),
    "our AdamW, bfloat16, masters": (optim.AdamW, MASTERS, torch.bfloat16),
    "our AdamW, float16, masters, bfloat16 moments": (
        optim.AdamW,
        {**MASTERS, "moments_dtype": torch.bfloat16},
        torch.float16,
    ),
    "our Adam amsgrad, float16, masters": (
        optim.Adam,
        {**MASTERS, "amsgrad": True, "weight_decay": 0.1},
        torch.float16,
    ),
    "our SGD momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True}, torch.float32),
    "our SGD momentum, float16, masters": (
        optim.SGD,
        {**MASTERS, "momentum": 0.9, "nesterov": True},
        torch.float16,
    ),
}
"""Ours, with the dtype of their weights."""

CONFIGURATIONS = tuple(
    f"{name} {form}"
    for name in CLASSES
    for form in ("single", "foreach", "fused", "capturable")
    if not (form == "fused" and name not in FUSED)
    and not (form == "capturable" and name in NOT_CAPTURABLE)
) + tuple(OURS)
"""Every optimizer in every form that it has. Capturable forms need a GPU."""


def runs_on(configuration: str, device: str) -> bool:
    """Whether a device has such an optimizer."""
    if device == "cpu":
        return not configuration.endswith("capturable")
    return configuration != "Adagrad fused"  # torch has it on CPUs only


CALLS = ("scale", "backward", "unscale", "before step", "in step", "after step")
SHAPES = ((5,), (3, 4), (1,))
INTERVAL = 3
"""Growth so often that, with all the overflows, the scale visits both of its ends."""


class Loop:
    """Weights, an optimizer and a scaler, and one step of them with faults."""

    def __init__(self, configuration: str, *, own: bool, device: str) -> None:
        self._dtype = torch.float32
        if configuration in OURS:
            self._class, self._settings, self._dtype = OURS[configuration]
        else:
            name, _, form = configuration.rpartition(" ")
            self._class, self._settings = CLASSES[name]
            self._settings = {**self._settings, **_form(form)}
        self._own = own
        self._device = device
        generator = torch.Generator().manual_seed(1)
        self._slopes = [
            torch.randn(shape, generator=generator).to(device) for shape in SHAPES
        ]
        self.weights, self.optimizer, self.scaler = self._make()
        self.applied = self.skipped = 0

    def _make(self):
        """Return new weights, a new optimizer and a new scaler."""
        weights = [
            torch.nn.Parameter(
                torch.ones(shape, device=self._device, dtype=self._dtype)
            )
            for shape in SHAPES
        ]
        optimizer = self._class(weights, lr=1e-3, **self._settings)
        if self._own:
            scaler = torch.amp.GradScaler(self._device, growth_interval=INTERVAL)
        else:
            scaler = GradScaler(self._device, growth_interval=INTERVAL)
        return weights, optimizer, scaler

    def resume(self) -> None:
        """Save everything, and go on with new objects that have loaded it."""
        file = io.BytesIO()
        torch.save(
            (self.weights, self.optimizer.state_dict(), self.scaler.state_dict()), file
        )
        file.seek(0)
        saved, optimizer, scaler = torch.load(file, weights_only=True)
        self.weights, self.optimizer, self.scaler = self._make()
        with torch.no_grad():
            for weight, old in zip(self.weights, saved, strict=True):
                weight.copy_(old)
        self.optimizer.load_state_dict(optimizer)
        self.scaler.load_state_dict(scaler)

    def take(self, step) -> None:
        """Take one step; raise if it has broken anything."""
        if step.resumes:
            self.resume()
        before = self.arrays()
        scale = self.scaler.get_scale()
        complete = False
        try:
            self._iterate(step)
            complete = True
        except InjectedError:
            pass  # the step may have been taken, or not
        self.optimizer.zero_grad()
        after = self.arrays()
        check_finite(step.number, after)
        # torch's class has no floor: it goes below what has a finite reciprocal.
        check_scale(step.number, self.scaler.get_scale(), 2.0**-126, 2.0**127)
        if not complete:
            return
        if self._own:
            applied = self.scaler.get_scale() >= scale
        else:
            applied = self.scaler.last_step.applied
        self.applied += applied
        self.skipped += not applied
        if not applied:
            known = {name: array for name, array in after.items() if name in before}
            check_unchanged(step.number, {n: before[n] for n in known}, known)
            # A fused optimizer makes its state when it is first called.
            for name in after.keys() - before.keys():
                first = 0.0
                if name.startswith("master"):
                    first = before[name.replace("master_param", "weight")]
                if (after[name] != first).any():
                    raise BrokenError(step.number, f"a skipped step wrote {name}")

    def _iterate(self, step) -> None:
        """Take the calls of a step; an exception is raised in between if planned."""
        path = ("step", "unscale", "clip")[step.number % 3]
        raise_at = step.raises_at
        terms = zip(self.weights, self._slopes, strict=True)
        loss = sum((weight * slope).sum() for weight, slope in terms)
        _raise(raise_at, "scale")
        with ExitStack() as stack:
            for fault in step.faults:
                if fault.kind != "missing":
                    stack.enter_context(self._inject(fault))
            self.scaler.scale(loss).backward()
        for fault in step.faults:
            if fault.kind == "missing":
                self.weights[self._index(fault)].grad = None
        _raise(raise_at, "backward")
        if all(weight.grad is None for weight in self.weights):
            self.weights[0].grad = torch.zeros_like(self.weights[0])
        self._prepare(path)
        _raise(raise_at, "unscale")
        hooks = [
            register(_hook(raise_at == name))
            for name, register in (
                ("before step", self.optimizer.register_step_pre_hook),
                ("after step", self.optimizer.register_step_post_hook),
            )
        ]
        try:
            self.scaler.step(self.optimizer)
        finally:
            for hook in hooks:
                hook.remove()
        _raise(raise_at, "in step")
        self.scaler.update()

    def _prepare(self, path: str) -> None:
        """Unscale or clip before the step, or do neither."""
        try:
            self._unscale(path)
        except RuntimeError:
            # The last step broke off before its update: torch's own way on is to call
            # that now, ours is to discard it.
            if self._own:
                self.scaler.update()
            else:
                self.scaler.discard()
            self._unscale(path)

    def _unscale(self, path: str) -> None:
        if path == "unscale":
            self.scaler.unscale_(self.optimizer)
        elif path == "clip" and not self._own:
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        elif path == "clip":
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        elif self.scaler._per_optimizer_states[id(self.optimizer)]["stage"].value == 2:
            raise RuntimeError  # stepped, and not updated

    def _index(self, fault) -> int:
        return int(fault.tensor * len(self.weights))

    def _inject(self, fault):
        """Return a context in which a fault is written into a scaled gradient."""
        index, dtype = self._index(fault), str(self._dtype).removeprefix("torch.")
        number = value(fault.kind, dtype)
        if math.isfinite(number):  # 1e20 is beyond float16
            number = min(number, value("largest", dtype))
        return inject(
            self.optimizer,
            f"param_groups[0]['params'][{index}]",
            number,
            steps=1,
            element=int(fault.element * self.weights[index].numel()),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return weights and optimizer state by name."""
        named = {f"weight {i}": weight for i, weight in enumerate(self.weights)}
        for i, weight in enumerate(self.weights):
            for name, number in self.optimizer.state.get(weight, {}).items():
                if isinstance(number, torch.Tensor):
                    named[f"{name} {i}"] = number
        return {name: _to_numpy(tensor) for name, tensor in named.items()}


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy in NumPy, which has no bfloat16: all its numbers are in float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _form(form: str) -> dict[str, bool]:
    """Return the argument that chooses a form of an optimizer."""
    if form == "single":
        return {"foreach": False}
    return {form: True}


def _raise(wanted, here) -> None:
    if wanted == here:
        raise InjectedError


def _hook(raises: bool):
    def run(*_):
        if raises:
            raise InjectedError

    return run


def run(configuration, *, own, steps, seed, device="cpu") -> Outcome:
    """Run a plan of faults; stop at the first thing that must not happen."""
    loop = Loop(configuration, own=own, device=device)
    broken, taken = "", 0
    with warnings.catch_warnings():
        # Bursts of hundreds: the alarm goes off, rightly.
        warnings.simplefilter("ignore", CollapseWarning)
        for step in plan(steps, seed, CALLS):
            try:
                loop.take(step)
            except BrokenError as error:
                broken = str(error)
                break
            except (ValueError, NotImplementedError) as error:
                if not own:
                    raise
                broken = f"in step {step.number}, {type(error).__name__}: {error}"
                break
            taken += 1
    scale = loop.scaler.get_scale()
    if not math.isfinite(scale):
        broken = broken or f"the scale is {scale}"
    scaler = "torch.amp.GradScaler" if own else "lossscale"
    return Outcome(
        configuration, scaler, taken, loop.applied, loop.skipped, scale, broken
    )
