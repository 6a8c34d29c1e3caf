"""Clipping in one read, compared with unscaling and clipping by torch."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import (  # noqa: E402
    BAD,
    FUSED,
    init_scale_tensor,
    parameter,
    result_or_error,
    tensors_of,
    ulps,
)

import lossscale.torch as ls  # noqa: E402
from lossscale.errors import SettingError, SettingTypeError  # noqa: E402

SIZES = (1, 7, 64, 1000)


def problem(name, fused, size, dtype=torch.float32):
    """Return weights with gradients of a size, still scaled by 2**10."""
    torch.manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(n, dtype=dtype)) for n in SIZES]
    for weight in weights:
        weight.grad = (torch.randn_like(weight) * size * 2.0**10).to(dtype)
    return weights, FUSED[name](weights, fused=fused)


def torchs_way(weights, optimizer, max_norm, norm_type):
    """Unscale, clip and step by torch; return the norm and the gradients clipped."""
    scaler = init_scale_tensor(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(weights, max_norm, norm_type)
    clipped = [weight.grad.clone() for weight in weights]
    scaler.step(optimizer)
    scaler.update()
    return norm, clipped


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_it_does_what_unscaling_and_clipping_do(name, fused, norm_type):
    for size, max_norm in ((1.0, 0.1), (1.0, 1e6), (1e-12, 1e-11), (1e25, 1.0)):
        oracle, plain = problem(name, fused, size)
        expected, clipped = torchs_way(oracle, plain, max_norm, norm_type)
        weights, optimizer = problem(name, fused, size)
        before = tensors_of([weight.grad for weight in weights])
        scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
        norm = scaler.clip_grad_norm_(optimizer, max_norm, norm_type=norm_type)
        written = tensors_of([weight.grad for weight in weights])
        assert fused == (before == written)
        if math.isfinite(expected):
            torch.testing.assert_close(expected, norm, rtol=1e-6, atol=0)
        if not fused and math.isfinite(expected):
            for one, weight in zip(clipped, weights, strict=True):
                torch.testing.assert_close(one, weight.grad, rtol=2e-6, atol=0)
        scaler.step(optimizer)
        scaler.update()
        if not math.isfinite(expected):
            continue  # torch's norm of such numbers is infinite, and it clips to 0
        assert scaler.last_step.applied
        for one, weight in zip(oracle, weights, strict=True):
            torch.testing.assert_close(one, weight, rtol=2e-6, atol=2e-6)


def test_the_norm_of_huge_gradients_is_no_false_alarm():
    """Their squares are beyond float32, and torch's norm of them is infinite."""
    weights, optimizer = problem("SGD", False, 1e25)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    before = [weight.detach().clone() for weight in weights]
    grads = [weight.grad.double() / 2.0**10 for weight in weights]
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    expected = torch.cat(grads).norm()
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    scaler.step(optimizer)
    for old, weight, gradient in zip(before, weights, grads, strict=True):
        wanted = old.double() - 0.5 * gradient / expected
        torch.testing.assert_close(
            wanted.float(), weight.detach(), rtol=1e-5, atol=1e-6
        )


def test_without_clipping_it_is_unscaling_to_the_bit():
    weights, optimizer = problem("SGD", False, 1.0)
    others, other = problem("SGD", False, 1.0)
    init_scale_tensor(torch.amp.GradScaler("cpu", init_scale=2.0**10)).unscale_(other)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    scaler.clip_grad_norm_(optimizer, 1e9)
    for expected, found in zip(others, weights, strict=True):
        assert ulps(expected.grad, found.grad) == 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_is_found_by_the_same_read(bad, norm_type, fused):
    weights, optimizer = problem("Adam", fused, 1.0)
    weights[2].grad[5] = bad
    before = tensors_of(weights)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type=norm_type)
    assert not norm.isfinite()
    scaler.step(optimizer)
    scaler.update()
    assert before == tensors_of(weights)
    reason = "nan" if math.isnan(bad) else "inf"
    assert (False, reason, 2.0**9) == (
        scaler.last_step.applied,
        scaler.last_step.reason,
        scaler.get_scale(),
    )
    assert len(scaler.last_step.nonfinite_names) == 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_clipped(dtype, fused):
    tolerance = {torch.float64: 1e-6, torch.bfloat16: 1e-2}[dtype]
    oracle, plain = problem("SGD", fused, 1.0, dtype)
    expected, _ = torchs_way(oracle, plain, 0.5, 2.0)
    weights, optimizer = problem("SGD", fused, 1.0, dtype)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    norm = scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    assert norm.item() == pytest.approx(expected.item(), rel=tolerance)
    for one, weight in zip(oracle, weights, strict=True):
        torch.testing.assert_close(one, weight, rtol=tolerance, atol=tolerance)


def test_mixed_empty_sparse_and_complex_gradients_are_one_norm():
    weights = [
        parameter([1.0]),
        parameter([[1.0, 1.0]], torch.float64),
        parameter([]),
        parameter([1.0 + 1.0j], torch.complex64),
        parameter([1.0, 1.0]),
    ]
    gradients = [
        torch.tensor([2.0]),
        torch.tensor([[4.0, 0.0]], dtype=torch.float64),
        torch.tensor([]),
        torch.tensor([3.0 - 4.0j], dtype=torch.complex64),
        torch.sparse_coo_tensor([[1, 1]], [1.0, 1.0], (2,), check_invariants=True),
    ]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient * 8.0
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    # 4 + 16 + 25 + 4 = 49
    assert scaler.clip_grad_norm_(optimizer, 3.5).item() == pytest.approx(7.0, rel=1e-6)
    scaler.step(optimizer)
    scaler.update()
    found = [weight.tolist() for weight in weights]
    expected = [[0.0], [[-1.0, 1.0]], [], [-0.5 + 3.0j], [1.0, 0.0]]
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


# The order of calls


@pytest.mark.parametrize("fused", [False, True])
def test_it_takes_the_place_of_unscaling(fused):
    weights, optimizer = problem("SGD", fused, 1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    text = "step() has already been called since the last update()."
    found = result_or_error(lambda: scaler.clip_grad_norm_(optimizer, 1.0))
    assert (RuntimeError, text) == found
    scaler.update()
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    scaler.clip_grad_norm_(optimizer, 1.0)


def test_it_needs_a_scale():
    _, optimizer = problem("SGD", False, 1.0)
    with pytest.raises(
        AssertionError, match=r"^Attempted clip_grad_norm_ but _scale is"
    ):
        ls.GradScaler("cpu").clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_after_unscaling_it_clips_what_is_there(fused):
    oracle, plain = problem("SGD", fused, 1.0)
    expected, _ = torchs_way(oracle, plain, 0.5, 2.0)
    weights, optimizer = problem("SGD", fused, 1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    scaler.unscale_(optimizer)
    assert expected == scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    assert tensors_of(oracle) == tensors_of(weights)


@pytest.mark.parametrize(
    "fused",
    [
        False,
        True,
    ],
)
def test_a_second_time_is_an_error_and_changes_nothing(fused):
    weight = parameter([1.0, 1.0])
    weight.grad = torch.tensor([3.0, 4.0]) * 8.0
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    scaler.clip_grad_norm_(optimizer, 2.5)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) has already"):
        scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    assert weight.tolist() == pytest.approx([-0.5, -1.0], rel=1e-5)


def test_gradients_without_a_norm_are_zero_and_stay():
    weight = parameter([1.0, 1.0])
    weight.grad = torch.zeros(2)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0.0
    assert [0.0, 0.0] == weight.grad.tolist()


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_norm_that_is_not_positive_is_refused(max_norm):
    _, optimizer = problem("SGD", False, 1.0)
    with pytest.raises(SettingError, match="max_norm must be a positive number"):
        init_scale_tensor(ls.GradScaler("cpu")).clip_grad_norm_(optimizer, max_norm)


def test_invalid_settings_are_refused():
    _, optimizer = problem("SGD", False, 1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    with pytest.raises(SettingTypeError, match="max_norm"):
        scaler.clip_grad_norm_(optimizer, "1")
    for wrong in (0, -1.0, math.nan):
        with pytest.raises(SettingError, match="norm_type must be a positive number"):
            scaler.clip_grad_norm_(optimizer, 1.0, norm_type=wrong)
    with pytest.raises(SettingError, match="the optimizer has 1 groups"):
        scaler.clip_grad_norm_(optimizer, [1.0, 2.0])
    for wrong in ("1", None):
        with pytest.raises(SettingTypeError, match="norm_type must be a positive"):
            scaler.clip_grad_norm_(optimizer, 1.0, norm_type=wrong)


def test_an_infinite_limit_measures_and_clips_nothing():
    """The usual way to have the norm logged: torch takes it."""
    weights, optimizer = problem("SGD", False, 1.0)
    expected = torch.cat([weight.grad for weight in weights]).norm() / 2.0**10
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    norm = scaler.clip_grad_norm_(optimizer, math.inf)
    torch.testing.assert_close(expected, norm, rtol=1e-6, atol=0)


def a_divisor_beyond_float32(fused):
    """Clip so hard, at so large a scale, that their quotient is beyond float32."""
    weight = parameter([1.0, 1.0])
    weight.grad = torch.tensor([3.0, 4.0]) * 2.0**120
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**120))
    scaler.clip_grad_norm_(optimizer, 5e-3)
    scaler.step(optimizer)
    scaler.update()
    return scaler, weight


def test_a_large_scale_and_a_hard_clip_are_no_overflow():
    scaler, weight = a_divisor_beyond_float32(fused=False)
    assert scaler.last_step.applied
    assert weight.tolist() == pytest.approx([0.997, 0.996], abs=1e-6)


def test_a_divisor_that_no_float32_can_hold_is_not_passed_on():
    scaler, weight = a_divisor_beyond_float32(fused=True)
    assert scaler.last_step.skipped
    assert [1.0, 1.0] == weight.tolist()


# The report


@pytest.mark.parametrize("fused", [False, True])
def test_the_report_has_the_norm_and_the_factor(fused):
    weight = parameter([1.0, 1.0])
    weight.grad = torch.tensor([3.0, 4.0]) * 8.0
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    scaler.clip_grad_norm_(optimizer, 2.5)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.norm == pytest.approx(5.0, rel=1e-7)
    assert scaler.last_step.clip == pytest.approx(0.5, rel=1e-6)


def test_disabled_it_is_torchs_clipping():
    weight = parameter([1.0, 1.0])
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ls.GradScaler("cpu", enabled=False)
    assert scaler.clip_grad_norm_(optimizer, 1.0) == 5.0
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8])


def test_float16_is_refused_where_it_would_be_written():
    weight = parameter([1.0], torch.float16)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    weight.grad = torch.tensor([8.0], dtype=torch.float16)
    with pytest.raises(ValueError, match="Attempting to unscale FP16"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    assert weight.grad.item() == 8.0


def test_the_norm_of_tiny_gradients_is_exact():
    """Their squares are subnormal in float32, of a few bits."""
    weight = parameter([0.0] * 4096)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=1.0))
    weight.grad = torch.full((4096,), 1.1e-22)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(
        64 * 1.1e-22, rel=1e-6
    )


# What `.grad` holds afterwards


def clipped_by_torch(weights, max_norm, norm_type=2.0):
    """Return unscaled gradients, clipped by torch, without touching the weights."""
    copies = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    for copy, weight in zip(copies, weights, strict=True):
        copy.grad = weight.grad / 2.0**10
    norm = torch.nn.utils.clip_grad_norm_(copies, max_norm, norm_type)
    return norm, [copy.grad for copy in copies]


def check_close(expected, weights):
    for gradient, weight in zip(expected, weights, strict=True):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["write_back", "unscale_"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_gradients_are_unscaled_and_clipped_if_asked_for(name, fused, way):
    weights, optimizer = problem(name, fused, 1.0)
    oracle, plain = problem(name, fused, 1.0)
    _, expected = clipped_by_torch(weights, 0.1)
    torchs_way(oracle, plain, 0.1, 2.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    scaler.clip_grad_norm_(optimizer, 0.1, write_back=way == "write_back")
    if way == "unscale_":
        scaler.unscale_(optimizer)
    check_close(expected, weights)
    scaler.unscale_(optimizer)  # once more changes nothing
    check_close(expected, weights)
    scaler.step(optimizer)
    scaler.update()
    for weight, other in zip(weights, oracle, strict=True):
        assert ulps(other, weight) <= 2
    assert scaler.last_step.applied


def test_clipping_by_value_after_a_fused_clip_needs_the_gradients_written_back():
    weights, optimizer = problem("SGD", True, 1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    scaler.clip_grad_norm_(optimizer, 1e6, write_back=True)
    torch.nn.utils.clip_grad_value_(weights, 0.01)
    before = [weight.detach().clone() for weight in weights]
    scaler.step(optimizer)
    for old, weight in zip(before, weights, strict=True):
        assert (old - weight).abs().max() <= 0.5 * 0.01 * (1 + 1e-4)


# Other norms, groups, and errors


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm_type", [1.0, 3.0, 0.5])
def test_any_norm_clips_as_torch_does(norm_type, fused):
    weights, optimizer = problem("SGD", fused, 1.0)
    expected_norm, expected = clipped_by_torch(weights, 0.1, norm_type)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    norm = scaler.clip_grad_norm_(optimizer, 0.1, norm_type=norm_type)
    torch.testing.assert_close(expected_norm, norm, rtol=1e-6, atol=0)
    check_close(expected, weights)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_every_group_is_clipped_by_its_own_norm(fused, enabled):
    weights, _ = problem("SGD", fused, 1.0)
    groups = [{"params": weights[:2]}, {"params": weights[2:]}]
    optimizer = FUSED["SGD"](groups, fused=fused)
    if not enabled:
        for weight in weights:
            weight.grad /= 2.0**10
    scale = 1.0 if enabled else 2.0**10
    expected = []
    for group, limit in zip((weights[:2], weights[2:]), (0.5, 0.1), strict=True):
        for weight in group:
            weight.grad *= scale
        expected.append(clipped_by_torch(group, limit))
        for weight in group:
            weight.grad /= scale
    scaler = init_scale_tensor(
        ls.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
    )
    norms = scaler.clip_grad_norm_(optimizer, [0.5, 0.1])
    for norm, (expected_norm, _) in zip(norms, expected, strict=True):
        torch.testing.assert_close(expected_norm, norm, rtol=1e-6, atol=0)
    check_close([grad for _, grads in expected for grad in grads], weights)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_a_norm_that_is_not_finite_is_an_error_if_asked_for(fused, bad, norm_type):
    weights, optimizer = problem("SGD", fused, 1.0)
    weights[2].grad[3] = bad
    before = [weight.grad.clone() for weight in weights]
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        scaler.clip_grad_norm_(
            optimizer, 1.0, norm_type=norm_type, error_if_nonfinite=True
        )
    if norm_type == 2.0:
        assert tensors_of(before) == tensors_of([weight.grad for weight in weights])
    scaler.step(optimizer)
    scaler.update()
    assert (True, 2.0**9) == (scaler.last_step.skipped, scaler.get_scale())


def test_unscaled_gradients_that_were_too_large_are_applied_once_they_are_clipped():
    weight = parameter([1.0, 1.0])
    optimizer = torch.optim.Adam([weight], lr=0.1)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=1.0))
    weight.grad = torch.tensor([3e18, 5e18])
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied
    assert torch.isfinite(optimizer.state[weight]["exp_avg_sq"]).all()
    # Squares beyond float32 have no norm that torch's function could clip by.
    weight.grad = torch.tensor([3e18, 3e25])
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert "headroom" == scaler.last_step.reason


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_holds_where_another_loss_writes_to_the_same_gradients(fused):
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    clipped = torch.optim.SGD([first], lr=0.1, fused=fused)
    other = torch.optim.SGD([second], lr=0.1)
    scaler = ls.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(first.sum() * 4).backward()
    scaler.clip_grad_norm_(clipped, 2.0)
    scaler.scale((second + 0 * first).sum()).backward()
    scaler.step(clipped)
    scaler.step(other)
    scaler.update()
    assert 0.8 == pytest.approx(first.item())
    assert 1024.0 == scaler.last_step.scale
    assert 0.5 == pytest.approx(scaler.last_step.clip)


def test_the_largest_magnitude_of_complex_gradients_is_their_absolute_value():
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = ls.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    weight.grad = 4.0 * torch.tensor([3 + 4j, 1 + 0j], dtype=torch.complex64)
    norm = scaler.clip_grad_norm_(optimizer, 2.0, norm_type=math.inf)
    assert 5.0 == norm
    expected = torch.tensor([1.2 + 1.6j, 0.4 + 0j], dtype=torch.complex64)
    torch.testing.assert_close(weight.grad, expected)


def test_an_overflow_after_unscaling_is_reported_at_the_scale_of_the_loss():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = ls.GradScaler("cpu", init_scale=1024.0, names=[("weight", weight)])
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(torch.ones(()))
    weight.grad[1] = math.inf
    scaler.step(optimizer)
    scaler.update()
    report = scaler.last_step
    assert ("inf", 1024.0, None) == (report.reason, report.scale, report.amax)
    assert {"weight": "inf"} == report.nonfinite
    assert [1.0, 1.0] == weight.tolist()


def test_a_gradient_too_large_after_unscaling_is_named_and_measured():
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.Adam([first, second], lr=0.1)
    named = [("first", first), ("second", second)]
    scaler = ls.GradScaler("cpu", init_scale=1024.0, names=named, measure_amax=True)
    scaler.scale((first + second).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(torch.ones(()))
    first.grad[1] = 1e20  # its square is beyond float32
    scaler.step(optimizer)
    scaler.update()
    report = scaler.last_step
    assert ("headroom", 1024.0) == (report.reason, report.scale)
    assert {"first": "headroom"} == report.nonfinite
    assert pytest.approx(1e20) == report.amax
    assert [1.0, 1.0] == first.tolist() == second.tolist()
