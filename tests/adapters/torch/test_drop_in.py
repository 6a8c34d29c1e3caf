"""The contract of torch's GradScaler, kept by ours: the same calls on both classes."""

import inspect
import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import (  # noqa: E402
    both,
    init_scale_tensor,
    parameter,
    result_or_error,
)
from torch.amp.grad_scaler import OptState  # noqa: E402

import lossscale.torch as ls  # noqa: E402
from lossscale.errors import SettingError  # noqa: E402


def problem(gradient=1.0, fused=False, **settings):
    """Return one weight of 1 and an optimizer that subtracts its gradient."""
    weight = parameter([1.0])
    weight.grad = torch.tensor([gradient])
    return weight, torch.optim.SGD([weight], lr=1.0, fused=fused, **settings)


# Construction


def test_it_is_torchs_class_with_its_signature_and_more_keywords():
    torchs = inspect.signature(torch.amp.GradScaler).parameters
    ours = inspect.signature(ls.GradScaler).parameters
    assert issubclass(ls.GradScaler, torch.amp.GradScaler)
    assert [(p.name, p.kind, p.default) for p in torchs.values()] == [
        (p.name, p.kind, p.default) for p in list(ours.values())[: len(torchs)]
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(torchs) :])


@both
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"growth_factor": 1.0}, "The growth factor must be > 1.0."),
        ({"backoff_factor": 1.0}, "The backoff factor must be < 1.0."),
    ],
)
def test_factors_that_move_nothing_are_refused_in_torchs_words(cls, settings, text):
    with pytest.raises(AssertionError) as raised:
        cls("cpu", **settings)
    assert text == str(raised.value)
    assert cls("cpu", enabled=False, **settings).is_enabled() is False


@pytest.mark.parametrize(
    "settings",
    [{"init_scale": 0.0}, {"init_scale": math.inf}, {"backoff_factor": 0.0}],
)
def test_a_scale_that_could_never_work_is_refused_which_torch_does_not_do(settings):
    torch.amp.GradScaler("cpu", **settings)
    with pytest.raises(SettingError, match=next(iter(settings))):
        ls.GradScaler("cpu", **settings)


@both
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_it_warns_and_becomes_disabled(cls):
    text = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  "
    with pytest.warns(UserWarning, match=f"^{text}Disabling.$"):
        scaler = cls()
    assert scaler.is_enabled() is False
    assert scaler.get_scale() == 1.0


@both
def test_a_disabled_one_does_what_would_be_done_without_it(cls):
    scaler = cls("cpu", enabled=False)
    weight, optimizer = problem(2.0)
    outputs = [weight, (weight,)]
    assert outputs is scaler.scale(outputs)
    assert scaler.unscale_(optimizer) is None
    assert torch.tensor([2.0]) == weight.grad
    assert scaler.step(optimizer, closure=lambda: 7.0) == 7.0
    assert scaler.update() is None
    assert scaler.update(new_scale=3.0) is None
    assert (1.0, {}, 0) == (
        scaler.get_scale(),
        scaler.state_dict(),
        scaler._get_growth_tracker(),
    )
    assert scaler.load_state_dict({}) is None
    assert weight.item() == -1.0
    with pytest.raises(AttributeError):
        scaler.get_growth_factor()


# scale


@both
def test_the_state_is_made_by_the_first_scale_in_torchs_dtypes(cls):
    scaler = cls("cpu", init_scale=4.0)
    assert (None, None, 4.0) == (
        scaler._scale,
        scaler._growth_tracker,
        scaler.get_scale(),
    )
    scaler.scale(torch.ones(1))
    facts = [
        (t.dtype, t.shape, t.item()) for t in (scaler._scale, scaler._growth_tracker)
    ]
    assert [(torch.float32, (), 4.0), (torch.int32, (), 0)] == facts
    assert scaler._get_scale_async() is scaler._scale


@both
def test_nested_outputs_keep_their_types(cls):
    scaler = cls("cpu", init_scale=4.0)
    one = torch.ones(1)
    found = scaler.scale([one, (one * 2, [one * 3]), []])
    assert [
        torch.tensor([4.0]),
        (torch.tensor([8.0]), [torch.tensor([12.0])]),
        [],
    ] == found
    assert (list, tuple, list) == (type(found), type(found[1]), type(found[1][1]))


@both
def test_other_iterables_are_scaled_when_they_are_asked_for(cls):
    scaler = cls("cpu", init_scale=4.0)
    lazily = scaler.scale(torch.ones(1) * n for n in (1, 2))
    assert isinstance(lazily, map)
    assert scaler._scale is None
    assert [4.0, 8.0] == [tensor.item() for tensor in lazily]


@both
@pytest.mark.parametrize("outputs", [1.0, None, [torch.ones(1), 2]])
def test_what_is_no_tensor_is_refused(cls, outputs):
    with pytest.raises(ValueError, match=r"^outputs must be a Tensor or an iterable"):
        cls("cpu").scale(outputs)


@both
def test_the_scaled_loss_has_the_dtype_torch_gives_it(cls):
    scaler = cls("cpu", init_scale=4.0)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        scaled = scaler.scale(torch.ones((), dtype=dtype))
        expected = torch.amp.GradScaler("cpu").scale(torch.ones((), dtype=dtype))
        assert expected.dtype is scaled.dtype
    # A loss of one dimension and float16 stays float16; 0 dimensions do not.
    assert scaler.scale(torch.ones(1, dtype=torch.float16)).dtype is torch.float16


# The order of calls, and what is said when it is another


@both
@pytest.mark.parametrize(
    "name", ["unscale_", "step", "update", "_check_inf_per_device"]
)
def test_scale_comes_first(cls, name):
    _, optimizer = problem()
    scaler = cls("cpu")
    arguments = () if name == "update" else (optimizer,)
    text = (
        f"Attempted {name} but _scale is None.  This may indicate your script did not "
        "use scaler.scale(loss or outputs) earlier in the iteration."
    )
    found = result_or_error(lambda: getattr(scaler, name)(*arguments))
    assert (AssertionError, text) == found


@both
@pytest.mark.parametrize("fused", [False, True])
def test_calls_out_of_order_are_refused_in_torchs_words(cls, fused):
    scaler = init_scale_tensor(cls("cpu", init_scale=4.0))
    _, optimizer = problem(fused=fused)
    scaler.unscale_(optimizer)
    assert result_or_error(lambda: scaler.unscale_(optimizer)) == (
        RuntimeError,
        "unscale_() has already been called on this optimizer since the last update().",
    )
    scaler.step(optimizer)
    assert result_or_error(lambda: scaler.unscale_(optimizer)) == (
        RuntimeError,
        "unscale_() is being called after step().",
    )
    assert result_or_error(lambda: scaler.step(optimizer)) == (
        RuntimeError,
        "step() has already been called since the last update().",
    )
    scaler.update()
    scaler.unscale_(optimizer)


@both
def test_no_gradients_are_refused_in_torchs_words(cls):
    scaler = init_scale_tensor(cls("cpu"))
    weight, optimizer = problem()
    weight.grad = None
    scaler.unscale_(optimizer)
    assert {} == scaler._found_inf_per_device(optimizer)
    assert result_or_error(lambda: scaler.step(optimizer)) == (
        AssertionError,
        "No inf checks were recorded for this optimizer.",
    )
    assert result_or_error(scaler.update) == (
        AssertionError,
        "No inf checks were recorded prior to update.",
    )
    assert weight.item() == 1.0


@both
def test_float16_gradients_are_refused_and_left_alone(cls):
    scaler = init_scale_tensor(cls("cpu"))
    first = parameter([1.0])
    second = parameter([1.0], torch.float16)
    first.grad, second.grad = torch.ones(1), torch.ones(1, dtype=torch.float16)
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(
            ValueError, match=r"^Attempting to unscale FP16 gradients\."
        ):
            call(optimizer)
    assert (1.0, 1.0) == (first.grad.item(), second.grad.item())


@both
@pytest.mark.parametrize("fused", [False, True])
def test_the_stages_are_those_of_torch(cls, fused):
    scaler = init_scale_tensor(cls("cpu"))
    _, optimizer = problem(fused=fused)
    assert {} == dict(scaler._per_optimizer_states)
    stages = [scaler._per_optimizer_states[id(optimizer)]["stage"]]
    for call in (scaler.unscale_, scaler.step):
        call(optimizer)
        stages.append(scaler._per_optimizer_states[id(optimizer)]["stage"])
    assert [OptState.READY, OptState.UNSCALED, OptState.STEPPED] == stages
    assert {"stage", "found_inf_per_device"} == set(
        scaler._per_optimizer_states[id(optimizer)]
    )
    scaler.update()
    assert {} == dict(scaler._per_optimizer_states)
