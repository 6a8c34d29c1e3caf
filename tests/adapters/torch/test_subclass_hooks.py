"""How a GradScaler and optimizers that skip by themselves talk to each other."""

import math
import re

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import (  # noqa: E402
    BAD,
    CLASSES,
    FUSED,
    both,
    init_scale_tensor,
    parameter,
    snapshot,
)
from torch.amp.grad_scaler import OptState  # noqa: E402

import lossscale.torch as ls  # noqa: E402


class Fused(torch.optim.SGD):
    """Writes down what it was handed."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        self.seen = self.grad_scale, self.found_inf
        return "called"


class Older(torch.optim.SGD):
    """Asks for the scaler, as optimizers of Apex do."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        self.seen = grad_scaler
        self.handed = hasattr(self, "grad_scale"), hasattr(self, "found_inf")
        found = grad_scaler._check_inf_per_device(self)
        if not sum(flag.item() for flag in found.values()):
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.data -= weight.grad / grad_scaler._get_scale_async()


def problem(cls, gradient):
    weight = parameter([1.0])
    weight.grad = torch.tensor([gradient])
    return weight, cls([weight], lr=1.0)


# The form with two tensors


@both
@pytest.mark.parametrize(("gradient", "found"), [(1.0, 0.0), (math.inf, 1.0)])
def test_the_scale_and_the_flag_are_set_for_the_step(cls, gradient, found):
    scaler = init_scale_tensor(cls("cpu", init_scale=4.0))
    _, optimizer = problem(Fused, gradient)
    assert scaler.step(optimizer) == "called"
    assert (4.0, found) == tuple(tensor.item() for tensor in optimizer.seen)
    assert (torch.float32, torch.Size([])) == (
        optimizer.seen[1].dtype,
        optimizer.seen[1].shape,
    )
    assert (False, False) == (
        hasattr(optimizer, "grad_scale"),
        hasattr(optimizer, "found_inf"),
    )


@both
@pytest.mark.parametrize("preset", [None, 3.0])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_divisor_that_was_set_before_divides_as_well(cls, preset, explicit):
    scaler = init_scale_tensor(cls("cpu", init_scale=5.0))
    _, optimizer = problem(Fused, 1.0)
    if preset is not None:
        optimizer.grad_scale = torch.tensor(preset)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    divisor = optimizer.seen[0]
    expected = preset if explicit else 5.0 * (preset or 1.0)
    assert expected == (None if divisor is None else divisor.item())


def test_a_preset_divisor_reaches_a_real_fused_optimizer():
    weight, other = parameter([1.0]), parameter([1.0])
    for one, cls in ((weight, ls.GradScaler), (other, torch.amp.GradScaler)):
        one.grad = torch.tensor([15.0])
        optimizer = torch.optim.SGD([one], lr=1.0, fused=True)
        optimizer.grad_scale = torch.tensor(3.0)
        init_scale_tensor(cls("cpu", init_scale=5.0)).step(optimizer)
    assert (0.0, 0.0) == (weight.item(), other.item())
    assert (1.0, 1.0) == (weight.grad.item(), other.grad.item())


@pytest.mark.parametrize("found", [(1.0, 1.0), (2.0, 0.0), (2.0,), (0.0, 0.0)])
def test_the_flag_passed_on_is_exactly_0_or_1(found):
    """Two devices with an infinity each add up to 2 in torch, which skips nothing."""
    devices = [torch.device("cpu"), torch.device("meta")][: len(found)]
    for cls in (Fused, lambda params, lr: torch.optim.SGD(params, lr, fused=True)):
        scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=4.0))
        weight, optimizer = problem(cls, 4.0)
        scaler.unscale_(optimizer)
        state = scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {
            device: torch.tensor(flag)
            for device, flag in zip(devices, found, strict=True)
        }
        scaler.step(optimizer)
        if isinstance(optimizer, Fused):
            assert float(any(found)) == optimizer.seen[1].item()
        else:
            assert (1.0 if any(found) else 0.0) == weight.item()
        scaler.update()
        assert (2.0 if any(found) else 4.0) == scaler.get_scale()


def test_torch_hands_over_a_flag_of_2_and_steps():
    scaler = init_scale_tensor(torch.amp.GradScaler("cpu", init_scale=4.0))
    weight = parameter([1.0])
    weight.grad = torch.tensor([4.0])
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    scaler.step(optimizer)
    assert weight.item() == 0.0


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("explicit", [False, True])
def test_fused_optimizers_take_the_steps_they_take_under_torch(name, explicit):
    """Weights, states and gradients are equal to the bit, skips included."""
    pictures = []
    for cls in CLASSES.values():
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(n)) for n in (3, 1, 17)]
        optimizer = FUSED[name](weights, fused=True)
        scaler = init_scale_tensor(cls("cpu", init_scale=2.0**10, growth_interval=2))
        for at in range(8):
            for weight in weights:
                weight.grad = torch.randn_like(weight) * scaler.get_scale()
            if at in (3, 6):
                weights[at // 3].grad[0] = BAD[at % 3]
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            pictures.append((snapshot(optimizer), [w.grad.clone() for w in weights]))
    half = len(pictures) // 2
    for torchs, ours in zip(pictures[:half], pictures[half:], strict=True):
        assert torchs[0] == ours[0]
        for expected, found in zip(torchs[1], ours[1], strict=True):
            torch.testing.assert_close(expected, found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "cls",
    [
        torch.amp.GradScaler,
        ls.GradScaler,
    ],
)
def test_gradients_are_checked_again_if_they_were_only_checked(cls):
    """A check before the last backward pass says nothing about the step."""
    scaler = init_scale_tensor(cls("cpu", init_scale=4.0))
    weight = parameter([1.0])
    weight.grad = torch.tensor([4.0])
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler._check_inf_per_device(optimizer)
    weight.grad.fill_(math.inf)
    scaler.step(optimizer)
    assert weight.item() == 1.0


# The form with the scaler


@both
@pytest.mark.parametrize("gradient", [8.0, math.inf])
def test_an_optimizer_that_asks_for_the_scaler_gets_it_with_a_warning(cls, gradient):
    scaler = init_scale_tensor(cls("cpu", init_scale=4.0))
    weight, optimizer = problem(Older, gradient)
    text = (
        "GradScaler is going to stop passing itself as a keyword argument to the "
        "passed optimizer. In the near future GradScaler registers `grad_scale: "
        "Tensor` and `found_inf: Tensor` to the passed optimizer and let the optimizer "
        "use them directly."
    )
    with pytest.warns(FutureWarning, match=f"^{re.escape(text)}$") as warned:
        scaler.step(optimizer)
    assert __file__ == warned[0].filename
    assert scaler is optimizer.seen
    assert (False, False) == optimizer.handed
    assert (-1.0 if gradient == 8.0 else 1.0) == weight.item()
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
    scaler.update()
    assert (4.0 if gradient == 8.0 else 2.0) == scaler.get_scale()


# Private names


@both
def test_the_private_check_returns_a_flag_for_each_device(cls):
    scaler = init_scale_tensor(cls("cpu", init_scale=4.0))
    weight, optimizer = problem(torch.optim.SGD, 4.0)
    for gradient, found in ((4.0, 0.0), (math.nan, 1.0)):
        weight.grad = torch.tensor([gradient])
        flags = scaler._check_inf_per_device(optimizer)
        assert {torch.device("cpu"): found} == flags
        assert flags is scaler._found_inf_per_device(optimizer)
        assert flags[torch.device("cpu")].shape == ()
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_private_unscaling_multiplies_and_flags(cls, dtype):
    scaler = init_scale_tensor(cls("cpu"))
    weight = parameter([1.0, 1.0], dtype)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    inverse, zero = torch.tensor(0.25), torch.tensor(0.0)
    for bad in (4.0, math.inf):
        weight.grad = torch.tensor([4.0, bad], dtype=dtype)
        found = scaler._unscale_grads_(optimizer, inverse, zero, True)
        assert {torch.device("cpu"): float(math.isinf(bad))} == found
        assert [1.0, bad / 4] == weight.grad.tolist()
        assert zero.item() == 0.0


@both
def test_a_subclass_that_unscales_itself_is_asked(cls):
    """As ShardedGradScaler does, which reduces the flags over processes."""

    class Sharded(cls):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            for flag in found.values():
                flag.add_(self.elsewhere)
            return found

    for fused in (False, True):
        weight = parameter([1.0])
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        scaler = init_scale_tensor(Sharded("cpu", init_scale=4.0))
        for elsewhere, scale in ((0.0, 4.0), (1.0, 2.0)):
            weight.grad = torch.tensor([4.0])
            scaler.elsewhere = elsewhere
            scaler.step(optimizer)
            scaler.update()
            assert scale == scaler.get_scale()
        assert weight.item() == 0.0


@both
def test_a_subclass_that_steps_itself_is_asked(cls):
    class Counting(cls):
        calls = 0

        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            self.calls += 1
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    weight, optimizer = problem(torch.optim.SGD, 1.0)
    scaler = init_scale_tensor(Counting("cpu"))
    scaler.step(optimizer)
    assert (1, True) == (scaler.calls, weight.item() < 1.0)


@both
def test_the_state_can_be_made_by_hand_before_anything_is_scaled(cls):
    scaler = cls("cpu", init_scale=4.0)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert (4.0, 0) == (scaler._scale.item(), scaler._growth_tracker.item())
    assert (scaler._scale, scaler._growth_tracker) == (
        scaler._check_scale_growth_tracker("anything")
    )


def test_an_optimizer_without_weak_references_is_stepped():
    class Slots:
        __slots__ = ("param_groups",)

        def step(self):
            return "called"

    for cls in CLASSES.values():
        weight = parameter([1.0])
        weight.grad = torch.tensor([1.0])
        optimizer = Slots()
        optimizer.param_groups = [{"params": [weight]}]
        scaler = init_scale_tensor(cls("cpu"))
        assert scaler.step(optimizer) == "called"
        scaler.update()
