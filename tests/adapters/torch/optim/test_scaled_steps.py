"""Steps with `grad_scale` and `found_inf`, by a scaler or by hand."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.optimizers import (  # noqa: E402
    ONE_OF_EACH,
    SETTINGS,
    check_equal,
    copy_tensors,
    make_params,
    set_grads,
    tensors_of,
)

import lossscale.torch as ls  # noqa: E402
from lossscale.torch import optim  # noqa: E402

SCALERS = {"ours": ls.GradScaler, "torch's": torch.amp.GradScaler}


def step(optimizer, *, scale=None, skip=False):
    """Take a step as a scaler would."""
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    optimizer.found_inf = torch.tensor(float(skip))
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("choice", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_scale_of_a_power_of_two_is_divided_out_exactly(setting, choice):
    scaled = setting.ours(make_params(), **choice)
    plain = setting.ours(make_params(), **choice)
    for number in range(4):
        set_grads(scaled.param_groups[0]["params"], number, scale=2.0**10)
        step(scaled, scale=2.0**10)
        set_grads(plain.param_groups[0]["params"], number)
        plain.step()
    check_equal(tensors_of(plain), tensors_of(scaled))


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_skipped_step_changes_nothing(setting, first, masters):
    dtype = torch.float16 if masters else torch.float32
    params = make_params(dtype)
    optimizer = setting.ours(params, master_weights=masters)
    if not first:
        set_grads(params, 0)
        optimizer.step()
    before = copy_tensors(optimizer)
    set_grads(params, 1)
    params[0].grad[0, 0] = torch.inf
    step(optimizer, scale=4.0, skip=True)
    check_equal(before, tensors_of(optimizer))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_steps_after_a_skipped_first_one_equal_those_without_it(setting):
    skipping, plain = setting.ours(make_params()), setting.ours(make_params())
    set_grads(skipping.param_groups[0]["params"], 7)
    step(skipping, skip=True)
    for number in range(3):
        for optimizer in (skipping, plain):
            set_grads(optimizer.param_groups[0]["params"], number)
            optimizer.step()
    check_equal(tensors_of(plain), tensors_of(skipping))


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
def test_a_scaled_training_equals_the_unscaled_one_without_the_skipped_step(
    setting, kind
):
    scaled, plain = setting.ours(make_params()), setting.torchs(make_params())
    scaler = SCALERS[kind]("cpu", init_scale=2.0**8)
    for number in range(6):
        for optimizer in (scaled, plain):
            optimizer.zero_grad()
            params = optimizer.param_groups[0]["params"]
            loss = sum((param**2).sum() for param in params)
            factor = torch.inf if number == 3 else 1.0
            if optimizer is scaled:
                scaler.scale(loss * factor).backward()
                scaler.step(scaled)
                scaler.update()
            elif number != 3:
                loss.backward()
                plain.step()
    assert 2.0**7 == scaler.get_scale()
    check_equal(tensors_of(plain), tensors_of(scaled))


@pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
def test_clipping_by_our_scaler_equals_torchs_recipe(setting):
    def run(make, scaler):
        optimizer = make(make_params())
        params = optimizer.param_groups[0]["params"]
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(sum((param**2).sum() for param in params)).backward()
            if isinstance(scaler, ls.GradScaler):
                scaler.clip_grad_norm_(optimizer, 1.0)
            else:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
        return tensors_of(optimizer)

    ours = run(setting.ours, ls.GradScaler("cpu"))
    theirs = run(setting.torchs, torch.amp.GradScaler("cpu"))
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_unscaled_in_place_only_if_write_back_asks_for_it():
    for write_back in (False, True):
        params = make_params()
        optimizer = optim.AdamW(params, write_back=write_back)
        set_grads(params, 0, scale=8.0)
        before = [param.grad.clone() for param in params]
        step(optimizer, scale=8.0)
        divisor = 8.0 if write_back else 1.0
        for grad, param in zip(before, params, strict=True):
            assert torch.equal(grad / divisor, param.grad)


def test_a_skipped_step_writes_no_gradient_back():
    params = make_params()
    optimizer = optim.SGD(params, write_back=True)
    set_grads(params, 0)
    before = [param.grad.clone() for param in params]
    step(optimizer, scale=8.0, skip=True)
    assert all(map(torch.equal, before, [param.grad for param in params]))


def test_half_precision_parameters_without_masters_are_unscaled_in_float32():
    """2**-28 is zero in float16; Adam makes a third of the learning rate of it."""
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = optim.AdamW([param], lr=0.5, weight_decay=0.0)
    param.grad = torch.full((3,), 2.0**-14, dtype=torch.float16)
    step(optimizer, scale=2.0**14)
    expected = 1.0 - 0.5 * 2.0**-28 / (2.0**-28 + 1e-8)
    assert [torch.tensor(expected).half().item()] * 3 == param.tolist()
    assert torch.float16 == optimizer.state[param]["exp_avg"].dtype
