"""A scaler of one's own that steps the wrapped optimizers of packages."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("lightning", reason="lightning is not installed")

import lossscale.torch as ls  # noqa: E402


def wrap_by_accelerate(optimizer):
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare_optimizer(optimizer)


def wrap_by_fabric(optimizer):
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer)


WRAPPERS = {"accelerate": wrap_by_accelerate, "fabric": wrap_by_fabric}
KINDS = {"plain": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def train(cls, wrap, kind, call):
    """Take two finite steps and one overflow; return the weight after each."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.1, **KINDS[kind])
    wrapped = optimizer if wrap is None else wrap(optimizer)
    scaler = cls("cpu", init_scale=1024.0)
    seen = []
    for factor in (1.0, 3.0, float("inf"), 2.0):
        optimizer.zero_grad()
        scaler.scale((weight**2 * factor).sum()).backward()
        if call == "unscale_":
            scaler.unscale_(wrapped)
        elif call == "clip":
            scaler.clip_grad_norm_(wrapped, 1e6)
        elif call == "accumulate":
            scaler.accumulate(wrapped)
        scaler.step(wrapped)
        scaler.update()
        seen.append((weight.tolist(), scaler.get_scale()))
    return seen


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["step alone", "unscale_"])
def test_a_wrapped_optimizer_takes_the_steps_of_the_one_inside(wrapper, kind, call):
    expected = train(torch.amp.GradScaler, None, kind, call)
    assert expected == train(ls.GradScaler, WRAPPERS[wrapper], kind, call)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["clip", "accumulate"])
def test_our_own_calls_take_the_wrapper_as_well(wrapper, kind, call):
    expected = train(ls.GradScaler, None, kind, call)
    assert expected == train(ls.GradScaler, WRAPPERS[wrapper], kind, call)


def test_torch_applies_scaled_gradients_of_a_fused_optimizer_in_fabrics_wrapper():
    plain = train(torch.amp.GradScaler, None, "fused", "step alone")
    assert plain != train(torch.amp.GradScaler, wrap_by_fabric, "fused", "step alone")


def test_a_schedule_that_accelerate_has_prepared_is_stepped_for_applied_steps():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    wrapped, prepared = accelerator.prepare(optimizer, schedule)
    scaler = ls.GradScaler("cpu")
    rates = []
    for factor in (1.0, float("inf"), 1.0):
        wrapped.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(wrapped)
        scaler.update()
        scaler.step_scheduler(prepared)
        rates.append(schedule.get_last_lr()[0])
    assert [0.5, 0.5, 0.25] == rates
