"""What is tried again, overridden or set from outside is checked again."""

import copy
import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from collections import defaultdict  # noqa: E402

from helpers.torch_steps import (  # noqa: E402
    CLASSES,
    both,
    init_scale_tensor,
    one_weight,
    parameter,
)
from torch.amp.grad_scaler import (  # noqa: E402
    OptState,
    _refresh_per_optimizer_state,
)

import lossscale.torch as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402
from lossscale.errors import ContextError, GradientError  # noqa: E402


def fused_adam():
    weight = parameter([1.0, 1.0, 1.0])
    return weight, torch.optim.Adam([weight], lr=0.1, fused=True)


def backward(scaler, weight, factor):
    weight.grad = None
    scaler.scale((weight * factor).sum()).backward()


@both
def test_a_fused_step_that_raised_is_checked_again(cls):
    weight, optimizer = fused_adam()
    scaler = cls("cpu")
    backward(scaler, weight, 1.0)
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    hook.remove()
    if cls is CLASSES["torch"]:
        # torch leaves its own behind, which is another defect.
        del optimizer.grad_scale, optimizer.found_inf
    backward(scaler, weight, math.nan)
    scaler.step(optimizer)
    scaler.update()
    assert [1.0, 1.0, 1.0] == weight.tolist()
    assert 2.0**15 == scaler.get_scale()


@both
def test_a_stage_that_was_set_back_is_checked_again(cls):
    weight, optimizer = fused_adam()
    scaler = cls("cpu")
    backward(scaler, weight, 1.0)
    scaler.step(optimizer)
    before = weight.tolist()
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    backward(scaler, weight, math.nan)
    scaler.step(optimizer)
    scaler.update()
    assert before == weight.tolist()
    assert 2.0**15 == scaler.get_scale()


def test_a_check_that_was_interrupted_is_taken_again(monkeypatch):
    weight, optimizer = fused_adam()
    scaler = ls.GradScaler("cpu")
    backward(scaler, weight, math.nan)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(
            "lossscale.torch.inspection.host.HostReader.measure", interrupted
        )
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert [1.0, 1.0, 1.0] == weight.tolist()


@both
def test_a_subclass_may_end_the_iteration_by_itself(cls):
    class Own(cls):
        def update(self, new_scale=None):
            flags = [
                flag
                for state in self._per_optimizer_states.values()
                for flag in state["found_inf_per_device"].values()
            ]
            torch._amp_update_scale_(
                self._scale, self._growth_tracker, sum(flags), 2.0, 0.5, 2000
            )
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    weight, optimizer = fused_adam()
    scaler = Own("cpu")
    scales = []
    for factor in (1.0, math.inf, 1.0):
        backward(scaler, weight, factor)
        if cls is ls.GradScaler:
            scaler.clip_grad_norm_(optimizer, 10.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert [2.0**16, 2.0**15, 2.0**15] == scales
    assert torch.isfinite(weight).all()


def test_unscaling_after_a_clip_that_was_set_back_divides_once():
    weight, optimizer = fused_adam()
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=4.0))
    weight.grad = torch.full((3,), 4.0)
    scaler.clip_grad_norm_(optimizer, 100.0)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert weight.tolist() == pytest.approx([0.9, 0.9, 0.9])


@both
@pytest.mark.parametrize("fused", [False, True])
def test_an_expanded_gradient_is_an_error_and_moves_nothing(cls, fused):
    weight = parameter([1.0, 1.0, 1.0])
    optimizer = torch.optim.Adam([weight], lr=0.5, fused=fused)
    scaler = init_scale_tensor(cls("cpu"))
    weight.grad = torch.ones(1).expand(3)
    with pytest.raises(RuntimeError, match="more than one element of the written-to"):
        scaler.step(optimizer)
    assert [1.0, 1.0, 1.0] == weight.tolist()


def test_clipping_goes_through_an_unscale_of_a_subclass():
    class Reducing(ls.GradScaler):
        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            for flag in self._found_inf_per_device(optimizer).values():
                flag.fill_(1.0)  # another rank has found an infinity

    weight, optimizer = fused_adam()
    scaler = Reducing("cpu")
    backward(scaler, weight, 1.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert [1.0, 1.0, 1.0] == weight.tolist()
    assert 2.0**15 == scaler.get_scale()


def test_a_subclass_that_allows_fp16_still_learns_what_dividing_will_do():
    class Allowing(ls.GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    weight = parameter([1.0, 1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = init_scale_tensor(Allowing("cpu", init_scale=2.0**-10))
    weight.grad = torch.full((2,), 2.0**127)
    scaler.step(optimizer)
    scaler.update()
    assert [1.0, 1.0] == weight.tolist()
    assert (2.0**-10, "inf") == (scaler.last_step.scale, scaler.last_step.reason)


def test_gradients_that_were_not_accumulated_are_an_error_and_stay():
    weight, optimizer = one_weight()
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight, 1.0)
    scaler.accumulate(optimizer)
    backward(scaler, weight, 2.0)
    with pytest.raises(ContextError, match=r"after every backward\(\)"):
        scaler.step(optimizer)
    assert (1.0, 16.0) == (weight.item(), weight.grad.item())
    scaler.accumulate(optimizer)
    scaler.step(optimizer)
    assert 1.0 - 3.0 == weight.item()


def test_parameters_may_be_added_between_micro_batches():
    weight, optimizer = one_weight()
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight, 1.0)
    scaler.accumulate(optimizer)
    other = parameter([5.0])
    optimizer.add_param_group({"params": [other]})
    scaler.scale((weight + 2.0 * other).sum()).backward()
    scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (-1.0, 3.0) == (weight.item(), other.item())


def test_sparse_micro_batches_are_refused_before_anything_is_taken():
    weight = parameter([[1.0], [1.0]])
    optimizer = torch.optim.SparseAdam([weight])
    scaler = ls.GradScaler("cpu")
    rows = torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True)
    scaler.scale(rows.sum()).backward()
    with pytest.raises(GradientError, match=r"accumulate\(\) keeps dense sums"):
        scaler.accumulate(optimizer)
    assert weight.grad is not None
    scaler.step(optimizer)  # as the error says
    scaler.update()
    assert [1.0] == weight[0].tolist()
    assert weight[1].item() < 1.0


class OlderAgreement(torch.optim.SGD):
    """Asks for the scaler, as Apex's optimizers do."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        states = grad_scaler._per_optimizer_states[id(self)]
        if states["stage"] is OptState.READY:
            grad_scaler.unscale_(self)
        if not any(flag.item() for flag in states["found_inf_per_device"].values()):
            super().step()


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
def test_an_optimizer_of_the_older_agreement_gets_what_was_accumulated():
    weight = parameter([1.0])
    optimizer = OlderAgreement([weight], lr=1.0)
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, 2.0):
        backward(scaler, weight, factor)
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert -2.0 == weight.item()


def test_step_all_refuses_who_decides_by_itself_before_anyone_steps():
    weight, optimizer = one_weight()
    other = parameter([1.0])
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    scaler.scale((weight + other).sum()).backward()
    with pytest.raises(ContextError, match="OlderAgreement"):
        scaler.step_all(optimizer, OlderAgreement([other], lr=1.0))
    assert (1.0, 1.0) == (weight.item(), other.item())


def test_step_all_without_gradients_of_one_steps_none():
    weight, optimizer = one_weight()
    _, idle = one_weight()
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight, 1.0)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step_all(optimizer, idle)
    assert 1.0 == weight.item()


def test_a_closure_that_raises_leaves_everything_as_it_was():
    weight, _ = one_weight()
    optimizer = torch.optim.LBFGS([weight], max_iter=5)
    scaler = ls.GradScaler("cpu")
    calls = []

    def closure():
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(1)
        optimizer.zero_grad()
        loss = ((weight - 3.0) ** 4).sum()
        scaler.scale(loss).backward()
        return loss

    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer, closure=closure)
    assert 1.0 == weight.item()
    assert before == optimizer.state_dict()


def test_what_a_graph_would_read_keeps_its_place():
    policy = Dynamic(growth_factor=1.7)  # which is advanced by tensors
    scaler = init_scale_tensor(ls.GradScaler("cpu", policy=policy))
    places = [tensor.data_ptr() for tensor in scaler.state]
    scaler.load_state_dict(scaler.state_dict() | {"total_steps": 7, "bad_steps": 0})
    assert places == [tensor.data_ptr() for tensor in scaler.state]
    assert 7 == scaler.total_steps


def test_an_invalid_number_set_by_hand_is_refused_every_time():
    weight, _ = one_weight()
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    scaler._growth_interval = 1.5
    for _ in range(2):
        with pytest.raises(TypeError, match="growth_interval"):
            backward(scaler, weight, 1.0)


def test_a_refusal_inside_a_subclass_costs_no_gradient():
    class Asking(ls.GradScaler):
        def _unscale_grads_(self, *arguments):
            return super()._unscale_grads_(*arguments)

    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = Asking("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    assert [8.0, 8.0] == weight.grad.tolist()
