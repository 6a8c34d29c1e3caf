"""Any settings, any sequence of steps: our optimizers are torch's without the skips."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.optimizers import (  # noqa: E402
    Setting,
    check_equal,
    make_params,
    set_grads,
    tensors_of,
)
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

rates = st.sampled_from([0.0, 1e-4, 0.1, 1.5])
decays = st.sampled_from([0.0, 0.01, 0.5])
adam_settings = st.builds(
    Setting,
    st.sampled_from(["AdamW", "Adam"]),
    st.fixed_dictionaries(
        {
            "lr": rates,
            "betas": st.tuples(*[st.sampled_from([0.0, 0.5, 0.9, 0.999])] * 2),
            "eps": st.sampled_from([1e-8, 1e-3]),
            "weight_decay": decays,
            "amsgrad": st.booleans(),
            "maximize": st.booleans(),
        }
    ),
)
sgd_settings = st.builds(
    Setting,
    st.just("SGD"),
    st.fixed_dictionaries(
        {
            "lr": rates,
            "momentum": st.sampled_from([0.0, 0.5, 0.9]),
            "dampening": st.sampled_from([0.0, 0.3]),
            "weight_decay": decays,
            "maximize": st.booleans(),
        }
    ),
)
steps = st.lists(
    st.tuples(
        st.booleans(),  # skipped
        st.sampled_from([None, 2.0**-4, 1.0, 2.0**12]),  # the scale
        st.sets(st.integers(0, 3)),  # parameters without a gradient
    ),
    max_size=6,
)


def give_grads(params, number, scale, missing):
    set_grads(params, number, scale)
    for index in missing:
        params[index].grad = None


@settings(max_examples=60)
@given(setting=adam_settings | sgd_settings, steps=steps, masters=st.booleans())
def test_a_run_with_skips_equals_torchs_run_without_them(setting, steps, masters):
    dtype = torch.float16 if masters else torch.float32
    shapes = ((3,), (2, 2), (), (0,))
    params = make_params(dtype, shapes)
    ours = setting.ours(params, master_weights=masters)
    wide = [torch.nn.Parameter(p.detach().float()) for p in make_params(dtype, shapes)]
    theirs = setting.torchs(wide)
    for number, (is_skipped, scale, missing) in enumerate(steps):
        give_grads(params, number, scale or 1.0, missing)
        ours.grad_scale = None if scale is None else torch.tensor(scale)
        ours.found_inf = torch.tensor(2.0 if is_skipped else 0.0)  # any but 0 skips
        for one, other in zip(params, wide, strict=True):
            other.grad = None if one.grad is None else one.grad.float() / (scale or 1.0)
        ours.step()
        if not is_skipped:
            theirs.step()
    expected, actual = tensors_of(theirs), tensors_of(ours)
    if masters:
        for number, master in enumerate(ours.master_parameters()):
            assert torch.equal(master.to(dtype), actual[f"{number}"])
            actual[f"{number}"] = master.detach()
        actual = {key: x for key, x in actual.items() if key in expected}
    check_equal(expected, actual)
