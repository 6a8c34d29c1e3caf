"""Small things in which code written for torch's scaler must find torch's behaviour."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import both, init_scale_tensor, parameter  # noqa: E402

import lossscale.torch as ls  # noqa: E402
from lossscale.errors import SettingTypeError  # noqa: E402


def problem(**settings):
    weight = parameter([1.0])
    return weight, torch.optim.SGD([weight], lr=0.5, **settings)


# torch's default device


@both
@pytest.mark.parametrize("way", ["step", "fused", "unscale_", "clip", "accumulate"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_step_is_taken_whatever_the_default_device_is(cls, way, bad):
    if way in ("clip", "accumulate") and cls is torch.amp.GradScaler:
        pytest.skip("torch's scaler has no such method")
    weight, optimizer = problem(fused=way == "fused")
    scaler = cls("cpu", init_scale=8.0)
    with torch.device("meta"):
        scaler.scale((weight * (float("inf") if bad else 1.0)).sum()).backward()
        if way == "unscale_":
            scaler.unscale_(optimizer)
        if way == "clip":
            scaler.clip_grad_norm_(optimizer, 10.0)
        if way == "accumulate":
            scaler.accumulate(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert ((1.0, 4.0) if bad else (0.5, 8.0)) == (weight.item(), scaler.get_scale())


def test_the_functions_take_cpu_gradients_whatever_the_default_device_is():
    policy = ls.GradScaler("cpu").policy
    state = ls.init(policy, device="cpu")
    gradient = torch.tensor([65536.0])
    with torch.device("meta"):
        (unscaled,), signal = ls.unscale([gradient], state)
        after = ls.update(policy, state, signal)
        chosen = ls.select(signal.finite, [unscaled], [gradient])
    assert (1.0, 1, 1.0) == (unscaled.item(), after.good_steps.item(), chosen[0].item())


# Arguments of step


class Telling(torch.optim.SGD):
    """Takes a function that is no closure."""

    def step(self, metric, closure=None):
        self.metric = metric
        return super().step(closure)


@both
def test_a_function_that_is_no_closure_is_passed_on(cls):
    weight = parameter([1.0])
    optimizer = Telling([weight], lr=0.5)
    scaler = cls("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer, len)
    assert (len, 0.5) == (optimizer.metric, weight.item())


class Asking(torch.optim.SGD):
    """Calls its closure with arguments, as Composer's SAM does."""

    def step(self, closure=None):
        closure(ddp_sync=False)
        loss = closure(ddp_sync=True)
        super().step()
        return loss


def test_a_closure_gets_the_arguments_that_the_optimizer_calls_it_with():
    weight = parameter([1.0])
    optimizer = Asking([weight], lr=0.5)
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    seen = []

    def closure(*, ddp_sync):
        seen.append(ddp_sync)
        optimizer.zero_grad()
        loss = weight.sum()
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    assert ([False, True], 0.5) == (seen, weight.item())


@pytest.mark.parametrize(
    "method", ["clip_grad_norm_", "unscale_", "step", "accumulate"]
)
def test_parameters_in_place_of_an_optimizer_are_named(method):
    weight, _ = problem()
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    arguments = [1.0] if method == "clip_grad_norm_" else []
    with pytest.raises(SettingTypeError, match=f"scaler.{method}\\(optimizer"):
        getattr(scaler, method)([weight], *arguments)


# Subclasses


def test_a_subclass_may_have_attributes_of_the_same_names():
    class Counting(ls.GradScaler):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.total_steps = 0
            self.state = "idle"
            self.policy = None
            self.skipped_steps = []

        def update(self, new_scale=None):
            super().update(new_scale)
            self.total_steps += 1

    weight, optimizer = problem()
    scaler = Counting("cpu", 8.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (1, "idle", None, [], 0.5) == (
        scaler.total_steps,
        scaler.state,
        scaler.policy,
        scaler.skipped_steps,
        weight.item(),
    )


# Types and words


def test_gradients_are_added_up_in_the_dtype_that_the_parameter_asks_for():
    weight = parameter([1.0], torch.bfloat16)
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    weight.grad_dtype = torch.float32
    optimizer = torch.optim.SGD([weight], lr=0.5, foreach=False)
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    dtypes = []
    optimizer.register_step_pre_hook(lambda *_: dtypes.append(weight.grad.dtype))
    for _ in range(2):
        weight.grad = torch.tensor([8.0])
        scaler.scale(torch.zeros(()))
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    assert ([torch.float32], 0.0) == (dtypes, weight.item())


def test_the_warning_that_there_is_no_cuda_points_at_the_caller():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA: there is no warning")
    for make in (ls.GradScaler, ls.ShardedGradScaler):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make()
        (warning,) = caught
        assert __file__ == warning.filename


def test_the_first_scale_may_be_compiled_as_one_graph():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    torch._dynamo.reset()
    loss = torch.compile(
        lambda: scaler.scale(weight.sum()), fullgraph=True, backend="aot_eager"
    )
    loss().backward()
    scaler.step(optimizer)
    scaler.update()
    assert (0.5, 8.0, 1) == (weight.item(), scaler.get_scale(), scaler.total_steps)


def test_it_is_shown_with_its_scale_policy_and_counts():
    weight, optimizer = problem()
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    weight.grad = torch.tensor([float("inf")])
    scaler.step(optimizer)
    scaler.update()
    text = repr(scaler)
    for part in (
        "GradScaler(scale=4,",
        "policy=Dynamic(",
        "total_steps=1, skipped_steps=1)",
    ):
        assert part in text
    assert "GradScaler(enabled=False)" == repr(ls.GradScaler("cpu", enabled=False))


# FSDP1


class Alone:
    """What PyTorch's own tests of FSDP1 give instead of a process group."""

    def rank(self):
        return 0

    def size(self):
        return 1

    def allreduce(self, *_, **__):
        message = "a group of one has nothing to reduce"
        raise AssertionError(message)


def test_a_group_that_only_looks_like_one_is_taken():
    weight, optimizer = problem()
    scaler = ls.ShardedGradScaler("cpu", 8.0, process_groups=Alone())
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert 0.5 == weight.item()


def test_the_sharded_scaler_unscales_float16_gradients_unless_asked_otherwise():
    weight = parameter([1.0], torch.float16)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = init_scale_tensor(ls.ShardedGradScaler("cpu", 8.0))
    weight.grad = torch.tensor([8.0], dtype=torch.float16)
    flags = scaler._unscale_grads_(optimizer, torch.tensor(0.125), torch.zeros(1))
    assert ([0.0], [1.0]) == ([f.item() for f in flags.values()], weight.grad.tolist())
