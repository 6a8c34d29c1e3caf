"""Random faults in random places: weights, state and scale stay sound."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import BAD, init_scale_tensor, result_or_error, snapshot  # noqa: E402
from hypothesis import event, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

import lossscale.torch as ls  # noqa: E402

NUMBERS = (0.0, -0.0, 1.0, -2.5, 65504.0, 3e38, -3e38, 1e-40, 1e-38, 7e-46, 1e15)
DTYPES = (
    torch.float32,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
)
LAYOUTS = ("plain", "plain", "transposed", "gaps", "empty", "sparse", "none")
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {}, True),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, True),
    "Adam": (torch.optim.Adam, {}, True),
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}, True),
    "Adagrad": (torch.optim.Adagrad, {}, True),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5}, False),
}


@st.composite
def gradients(draw, dtypes=DTYPES, layouts=LAYOUTS, numbers=(*NUMBERS, *BAD)):
    """Return a weight and what its scaled gradient is, in one of many layouts."""
    dtype, layout = draw(st.sampled_from(dtypes)), draw(st.sampled_from(layouts))
    values = draw(st.lists(st.sampled_from(numbers), min_size=4, max_size=4))
    gradient = torch.tensor(values, dtype=torch.float64)
    # A float64 that does not fit turns into an infinity, which is one of the faults.
    if dtype.is_complex:
        gradient = torch.complex(gradient.flip(0), gradient).to(dtype)
    gradient = gradient.to(dtype).reshape(2, 2)
    if layout == "transposed":
        gradient = gradient.t()
    elif layout == "gaps":
        gradient = torch.stack([gradient, gradient], dim=-1)[..., 0]
    elif layout == "empty":
        gradient = gradient[:0]
    elif layout == "sparse":
        gradient = torch.sparse_coo_tensor(
            torch.tensor([[0, 1, 1]]),
            gradient[[0, 1, 0]],
            (2, 2),
            check_invariants=True,
        )
    weight = torch.nn.Parameter(torch.ones(gradient.shape, dtype=dtype))
    return weight, None if layout == "none" else gradient


def is_sound(gradient, scale):
    """Whether a gradient is finite, as it comes and unscaled: asked of float64."""
    dense = gradient.to_dense()
    wide = dense.to(torch.complex128 if dense.is_complex() else torch.float64)
    inverse = torch.tensor(scale).double().reciprocal().float().double()
    back = (wide * inverse).to(dense.dtype)
    if dense.is_complex():
        back = torch.view_as_real(back)
    return bool(dense.isfinite().all() and back.isfinite().all())


scales = st.one_of(
    st.sampled_from((2.0**16, 1.0, 1e-37, 1e38, 2.0**-126, 3.7)),
    st.floats(min_value=2.0**-126, max_value=2.0**126, width=32),
)


def made(name, weights, form):
    """Return an optimizer, fused or foreach where that exists."""
    cls, keywords, has_fused = OPTIMIZERS[name]
    if form == "fused" and has_fused:
        keywords = {**keywords, "fused": True}
    elif form == "foreach":
        keywords = {**keywords, "foreach": True}
    return cls(weights, lr=1e-3, **keywords)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@settings(max_examples=300)
@given(
    st.lists(gradients(), min_size=1, max_size=3),
    scales,
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(["plain", "fused", "foreach"]),
    st.sampled_from([(), ("unscale_",), ("clip",)]),
    st.booleans(),
)
def test_a_step_that_saw_a_fault_changes_no_bit(  # noqa: C901, PLR0912
    pairs, scale, name, form, calls, warm
):
    weights = [weight for weight, _ in pairs]
    given_ = [gradient for _, gradient in pairs]
    if any(g is not None and g.is_sparse for g in given_) and (
        form != "plain" or name not in ("SGD", "momentum", "Adagrad")
    ):
        return  # the optimizer itself takes no sparse gradients
    if form == "fused" and any(g is not None and g.is_complex() for g in given_):
        return  # the fused kernels have no complex form
    if all(gradient is None for gradient in given_):
        return  # refused, which other tests show
    if "clip" in calls and not any(g is not None and g.numel() for g in given_):
        return  # which the last test here is about
    optimizer = made(name, weights, form)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=1.0, allow_fp16=True))
    if warm:  # so that there is state to corrupt
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        if not any(g is not None and g.is_sparse for g in given_):
            scaler.step(optimizer)
            scaler.update()
    scaler.update(scale)
    scale = scaler.get_scale()
    for weight, gradient in pairs:
        weight.grad = None if gradient is None else gradient.clone()
    sound = all(is_sound(g, scale) for g in given_ if g is not None)
    before = snapshot(optimizer)
    if "unscale_" in calls:
        scaler.unscale_(optimizer)
    elif "clip" in calls:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    event(f"sound: {sound}")
    assert 2.0**-126 <= scaler.get_scale() < math.inf
    weights_before, state_before = before
    weights_after, state_after = snapshot(optimizer)
    if not sound:
        assert scaler.last_step.skipped
    if scaler.last_step.skipped:
        assert weights_before == weights_after
        if warm:
            assert state_before == state_after
        else:
            for values in optimizer.state.values():
                for value in values.values():
                    if isinstance(value, torch.Tensor) and value.numel():
                        assert not value.any()
        if sound and "clip" not in calls:
            assert "headroom" == scaler.last_step.reason
    else:
        assert sound
        for weight in weights:
            if weight.dtype is torch.float16:
                continue  # in float16 the optimizers' epsilon is 0, and 0 / 0 is NaN
            for value in (weight, *optimizer.state.get(weight, {}).values()):
                assert not isinstance(value, torch.Tensor) or is_sound(value, 1.0)


@settings(max_examples=150)
@given(
    st.lists(
        gradients(
            dtypes=(torch.float32, torch.float64),
            layouts=("plain", "transposed", "gaps", "empty"),
            numbers=(0.0, 1.0, -2.5, 1e-40, 65504.0, 1e-15, 1e15),
        ),
        min_size=1,
        max_size=3,
    ),
    scales,
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(["plain", "fused", "foreach"]),
    st.booleans(),
)
def test_moderate_gradients_never_ruin_weights(pairs, scale, name, form, clip):
    weights = [weight for weight, _ in pairs]
    optimizer = made(name, weights, form)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=scale))
    for _ in range(4):
        for weight, gradient in pairs:
            # Scaled in their own dtype: they may overflow or vanish on the way.
            weight.grad = gradient * scaler.get_scale()
        if clip and any(gradient.numel() for _, gradient in pairs):
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        for weight in weights:
            assert weight.isfinite().all()
        assert 2.0**-126 <= scaler.get_scale() < math.inf


class Stages(RuleBasedStateMachine):
    """Random calls on torch's scaler and ours: the same answers, stages and scales."""

    @initialize(fused=st.tuples(st.booleans(), st.booleans()))
    def start(self, fused):
        self.sides = []
        for cls in (torch.amp.GradScaler, ls.GradScaler):
            weights = [torch.nn.Parameter(torch.ones(2)) for _ in fused]
            optimizers = [
                torch.optim.SGD([weight], lr=0.5, momentum=0.5, fused=one)
                for weight, one in zip(weights, fused, strict=True)
            ]
            for optimizer, weight in zip(optimizers, weights, strict=True):
                # Without it torch's fused momentum is not written in a skipped step.
                weight.grad = torch.ones_like(weight)
                optimizer.step()
                weight.grad = None
            scaler = cls("cpu", init_scale=8.0, growth_interval=2)
            self.sides.append((scaler, weights, optimizers))

    def same(self, call):
        """Make a call on both sides and compare what comes of it."""
        torchs, ours = (
            result_or_error(lambda side=side: call(*side)) for side in self.sides
        )
        assert torchs == ours

    @rule()
    def scale(self):
        self.same(lambda scaler, *_: scaler.scale(torch.ones(1)).item())

    @rule(at=st.integers(0, 1), number=st.sampled_from((1.0, -8.0, 0.0, *BAD)))
    def backward(self, at, number):
        for scaler, weights, optimizers in self.sides:
            stage = scaler._per_optimizer_states.get(id(optimizers[at]))
            if stage is None or stage["stage"].value == 0:
                weights[at].grad = torch.tensor([1.0, number])

    @rule(at=st.integers(0, 1))
    def zero_grad(self, at):
        for _, _, optimizers in self.sides:
            optimizers[at].zero_grad()

    @rule(at=st.integers(0, 1))
    def unscale(self, at):
        self.same(lambda scaler, _, optimizers: scaler.unscale_(optimizers[at]))

    @rule(at=st.integers(0, 1))
    def step(self, at):
        self.same(lambda scaler, _, optimizers: scaler.step(optimizers[at]))

    @rule()
    def update(self):
        self.same(lambda scaler, *_: scaler.update())

    @rule(new=st.sampled_from((2.0, 0.5, 64.0)))
    def update_to(self, new):
        self.same(lambda scaler, *_: scaler.update(new))

    @rule()
    def reload(self):
        for scaler, _, _ in self.sides:
            scaler.load_state_dict(scaler.state_dict())

    @invariant()
    def check_sides(self):
        """Compare stages, flags, scales, weights, momentum and gradients."""
        pictures = []
        for scaler, weights, optimizers in self.sides:
            states = [
                scaler._per_optimizer_states.get(id(optimizer))
                for optimizer in optimizers
            ]
            received = [
                None
                if state is None
                else (
                    state["stage"],
                    [flag.item() for flag in state["found_inf_per_device"].values()],
                )
                for state in states
            ]
            grads = [
                None if weight.grad is None else repr(weight.grad.tolist())
                for weight in weights
            ]
            moved = scaler.get_scale(), scaler._get_growth_tracker()
            pictures.append(
                (received, grads, moved, [snapshot(one) for one in optimizers])
            )
        assert pictures[0] == pictures[1]


TestStages = Stages.TestCase
TestStages.settings = settings(max_examples=150, stateful_step_count=25)


@pytest.mark.parametrize("measured", [False, True])
def test_gradients_without_a_single_number_have_a_norm_of_0(measured):
    weight = torch.nn.Parameter(torch.ones(0, 2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", measure_norm=measured))
    weight.grad = torch.ones(0, 2)
    if not measured:
        assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0.0
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.norm == 0.0
