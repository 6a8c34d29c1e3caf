"""float16 and bfloat16 parameters with float32 masters."""

import io

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
from helpers.rounding import round_stochastically  # noqa: E402

from lossscale.errors import SettingError, StateError  # noqa: E402
from lossscale.torch import optim  # noqa: E402

HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def make_with_float32_twin(setting, dtype, **more):
    """Return an optimizer with masters, and torch's on the same float32 weights."""
    ours = setting.ours(make_params(dtype), master_weights=True, **more)
    wide = [torch.nn.Parameter(p.detach().float()) for p in make_params(dtype)]
    return ours, setting.torchs(wide)


def step_together(ours, theirs, steps, start=0):
    """Step both on the same gradients: torch's on those of ours, cast to float32."""
    half, wide = (x.param_groups[0]["params"] for x in (ours, theirs))
    for number in range(start, start + steps):
        set_grads(half, number)
        for one, other in zip(half, wide, strict=True):
            other.grad = one.grad.float()
        ours.step()
        theirs.step()


@HALF
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_masters_equal_the_float32_optimizer_on_the_cast_gradients(setting, dtype):
    ours, theirs = make_with_float32_twin(setting, dtype)
    step_together(ours, theirs, 8)
    wide = theirs.param_groups[0]["params"]
    for param, master, expected in zip(
        ours.param_groups[0]["params"], ours.master_parameters(), wide, strict=True
    ):
        assert torch.equal(expected, master)
        assert torch.equal(expected.to(dtype), param)
        state = {
            key: value
            for key, value in ours.state[param].items()
            if key != "master_param"
        }
        check_equal(dict(theirs.state.get(expected, {})), state)


def test_small_updates_add_up_in_the_master_and_reach_the_weight():
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    with_master = optim.SGD([weight], lr=2.0**-13, master_weights=True)
    lost = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    without = optim.SGD([lost], lr=2.0**-13)
    for _ in range(16):
        for param, optimizer in ((weight, with_master), (lost, without)):
            param.grad = torch.ones_like(param)
            optimizer.step()
    assert 1.0 == lost.item()
    assert 1.0 - 2.0**-9 == weight.item()


def test_float32_and_float64_parameters_have_no_master():
    for dtype in (torch.float32, torch.float64):
        params = make_params(dtype)
        optimizer = optim.AdamW(params, master_weights=True)
        set_grads(params, 0)
        optimizer.step()
        assert not any("master_param" in state for state in optimizer.state.values())
        masters = list(optimizer.master_parameters())
        assert all(
            master is param for master, param in zip(masters, params, strict=True)
        )


@pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
def test_masters_are_there_before_the_first_step(setting):
    early, late = (
        setting.ours(make_params(torch.float16), master_weights=True) for _ in range(2)
    )
    masters = list(early.master_parameters())
    assert {torch.float32} == {master.dtype for master in masters}
    for optimizer in (early, late):
        set_grads(optimizer.param_groups[0]["params"], 0)
        optimizer.step()
    check_equal(tensors_of(late), tensors_of(early))


# -- state dicts -----------------------------------------------------------------------


def save_and_load(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@HALF
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_resumed_training_equals_the_uninterrupted_one(setting, dtype):
    def make():
        return setting.ours(make_params(dtype), master_weights=True)

    whole, first, second = make(), make(), make()
    for optimizer in (whole, first):
        for number in range(3):
            set_grads(optimizer.param_groups[0]["params"], number)
            optimizer.step()
    for to, source in zip(
        *(x.param_groups[0]["params"] for x in (second, first)), strict=True
    ):
        to.data.copy_(source)
    second.load_state_dict(save_and_load(first.state_dict()))
    check_equal(tensors_of(first), tensors_of(second))
    for optimizer in (whole, second):
        for number in range(3, 6):
            set_grads(optimizer.param_groups[0]["params"], number)
            optimizer.step()
    check_equal(tensors_of(whole), tensors_of(second))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_state_dicts_of_torch_and_ours_load_into_each_other(setting):
    def make(kind):
        return getattr(setting, kind)(make_params())

    for source, target in (("ours", "torchs"), ("torchs", "ours")):
        uninterrupted, other = make(source), make(target)
        params = uninterrupted.param_groups[0]["params"]
        for number in range(3):
            set_grads(params, number)
            uninterrupted.step()
        for to, source_param in zip(
            other.param_groups[0]["params"], params, strict=True
        ):
            to.data.copy_(source_param)
        other.load_state_dict(save_and_load(uninterrupted.state_dict()))
        for optimizer in (uninterrupted, other):
            set_grads(optimizer.param_groups[0]["params"], 9)
            optimizer.step()
        check_equal(tensors_of(uninterrupted), tensors_of(other))


def test_a_state_dict_of_ours_has_torchs_layout():
    def state_dict(kind):
        params = make_params()
        optimizer = kind.AdamW(params, amsgrad=True)
        set_grads(params, 0)
        optimizer.step()
        return optimizer.state_dict()

    ours, theirs = state_dict(optim), state_dict(torch.optim)
    assert theirs["param_groups"] == ours["param_groups"]
    for key, expected in theirs["state"].items():
        check_equal(expected, ours["state"][key])


def test_a_float32_state_goes_on_with_float16_weights_and_masters():
    setting = ONE_OF_EACH[0]
    wide = setting.torchs(make_params())
    params = wide.param_groups[0]["params"]
    set_grads(params, 0)
    wide.step()
    half = [torch.nn.Parameter(param.detach().half()) for param in params]
    optimizer = setting.ours(half, master_weights=True)
    optimizer.load_state_dict(wide.state_dict())
    for param, source in zip(half, params, strict=True):
        assert torch.equal(
            wide.state[source]["exp_avg"], optimizer.state[param]["exp_avg"]
        )
    set_grads(half, 1)
    optimizer.step()
    assert all(
        torch.float32 == state["master_param"].dtype
        for state in optimizer.state.values()
    )


def test_a_state_with_masters_goes_on_with_float32_weights():
    setting = ONE_OF_EACH[0]
    half = setting.ours(make_params(torch.float16), master_weights=True)
    set_grads(half.param_groups[0]["params"], 0)
    half.step()
    wide = [torch.nn.Parameter(x.detach().clone()) for x in half.master_parameters()]
    optimizer = setting.ours(wide, master_weights=True)
    optimizer.load_state_dict(half.state_dict())
    for param, source in zip(wide, half.param_groups[0]["params"], strict=True):
        expected = dict(half.state[source])
        del expected["master_param"]
        check_equal(expected, optimizer.state[param])


def test_a_loaded_state_is_a_copy():
    params = make_params()
    source = optim.AdamW(params)
    set_grads(params, 0)
    source.step()
    before = copy_tensors(source)
    target = optim.AdamW(make_params())
    target.load_state_dict(source.state_dict())
    set_grads(target.param_groups[0]["params"], 1)
    target.step()
    moments = [name for name in before if name.endswith(("exp_avg", "exp_avg_sq"))]
    for name in moments:
        assert torch.equal(before[name], tensors_of(source)[name])


def test_a_state_of_another_shape_is_refused_and_changes_nothing():
    source = optim.AdamW(make_params(shapes=[(3,)]))
    set_grads(source.param_groups[0]["params"], 0)
    source.step()
    target = optim.AdamW(make_params(shapes=[(4,)]))
    set_grads(target.param_groups[0]["params"], 0)
    target.step()
    before = copy_tensors(target)
    with pytest.raises(StateError, match=r"shape \(3,\).*\(4,\)"):
        target.load_state_dict(source.state_dict())
    check_equal(before, tensors_of(target))


class WithAverage(optim.AdamW):
    """Keeps a number of its own for each parameter."""

    def step(self, closure=None):
        loss = super().step(closure)
        for state in self.state.values():
            state["average"] = torch.tensor(0.5)
        return loss


def test_what_a_subclass_keeps_may_have_another_shape():
    source, target = (WithAverage(make_params(shapes=[(3,)])) for _ in range(2))
    set_grads(source.param_groups[0]["params"], 0)
    source.step()
    target.load_state_dict(source.state_dict())
    (state,) = target.state.values()
    assert 0.5 == state["average"].item()


def test_hooks_of_loading_see_the_state_in_its_dtypes():
    source = optim.AdamW(make_params(torch.float16), master_weights=True)
    set_grads(source.param_groups[0]["params"], 0)
    source.step()
    target = optim.AdamW(make_params(torch.float16), master_weights=True)
    seen = []

    def clear_first(_, state_dict):
        return {**state_dict, "state": {}}

    target.register_load_state_dict_post_hook(lambda opt: seen.append(len(opt.state)))
    target.load_state_dict(source.state_dict())
    assert [len(source.state)] == seen
    assert {torch.float32} == {s["exp_avg"].dtype for s in target.state.values()}
    target.register_load_state_dict_pre_hook(clear_first)
    target.load_state_dict(source.state_dict())
    assert not target.state


# -- moments in bfloat16 ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_moments_are_rounded_to_bfloat16_after_each_step(name, dtype):
    """To nearest, and second moments to such that the mean stays."""
    params = make_params(dtype)
    optimizer = getattr(optim, name)(
        params, 0.01, master_weights=True, moments_dtype=torch.bfloat16, amsgrad=True
    )
    wide = [torch.nn.Parameter(p.detach().float()) for p in make_params(dtype)]
    reference = getattr(torch.optim, name)(wide, 0.01, amsgrad=True)
    for number in range(4):
        set_grads(params, number)
        for param, other in zip(params, wide, strict=True):
            other.grad = param.grad.float()
        optimizer.step()
        reference.step()
        for param, other in zip(params, wide, strict=True):
            moments = reference.state[other]
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                assert torch.bfloat16 == optimizer.state[param][key].dtype
                rounded = moments[key].bfloat16().float()
                if key == "exp_avg_sq":
                    values = moments[key].numpy()
                    found = round_stochastically(values, number + 1)
                    rounded = torch.tensor(found).view_as(moments[key])
                moments[key].copy_(rounded)
                assert torch.equal(moments[key], optimizer.state[param][key].float())
    for master, expected in zip(optimizer.master_parameters(), wide, strict=True):
        assert torch.equal(expected, master)


def test_bfloat16_moments_are_saved_and_loaded():
    def make():
        return optim.AdamW(make_params(), moments_dtype=torch.bfloat16)

    first, second = make(), make()
    set_grads(first.param_groups[0]["params"], 0)
    first.step()
    second.load_state_dict(save_and_load(first.state_dict()))
    assert {torch.bfloat16} == {s["exp_avg"].dtype for s in second.state.values()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, "bfloat16"], ids=str)
def test_other_dtypes_of_moments_are_refused(dtype):
    with pytest.raises(SettingError, match="moments_dtype must be"):
        optim.AdamW(make_params(), moments_dtype=dtype)


# -- float32 weights -------------------------------------------------------------------


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )


def test_float32_weights_are_exported_in_one_call():
    model = make_model().half()
    optimizer = optim.AdamW(model.parameters(), master_weights=True)
    set_grads(list(model.parameters()), 0)
    optimizer.step()
    exported = optimizer.float32_state_dict(model)
    plain = make_model()
    plain.load_state_dict(exported)
    for param, master in zip(
        plain.parameters(), optimizer.master_parameters(), strict=True
    ):
        assert torch.equal(master, param)
    assert model.state_dict().keys() == exported.keys()
    assert torch.int64 == exported["1.num_batches_tracked"].dtype
    exported["0.weight"].zero_()
    assert next(optimizer.master_parameters()).count_nonzero()


def test_float32_weights_are_loaded_into_masters_without_rounding():
    source = make_model()
    half = make_model().half()
    optimizer = optim.SGD(half.parameters(), lr=0.1, master_weights=True)
    optimizer.load_float32_state_dict(half, source.state_dict())
    for master, param, expected in zip(
        optimizer.master_parameters(),
        half.parameters(),
        source.parameters(),
        strict=True,
    ):
        assert torch.equal(expected, master)
        assert torch.equal(expected.half(), param)


def test_masters_are_reset_to_parameters_that_were_written_by_hand():
    (param,) = make_params(torch.float16, shapes=[(3,)])
    optimizer = optim.SGD([param], lr=0.5, master_weights=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data.fill_(2.0)
    optimizer.reset_masters()
    optimizer.step()
    assert [1.5] * 3 == param.tolist()
