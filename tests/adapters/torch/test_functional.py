"""The functional API on torch: gradients of every kind, autograd, compile."""

import math
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402

import lossscale.numpy  # noqa: E402
import lossscale.torch as ls  # noqa: E402
from lossscale import Dynamic, Fixed, ScaleState, Signal  # noqa: E402
from lossscale.errors import GradientError, StructureError  # noqa: E402
from lossscale.torch import classic  # noqa: E402

MEASUREMENTS = ("nan", "amax", "norm", "zero_fraction", "subnormal_fraction")
compiled = pytest.mark.parametrize("mode", ["eager", "compiled"])


def state(scale):
    return ls.init(Fixed(scale))


def in_mode(mode, function):
    if mode == "eager":
        return function
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def sparse(indices, values, size):
    return torch.sparse_coo_tensor(
        torch.tensor([indices]), torch.tensor(values), (size,), check_invariants=True
    )


class NoSync(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises on every operation by which the host would learn a tensor's value."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = str(function)
        if "local_scalar_dense" in name or "nonzero" in name or "equal.default" in name:
            message = f"{name} waits for the device"
            raise AssertionError(message)
        return function(*arguments, **(keywords or {}))


# Losses


def test_plain_numbers_are_losses_too():
    for loss in (1, 1.0, np.float64(1.0)):
        scaled = ls.scale(loss, state(8.0))
        assert (8.0, torch.float32) == (scaled.item(), scaled.dtype)


def test_numbers_beyond_every_format_are_infinite_with_their_sign():
    assert math.inf == ls.scale(10**400, state(1.0)).item()
    assert -math.inf == ls.scale(-1e300, state(1.0)).item()


def test_a_loss_that_is_no_real_float_is_refused():
    for wrong in (torch.tensor(3), True, "3", 1j, torch.tensor(1j), np.ones(2)):
        with pytest.raises(GradientError, match="The loss is"):
            ls.scale(wrong, state(8.0))
    with pytest.raises(GradientError, match=r"The loss at \['b'\] is torch.int64"):
        ls.scale({"a": torch.tensor(1.0), "b": torch.tensor(1)}, state(8.0))


@compiled
def test_a_bfloat16_loss_is_scaled_in_float32_and_float64_stays(mode):
    run = in_mode(mode, ls.scale)
    half = run(torch.tensor(1.0, dtype=torch.bfloat16), state(3.0))
    double = run(torch.tensor(1.0, dtype=torch.float64), state(3.0))
    assert (3.0, torch.float32) == (half.item(), half.dtype)
    assert (3.0, torch.float64) == (double.item(), double.dtype)


def test_the_default_dtype_does_not_matter():
    torch.set_default_dtype(torch.float64)
    try:
        policy = Dynamic(init_scale=7.3, growth_factor=1.7, growth_interval=1)
        after = ls.update(policy, ls.init(policy), Signal(True))
        assert torch.float32 == after.scale.dtype == ls.scale(1.0, after).dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert np.float32(7.3) * np.float32(1.7) == after.scale.item()


def test_a_policys_own_first_state_is_taken_in_float32():
    policy = Dynamic(init_scale=7.3, growth_factor=1.7, growth_interval=1)
    first = policy.init()
    assert np.float32(7.3) == ls.scale(1.0, first).item()
    grads, _ = ls.unscale([torch.ones(1)], first)
    assert np.float32(1) / np.float32(7.3) == grads[0].item()
    after = ls.update(policy, first, Signal(True))
    assert np.float32(7.3) * np.float32(1.7) == after.scale.item()


# Gradients


@compiled
def test_bfloat16_gradients_become_float32(mode):
    values = torch.randn(64, generator=torch.manual_seed(0)).to(torch.bfloat16)
    run = in_mode(mode, ls.unscale)
    grads, signal = run([values], state(7.3))
    expected = values.float().numpy() * (np.float32(1) / np.float32(7.3))
    assert torch.float32 == grads[0].dtype
    assert expected.tolist() == grads[0].tolist()
    assert signal.finite


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@compiled
def test_one_bad_bfloat16_value_makes_the_step_bad(mode, bad):
    values = torch.ones(13, dtype=torch.bfloat16)
    values[7] = bad
    assert not in_mode(mode, ls.unscale)([values], state(2.0))[1].finite


@compiled
def test_gradients_of_any_strides_are_taken_and_none_is_changed(mode):
    base = torch.arange(24.0).reshape(4, 6)
    views = [base.T, base[:, ::2], base[1].expand(3, 6), base[0, 0], base[:0]]
    before = [view.clone() for view in views]
    grads, signal = in_mode(mode, ls.unscale)(views, state(4.0))
    for gradient, view in zip(grads, before, strict=True):
        assert (view.numpy() / 4).tolist() == gradient.tolist()
    assert all(map(torch.equal, before, views))
    assert signal.finite


def test_a_sparse_gradient_stays_sparse_and_is_added_up_first():
    gradient = sparse([1, 1, 3], [8.0, 4.0, 2.0], 5)
    grads, signal = ls.unscale([gradient], state(2.0))
    assert torch.sparse_coo is grads[0].layout
    assert grads[0].is_coalesced()
    assert [[1, 3]] == grads[0].indices().tolist()
    assert [6.0, 1.0] == grads[0].values().tolist()
    assert [8.0, 4.0, 2.0] == gradient._values().tolist()
    assert signal.finite


def test_sparse_entries_whose_sum_overflows_make_the_step_bad():
    gradient = sparse([1, 1], [3e38, 3e38], 5)
    assert not ls.unscale([gradient], state(1.0))[1].finite


def test_sparse_float16_entries_are_added_up_in_float32():
    gradient = sparse([1, 1], [6e4, 6e4], 5).to(torch.float16)
    grads, signal = ls.unscale([gradient], state(4.0))
    assert [2 * float(np.float16(6e4)) / 4] == grads[0].values().tolist()
    assert signal.finite


def test_a_sparse_gradient_without_entries_is_finite():
    gradient = torch.sparse_coo_tensor((3, 2), check_invariants=True)
    grads, signal = ls.unscale([gradient], state(2.0), measure=MEASUREMENTS)
    assert (3, 2) == tuple(grads[0].shape)
    assert signal.finite
    assert (
        0.0 == signal.amax.item() == signal.norm.item() == signal.zero_fraction.item()
    )


@compiled
def test_complex_gradients_that_are_views_are_taken(mode):
    gradient = torch.tensor([[8 + 4j, 2.0], [0.0, -2j]]).conj().T
    grads, signal = in_mode(mode, ls.unscale)([gradient], state(2.0))
    assert (np.asarray(gradient.resolve_conj()) / 2).tolist() == grads[0].tolist()
    assert signal.finite


def test_the_other_part_of_an_infinite_complex_number_stays():
    grads, signal = ls.unscale([torch.tensor([complex(math.inf, 4)])], state(2.0))
    assert [complex(math.inf, 2)] == grads[0].tolist()
    assert not signal.finite


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(2, dtype=torch.int8), torch.ones(2).to(torch.float8_e5m2), 1.0, "w"],
    ids=["int8", "float8", "number", "text"],
)
def test_what_is_no_gradient_is_named(wrong):
    with pytest.raises(GradientError, match=r"gradient at \['a'\]\[1\] is"):
        ls.unscale({"a": [torch.ones(1), wrong]}, state(1.0))


def test_nests_keep_their_kinds():
    grads = OrderedDict(b=(torch.ones(1), [None]), a={})
    unscaled, _ = ls.unscale(grads, state(2.0))
    assert OrderedDict is type(unscaled)
    assert ["b", "a"] == list(unscaled)
    assert (tuple, [None], {}) == (
        type(unscaled["b"]),
        unscaled["b"][1],
        unscaled["a"],
    )


def test_a_scale_whose_inverse_is_zero_makes_the_step_bad():
    broken = ScaleState(torch.tensor(math.inf), torch.tensor(0), torch.tensor(0))
    assert not ls.unscale([torch.ones(2)], broken)[1].finite


def test_the_largest_scale_still_unscales():
    largest = float(np.finfo(np.float32).max)
    grads, signal = ls.unscale([torch.tensor([largest])], state(largest))
    expected = np.float32(largest) * (np.float32(1) / np.float32(largest))
    assert expected == grads[0].item()
    assert signal.finite


# Measurements


@compiled
@pytest.mark.parametrize("seed", range(5))
def test_measurements_are_those_of_the_numpy_adapter(seed, mode):
    rng = np.random.default_rng(seed)
    grads = []
    for dtype in ("float16", "float32", "float64")[: 2 + seed % 2]:
        with np.errstate(all="ignore"):
            values = (10.0 ** rng.uniform(-50, 6, (5, 7))).astype(dtype)
        values[rng.random((5, 7)) < 0.2] = 0
        values[rng.random((5, 7)) < 0.1] = rng.choice([np.inf, -np.inf])
        values[0, 0] = np.nan if seed == 3 else -1.5
        grads.append(values)
    run = in_mode(mode, lambda tree, s: ls.unscale(tree, s, measure=MEASUREMENTS))
    _, signal = run([torch.from_numpy(values) for values in grads], state(8.0))
    reference = lossscale.numpy.init(Fixed(8.0))
    _, expected = lossscale.numpy.unscale(grads, reference, measure=MEASUREMENTS)
    assert bool(expected.finite) == signal.finite.item()
    for name in MEASUREMENTS:
        want, have = getattr(expected, name), getattr(signal, name).numpy()
        assert want.dtype == have.dtype, name
        np.testing.assert_allclose(have, want, rtol=1e-6 if name == "norm" else 0)


def test_a_norm_beyond_float32_sums_is_still_finite():
    _, signal = ls.unscale([torch.full((4,), 1e25)], state(1.0), measure="norm")
    assert np.float32(2e25) == signal.norm.item()


def test_subnormal_bfloat16_values_are_counted():
    tiny = torch.finfo(torch.bfloat16).smallest_normal
    gradient = torch.tensor([tiny, tiny / 2, -tiny / 2, 0.0], dtype=torch.bfloat16)
    _, signal = ls.unscale([gradient], state(1.0), measure=MEASUREMENTS)
    assert (0.5, 0.25) == (
        signal.subnormal_fraction.item(),
        signal.zero_fraction.item(),
    )


def test_a_complex_number_is_measured_as_two():
    gradient = torch.tensor([3 + 4j, 0.0, complex(0, -7)])
    _, signal = ls.unscale([gradient], state(1.0), measure=MEASUREMENTS)
    assert np.float32(math.sqrt(9 + 16 + 49)) == signal.norm.item()
    assert (7.0, 0.5) == (signal.amax.item(), signal.zero_fraction.item())


def test_a_nest_without_gradients_measures_zero():
    _, signal = ls.unscale([None, {}], state(1.0), measure=MEASUREMENTS)
    values = [getattr(signal, name).item() for name in MEASUREMENTS]
    assert [False, 0.0, 0.0, 0.0, 0.0] == values


# Flags


@pytest.mark.parametrize(
    "wrong",
    [
        math.nan,
        None,
        "False",
        Signal(finite=True),
        [True],
        np.array([True, False]),
        torch.tensor([True, False]),
        torch.tensor(1j),
    ],
    ids=str,
)
def test_what_is_no_flag_is_refused(wrong):
    with pytest.raises(GradientError, match="one boolean"):
        ls.select(wrong, [torch.ones(1)], [torch.ones(1)])
    with pytest.raises(GradientError, match="one boolean"):
        ls.update(Dynamic(), state(8.0), Signal(wrong))
    with pytest.raises(GradientError, match="one boolean"):
        classic.DynamicLossScale().update_from_finite(wrong)


def test_signals_of_any_boolean_kind_are_taken():
    for true in (True, np.True_, 1, torch.tensor(True), torch.tensor(1)):
        after = ls.update(Dynamic(), ls.init(Dynamic()), Signal(true))
        assert (65536.0, 1, 0) == tuple(value.item() for value in after)


def test_a_flag_of_nan_that_only_the_device_knows_counts_as_an_overflow():
    after = ls.update(Dynamic(), ls.init(Dynamic()), Signal(torch.tensor(math.nan)))
    assert 32768.0 == after.scale.item()


# Select


def test_select_with_a_python_boolean_copies_nothing():
    new, old = {"w": torch.ones(2), "n": 7}, {"w": torch.zeros(2), "n": 6}
    assert new is ls.select(True, new, old)
    assert old is ls.select(np.False_, new, old)


@compiled
def test_select_keeps_dtypes_and_the_order_of_keys_does_not_matter(mode):
    kinds = torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64
    new = {str(kind): torch.ones(3).to(kind) for kind in kinds}
    old = {name: torch.zeros_like(new[name]) for name in reversed(new)}
    run = in_mode(mode, ls.select)
    for finite, expected in ((True, new), (False, old)):
        chosen = run(torch.tensor(finite), new, old)
        assert list(new) == list(chosen)
        for name, value in chosen.items():
            assert expected[name].dtype == value.dtype
            assert expected[name].tolist() == value.tolist()


def test_what_is_no_tensor_must_be_the_same_in_both():
    shared = object()
    new = [torch.ones(1), 0.9, "adam", shared]
    chosen = ls.select(torch.tensor(False), new, [torch.zeros(1), 0.9, "adam", shared])
    assert [0.0, 0.9, "adam", shared] == [chosen[0].item(), *chosen[1:]]
    with pytest.raises(StructureError, match=r"at \['step'\] are 7 and 6.*bool"):
        ls.select(torch.tensor(False), {"step": 7}, {"step": 6})


def test_select_refuses_leaves_that_are_not_alike():
    for other in (torch.ones(3), torch.ones(2).double(), torch.ones(2).to_sparse()):
        with pytest.raises(StructureError, match="differ"):
            ls.select(torch.tensor(True), [torch.ones(2)], [other])


def test_select_chooses_sparse_leaves():
    new, old = sparse([1], [1.0], 3), sparse([0, 2], [2.0, 2.0], 3)
    assert ls.select(torch.tensor(False), [new], [old])[0] is old


# Autograd, torch.func, devices


def test_nothing_waits_for_the_device():
    policy = Dynamic(growth_interval=1)
    first = ls.init(policy)
    weights, grads = torch.ones(3), [torch.ones(3), torch.ones(2, dtype=torch.half)]
    with NoSync():
        ls.scale(torch.tensor(1.0), first)
        unscaled, signal = ls.unscale(grads, first, measure=MEASUREMENTS)
        ls.select(signal.finite, [weights - unscaled[0]], [weights])
        ls.update(policy, first, signal)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@on_gpu
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_nothing_waits_for_a_gpu(home):
    policy = Dynamic(growth_interval=1)
    first = ls.init(policy, device=home)
    weights = torch.ones(3, device="cuda")
    grads = [weights.clone(), torch.ones(2, dtype=torch.half, device="cuda")]
    torch.cuda.set_sync_debug_mode("error")
    try:
        ls.scale(weights.sum(), first)
        unscaled, signal = ls.unscale(grads, first, measure=MEASUREMENTS)
        kept = ls.select(signal.finite, [weights - unscaled[0]], [weights])
        after = ls.update(policy, first, signal)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {"cuda"} == {value.device.type for value in (*after, *kept)}
    assert 2.0**17 == after.scale.item()


@on_gpu
def test_a_state_on_a_gpu_serves_gradients_on_the_cpu_too():
    first = ls.init(Fixed(4.0), device="cuda")
    grads = [torch.ones(2), torch.full((2,), math.inf, device="cuda")]
    unscaled, signal = ls.unscale(grads, first)
    assert [0.25, 0.25] == unscaled[0].tolist()
    assert not signal.finite


def test_the_device_of_a_state_is_the_one_given():
    assert {"meta"} == {x.device.type for x in ls.init(Dynamic(), device="meta")}


def test_a_state_on_the_cpu_follows_the_signal():
    finite = torch.ones((), dtype=torch.bool, device="meta")
    after = ls.update(Dynamic(), ls.init(Dynamic()), Signal(finite))
    assert {"meta"} == {value.device.type for value in after}


def test_gradients_of_several_devices_are_checked_on_the_accelerator():
    grads = [torch.ones(2), torch.ones(2, device="meta")]
    unscaled, signal = ls.unscale(grads, state(2.0), measure=MEASUREMENTS)
    assert ["cpu", "meta"] == [gradient.device.type for gradient in unscaled]
    assert {"meta"} == {getattr(signal, n).device.type for n in ("finite", "norm")}


def test_a_gradient_penalty_is_differentiated_through_both_functions():
    weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    current = state(1024.0)
    scaled = ls.scale((weight**3).sum(), current)
    (gradient,) = torch.autograd.grad(scaled, weight, create_graph=True)
    ([unscaled], _) = ls.unscale([gradient], current)
    unscaled.square().sum().backward()
    # The derivative of (3 w^2)^2 is 36 w^3.
    assert [36 * 8.0, 36 * 27.0] == weight.grad.tolist()


def test_complex_and_sparse_unscaling_can_be_differentiated():
    wave = torch.tensor([1 + 2j], requires_grad=True)
    ([unscaled], _) = ls.unscale([wave * 1.0], state(4.0))
    torch.view_as_real(unscaled).sum().backward()
    assert [0.25 + 0.25j] == wave.grad.tolist()
    dense = torch.ones(3, requires_grad=True)
    ([unscaled], _) = ls.unscale([dense.to_sparse()], state(4.0))
    unscaled.to_dense().sum().backward()
    assert [0.25] * 3 == dense.grad.tolist()


def test_the_functions_work_inside_torch_func():
    current = state(8.0)

    def loss(weight, x):
        return ls.scale((weight * x).sum(), current)

    def step(x):
        gradient = torch.func.grad(loss)(torch.ones(3), x)
        ([unscaled], signal) = ls.unscale([gradient], current)
        return unscaled, signal.finite

    batch = torch.tensor([[1.0, 2.0, 3.0], [4.0, math.inf, 6.0]])
    unscaled, finite = torch.vmap(step)(batch)
    assert batch.tolist() == unscaled.tolist()
    assert [True, False] == finite.tolist()


def test_a_vector_of_scales_moves_in_vmap_and_as_it_is():
    policy = Dynamic(growth_interval=1)
    scales = ScaleState(torch.tensor([4.0, 4.0]), *torch.zeros(2, 2, dtype=torch.int32))
    flags = torch.tensor([True, False])
    together = ls.update(policy, scales, Signal(flags))
    mapped = torch.vmap(lambda s, f: ls.update(policy, s, Signal(f)))(scales, flags)
    assert [8.0, 2.0] == together.scale.tolist() == mapped.scale.tolist()


def test_a_whole_training_step_is_one_graph():
    policy = Dynamic(init_scale=2.0**20, growth_interval=3)

    def step(weight, current, x):
        def loss(weight):
            return ls.scale((weight.half() * x).sum().square(), current)

        gradient = torch.func.grad(loss)(weight)
        ([unscaled], signal) = ls.unscale([gradient], current)
        kept = ls.select(signal.finite, [weight - 0.01 * unscaled], [weight])
        return kept[0], ls.update(policy, current, signal)

    run = in_mode("compiled", step)
    weight, current = torch.ones(4), ls.init(policy)
    scales = []
    for _ in range(30):
        weight, current = run(weight, current, torch.ones(4, dtype=torch.half))
        assert weight.isfinite().all()
        scales.append(current.scale.item())
    assert scales[0] < 2.0**20
    assert weight.abs().sum().item() < 1.0
