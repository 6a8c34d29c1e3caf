"""What can only be seen on a GPU: kernels, no waits, CUDA graphs, large tensors.

CI has none. On a machine with one:
    python -m pytest --confcutdir=tests tests/adapters/torch/test_cuda.py
"""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from lossscale import Dynamic  # noqa: E402
from lossscale.torch import GradScaler  # noqa: E402
from lossscale.torch.inspection import kernel_backend  # noqa: E402

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def network():
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    return torch.nn.Sequential(*layers).cuda()


def train(scaler, name, *, clip, bad=2, steps=6):
    """Train a little with an infinity in one step; return weights and scales."""
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    batch = torch.randn(16, 64, device="cuda", generator=torch.Generator("cuda"))
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale((model(batch) ** 2).mean()).backward()
        if step == bad:
            model[0].weight.grad[3, 3] = math.inf
        if clip and isinstance(scaler, GradScaler):
            scaler.clip_grad_norm_(optimizer, clip)
        elif clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return list(model.parameters()), scales


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_is_that_of_torchs_scaler(name, clip):
    settings = {"init_scale": 1024.0, "growth_interval": 2}
    ours = GradScaler("cuda", **settings)
    expected, scales = train(torch.amp.GradScaler("cuda", **settings), name, clip=clip)
    actual, own = train(ours, name, clip=clip)
    assert scales == own
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)
    assert (6, 1, 0) == (ours.total_steps, ours.skipped_steps, ours.consecutive_skips)


def test_a_first_step_that_is_skipped_leaves_sound_momentum():
    torch.full((1 << 20,), math.nan, device="cuda")  # what freed memory may hold
    weights, _ = train(GradScaler("cuda"), "momentum", clip=None, bad=0)
    for weight in weights:
        assert torch.isfinite(weight).all()


def test_a_policy_moves_the_scale_by_the_kernel():
    scaler = GradScaler("cuda", policy=Dynamic(init_scale=1024.0, growth_interval=2))
    _, scales = train(scaler, "sgd", clip=None)
    assert [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0] == scales


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_fused_step_waits_for_nothing_and_names_the_tensor_later():
    assert kernel_backend.is_available(torch.device("cuda"))
    model = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seen = []
    scaler = GradScaler("cuda", module=model, on_step=seen.append)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4, device="cuda")).sum()).backward()
        if step == 1:
            model.bias.grad[-1] = math.nan
        try:
            torch.cuda.set_sync_debug_mode("error")
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    scaler.flush()
    assert [1, 2, 3, 4] == [report.index for report in seen]
    assert [True, False, True, True] == [report.applied for report in seen]
    assert {"bias": "nan"} == seen[1].nonfinite


def test_all_kinds_of_numbers_in_one_optimizer():
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    kinds.append(torch.complex64)
    weights = [torch.nn.Parameter(torch.ones(9, device="cuda", dtype=k)) for k in kinds]
    optimizer = torch.optim.SGD(weights, lr=1e-3, foreach=False)
    scaler = GradScaler("cuda", init_scale=8.0, allow_fp16=True)
    scaler.scale(torch.zeros(1, device="cuda"))
    for weight in weights:
        weight.grad = torch.full_like(weight, 8.0)
    scaler.unscale_(optimizer)
    for weight in weights:
        assert (weight.grad == 1.0).all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied
    for number, broken in enumerate(weights):
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.grad = torch.full_like(weight, 8.0)
        broken.grad[-1] = math.inf
        scaler.step(optimizer)
        scaler.update()
        (name,) = scaler.last_step.nonfinite_names
        assert f"param_groups[0]['params'][{number}] of shape (9,)" == name
        for old, weight in zip(before, weights, strict=True):
            assert torch.equal(old, weight)


def test_a_float64_gradient_beyond_float32_is_finite():
    weight = torch.nn.Parameter(torch.ones(2, device="cuda", dtype=torch.float64))
    for make, moves in ((torch.amp.GradScaler, False), (GradScaler, True)):
        optimizer = torch.optim.SGD([weight], lr=1e-300)
        scaler = make("cuda", init_scale=2.0)
        scaler.scale(torch.zeros(1, device="cuda"))
        weight.grad = torch.full_like(weight, 1e300)
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert moves == (not torch.equal(before, weight)), make


def test_more_than_two_to_the_31_bytes():
    count = 2**29 + 2**27 + 5
    weight = torch.nn.Parameter(torch.zeros(count, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cuda", init_scale=1.0)
    scaler.scale(torch.zeros(1, device="cuda"))
    weight.grad = torch.ones_like(weight)
    norm = scaler.clip_grad_norm_(optimizer, 1e9)
    assert math.sqrt(count) == pytest.approx(norm.item(), rel=1e-6)
    scaler.step(optimizer)
    scaler.update()
    assert (weight == -1.0).all()
    weight.grad = torch.ones_like(weight)
    weight.grad[-1] = math.nan
    scaler.step(optimizer)
    scaler.update()
    assert "nan" == scaler.last_step.reason
    assert (weight == -1.0).all()


def test_a_whole_step_in_a_cuda_graph():
    model = torch.nn.Linear(32, 32).cuda()
    options = {"lr": 1e-3, "fused": True, "capturable": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    scaler = GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    batch = torch.randn(4, 32, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=False)
        scaler.scale((model(batch) ** 2).mean()).backward()
        scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    scales = []
    for _ in range(4):
        graph.replay()
        scales.append(scaler.get_scale())
    assert [4096.0, 4096.0, 8192.0, 8192.0] == scales
    assert (7, 0, True) == (
        scaler.total_steps,
        scaler.skipped_steps,
        scaler.last_step.applied,
    )
    before = model.weight.detach().clone()
    batch.fill_(math.inf)
    graph.replay()
    assert torch.equal(before, model.weight)
    assert (1, 4096.0) == (scaler.skipped_steps, scaler.get_scale())
    assert not scaler.last_step.applied
    assert not scaler.step_applied()
    batch.fill_(1.0)
    graph.replay()
    assert 0 == scaler.consecutive_skips
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("path", ["step", "unscale_", "clip"])
def test_a_gradient_that_cannot_be_squared_is_skipped_at_the_same_scale(fused, path):
    weight = torch.nn.Parameter(torch.ones(5, device="cuda"))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    scaler = GradScaler("cuda", names=[("head", weight)])
    for value in (1.0, 3e38):
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.ones_like(weight)
        weight.grad[3] = value
        if path == "unscale_":
            scaler.unscale_(optimizer)
        if path == "clip":
            scaler.clip_grad_norm_(optimizer, 1e30)
        scaler.step(optimizer)
        scaler.update()
    report = scaler.last_step
    assert ("headroom", 65536.0) == (report.reason, scaler.get_scale())
    assert {"head": "headroom"} == report.nonfinite
    assert torch.isfinite(optimizer.state[weight]["exp_avg_sq"]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("several", [False, True])
def test_whether_the_loss_was_finite_is_known_without_a_wait(dtype, several):
    weight = torch.nn.Parameter(torch.ones(5, device="cuda"))
    optimizer = torch.optim.AdamW([weight], fused=True)
    scaler = GradScaler("cuda", init_scale=8.0)
    known = []
    for factor in (1.0, math.nan, math.inf, 2.0):
        optimizer.zero_grad()
        loss = (weight.to(dtype) * factor).sum()
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.scale(loss).backward()
            if several:
                scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        known.append((scaler.last_step.loss_finite, scaler.last_step.reason))
    assert [(True, None), (False, "loss"), (False, "loss"), (True, None)] == known


def test_the_largest_magnitude_comes_with_the_read():
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cuda", init_scale=8.0)
    scaler.scale(weight.sum())
    weight.grad = torch.tensor([24.0, -32.0], device="cuda")
    scaler.step(optimizer)
    scaler.update()
    assert (4.0, 5.0) == (scaler.last_step.amax, scaler.last_step.norm)


class Product(torch.nn.Module):
    """Overflows in a product, after layers that keep statistics and draw numbers."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.drop = torch.nn.Dropout(0.5)
        self.down = torch.nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.drop(self.norm(self.up(x))) * 65504.0)


def test_explain_names_the_operation_and_puts_everything_back():
    torch.manual_seed(0)
    model = Product().cuda()
    scaler = GradScaler("cuda", module=model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(64, 16, device="cuda")
    for _ in range(2):

        def backward():
            with torch.autocast("cuda", torch.float16):
                loss = model(batch).float().pow(2).mean()
            scaler.scale(loss).backward()

        optimizer.zero_grad()
        backward()
        scaler.step(optimizer)
        scaler.update()
    before = [value.clone() for value in model.state_dict().values()]
    random_state = torch.cuda.get_rng_state()
    scale = scaler.get_scale()
    found = scaler.explain(backward)
    assert ("mul", "overflow") == (found.first.operation, found.first.origin)
    assert "float16" == found.first.dtype
    assert not found.loss_finite
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(random_state, torch.cuda.get_rng_state())
    assert scale == scaler.get_scale()


def test_explain_finds_a_scale_that_helps():
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 1)).cuda()
    scaler = GradScaler("cuda", init_scale=2.0**24, module=model)
    batch = torch.randn(4, 16, device="cuda")

    def backward():
        with torch.autocast("cuda", torch.float16):
            loss = model(batch).float().mean()
        scaler.scale(loss).backward()

    found = scaler.explain(backward)
    assert found.loss_finite
    assert found.lower_scale_helps
