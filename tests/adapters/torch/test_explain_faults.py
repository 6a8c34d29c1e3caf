"""Every planted fault is explained as what it is."""

import csv
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.planted import FAULTS  # noqa: E402  # needs torch
from helpers.planted.fault import Block, autocast_step, normal_batch  # noqa: E402

from lossscale.testing.torch import inject  # noqa: E402
from lossscale.torch import GradScaler, to_float16  # noqa: E402

ROOT = Path(__file__).parents[3]


def explain(fault):
    torch.manual_seed(0)
    model, step = fault.build()
    scaler = GradScaler("cpu", init_scale=fault.scale, module=model)
    return scaler.explain(lambda: step(scaler))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_explained(fault):
    seen = explain(fault)
    found = seen.first
    assert not seen.finite
    assert fault.module == found.module
    assert fault.direction == found.direction
    assert fault.origin == found.origin
    assert fault.operation == found.operation
    assert fault.helps is seen.lower_scale_helps
    if fault.role is not None:
        assert fault.role == found.role
    if fault.tensor is not None:
        assert fault.tensor == found.tensor
    if fault.node is not None:
        assert fault.node == found.node
    if fault.nan is not None:
        assert fault.nan == (seen.first_nan.module, seen.first_nan.origin)
    assert (fault.micro_batch, fault.loss) == (found.micro_batch, found.loss)
    assert found.origin != "unknown"
    json.dumps(seen.to_dict(), allow_nan=False)


def test_there_are_at_least_20_faults():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


def test_a_size_is_what_float64_gives():
    weight = np.linspace(1, 400, 16).reshape(4, 4)
    batch = np.linspace(100, 300, 8).reshape(2, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(weight))
    scaler = GradScaler("cpu", module=model)
    step = autocast_step(model, torch.from_numpy(batch).float())
    found = scaler.explain(lambda: step(scaler)).first
    rounded = batch.astype(np.float16).astype(np.float64)
    product = rounded @ weight.astype(np.float16).astype(np.float64).T
    assert found.magnitude == np.abs(product).max()
    assert found.largest == np.finfo(np.float16).max
    assert found.ratio == np.abs(product).max() / 65504


def test_the_helping_scale_is_finite_and_the_ones_that_failed_are_not():
    (fault,) = [f for f in FAULTS if f.name.startswith("gradient that grows")]
    seen = explain(fault)
    for trial in seen.trials:
        model, step = fault.build()
        scaler = torch.amp.GradScaler("cpu", init_scale=trial.scale)
        step(scaler)
        finite = all(torch.isfinite(p.grad).all() for p in model.parameters())
        assert trial.finite is finite
    assert {trial.finite for trial in seen.trials} == {False, True}


def test_a_healthy_batch_has_nothing_to_explain():
    model = Block(torch.tanh)
    scaler = GradScaler("cpu", init_scale=8.0, module=model)
    step = autocast_step(model, normal_batch())
    seen = scaler.explain(lambda: step(scaler))
    assert seen.finite
    assert seen.first is None
    assert "nothing to explain" in str(seen)


def test_a_mask_is_not_the_cause():
    mask = torch.full((4, 4), -math.inf).triu(1)

    def attend(x):
        return (x @ x.T + mask).softmax(-1) @ x / (x * 0)

    model = Block(attend)
    scaler = GradScaler("cpu", module=model)
    step = autocast_step(model, normal_batch())
    found = scaler.explain(lambda: step(scaler)).first
    assert found.operation == "div"


def explain_block(function):
    model = Block(function)
    scaler = GradScaler("cpu", module=model)
    step = autocast_step(model, normal_batch())
    return scaler.explain(lambda: step(scaler))


def test_a_mask_given_as_a_tensor_is_the_cause_where_a_product_reads_it():
    mask = torch.full((4, 4), -math.inf).triu(1)
    seen = explain_block(lambda x: (x @ x.T + mask) @ x)
    assert (seen.first.origin, seen.first.direction) == ("batch", "given")
    assert seen.first_nan.operation == "mm"


def test_a_parameter_written_in_place_keeps_its_role():
    model = Block(torch.tanh)
    with torch.no_grad():
        model.embed.weight[0, 0] = math.nan
    scaler = GradScaler("cpu", module=model)
    step = autocast_step(model, normal_batch())

    def clamp_and_step():
        model.embed.weight.data.clamp_(-1.0, 1.0)
        step(scaler)

    found = scaler.explain(clamp_and_step).first
    assert (found.origin, found.role) == ("parameter", "parameter")
    assert found.tensor == "embed.weight"


def test_memory_that_is_used_again_has_no_history():
    def work(x):
        for _ in range(20):
            torch.empty(64).fill_(math.nan)  # its memory is given to the next one
            zeros = torch.empty(64)
            zeros.zero_()
        return (x + zeros[:8].to(x.dtype)) / (x * 0)

    assert explain_block(work).first.operation == "div"


def test_the_number_that_float16_rounds_to_0_is_named():
    (fault,) = [f for f in FAULTS if f.name == "epsilon that float16 rounds to 0"]
    seen = explain(fault)
    assert seen.first.lost_epsilon == 1e-8
    assert "The 1e-8 that is added against this is 0 in float16" in seen.advice
    assert "6e-8" in seen.advice


@pytest.mark.parametrize(
    "divide",
    [
        lambda x: x / ((x * 0).pow(2).sum().sqrt().clamp(min=1e-9)),
        lambda x: x / (1e-9 + (x * 0).norm()),
        lambda x: (x * 0).add_(1e-9).sqrt().reciprocal(),
    ],
)
def test_a_lost_number_is_known_however_it_was_added(divide):
    model = Block(divide)
    to_float16(model)
    scaler = GradScaler("cpu", module=model)
    seen = scaler.explain(lambda: model(normal_batch()).float().mean())
    assert seen.first.lost_epsilon == 1e-9


def test_a_number_that_is_not_lost_is_not_blamed():
    seen = explain_block(lambda x: (x + 1e-3) / (x.float() * 0 + 1e-9 - 1e-9))
    assert (seen.first.operation, seen.first.lost_epsilon) == ("div", None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layer norm with epsilon 0", "Set the norm's eps above 0."),
        ("cross entropy of ignored targets", "max(count, 1)"),
        ("float16 gradients of two micro batches", "Lower the scale to"),
    ],
)
def test_the_advice_is_that_for_the_operation(name, words):
    (fault,) = [f for f in FAULTS if f.name == name]
    assert words in explain(fault).advice


def test_an_autocast_of_an_input_is_not_a_cast_by_hand():
    seen = explain_block(lambda x: x.float() * 1e6)
    assert (seen.first.module, seen.first.role) == ("head", "input")
    seen = explain_block(lambda x: (x.float() * 1e6).half())
    assert (seen.first.module, seen.first.role) == ("middle", "output")


def test_a_gradient_that_a_hook_changed_is_not_another_ranks():
    model = Block(torch.tanh)
    scaler = GradScaler("cpu", module=model)
    step = autocast_step(model, normal_batch())

    def multiply(param):
        param.grad.mul_(math.inf)

    model.embed.weight.register_post_accumulate_grad_hook(multiply)
    seen = scaler.explain(lambda: step(scaler))
    assert (seen.first.origin, seen.first.tensor) == ("constant", "embed.weight")
    assert "rank" not in str(seen)


def test_a_change_by_an_operator_that_is_not_watched_is_said_to_be_one():
    model = Block(torch.tanh)
    scaler = GradScaler("cpu", module=model)
    step = autocast_step(model, normal_batch())

    def step_and_multiply():
        step(scaler)
        torch._foreach_mul_([param.grad for param in model.parameters()], math.inf)

    seen = scaler.explain(step_and_multiply)
    assert (seen.first.origin, seen.first.operation) == ("changed afterwards", None)
    assert "by a hook or by the step's own code" in str(seen)


def test_injected_faults_are_explained_as_such():
    model = Block(torch.tanh)
    scaler = GradScaler("cpu", module=model)

    def step(where, name):
        with inject(model, name, "nan", steps=1, where=where):
            scaler.scale(model(normal_batch()).mean()).backward()

    found = scaler.explain(lambda: step("gradient", "embed.weight")).first
    assert found.origin in ("changed afterwards", "constant")
    assert found.tensor == "embed.weight"


def test_losses_of_one_forward_pass_are_no_micro_batches():
    model = Block(torch.tanh)
    scaler = GradScaler("cpu", module=model)

    def step():
        output = model(normal_batch())
        scaler.scale(output.mean()).backward(retain_graph=True)
        scaler.scale((output * 0).log().mean()).backward()

    found = scaler.explain(step).first
    assert (found.loss, found.micro_batch) == (1, None)
    assert "for loss 1 (counted from 0)" in str(found)


def test_second_derivatives_of_the_parameters_are_no_penalty():
    model = Block(torch.tanh)
    scaler = GradScaler("cpu", module=model)

    def step():
        for factor in (1.0, 0.0):
            loss = (model(normal_batch()).pow(2) * factor).mean().sqrt()
            scaler.scale(loss).backward(create_graph=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of create_graph
        found = scaler.explain(step).first
    assert found.micro_batch == 1


def test_the_line_of_the_users_code_is_named():
    model = Block(lambda x: x.log())
    to_float16(model)
    scaler = GradScaler("cpu", module=model)
    seen = scaler.explain(lambda: -model(normal_batch()).mean())
    file, _, line = seen.first.line.partition(":")
    assert file == "test_explain_faults.py"
    with open(__file__, encoding="utf-8") as source:  # noqa: PTH123
        assert "x.log()" in source.readlines()[int(line) - 1]


def test_a_function_may_return_the_loss():
    model = Block(lambda x: x.float() * 0 + 1e9)
    scaler = GradScaler("cpu", module=model)

    def step():
        with torch.autocast("cpu", torch.float16):
            return model(normal_batch()).float().mean()

    found = scaler.explain(step).first
    assert (found.module, found.role) == ("head", "input")


def test_the_batch_is_run_at_the_scalers_own_scale():
    model = Block(torch.tanh)
    scaler = GradScaler("cpu", init_scale=4.0, module=model)
    scales = []

    def step():
        scales.append(scaler.get_scale())
        scaler.scale(model(normal_batch()).mean()).backward()

    assert scaler.explain(step).scale == 4.0
    assert scales == [4.0]


@pytest.mark.parametrize("named", ["inner", "compiled"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_explained_without_its_compiled_code(backend, named):
    inner = Block(lambda x: x.log())
    model = torch.compile(inner, backend=backend)
    scaler = GradScaler("cpu", module=inner if named == "inner" else model)
    step = autocast_step(model, normal_batch())
    seen = scaler.explain(lambda: step(scaler))
    assert (seen.first.module, seen.first.operation) == ("middle", "log")
    assert "without their compiled code" in seen.notes[0]


def test_a_disabled_scaler_explains_at_a_scale_of_1():
    model = Block(lambda x: x.log())
    scaler = GradScaler("cpu", enabled=False, module=model)
    seen = scaler.explain(lambda: model(normal_batch()).mean())
    assert (seen.scale, seen.first.module) == (1.0, "middle")


def test_accumulate_keeps_micro_batches_apart():
    model = Block(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", module=model)
    batches = [normal_batch() for _ in range(3)]
    batches[2][0, 0] = math.inf

    def step():
        for batch in batches:
            scaler.scale(model(batch).mean()).backward()
            scaler.accumulate(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    seen = scaler.explain(step)
    # tanh makes 1 of the infinity: the loss is finite, and a gradient is not.
    assert seen.loss_finite
    assert seen.first.micro_batch == 2


def test_a_gradient_penalty_is_explained():
    model = Block(torch.tanh)
    scaler = GradScaler("cpu", module=model)

    def step():
        batch = normal_batch().requires_grad_()
        output = model(batch).sum()
        (gradient,) = scaler.grad(output, batch)
        penalty = ((gradient * 0).pow(2).sum(1).sqrt() - 1).pow(2).mean()
        scaler.scale(output + penalty).backward()

    found = scaler.explain(step).first
    assert (found.origin, found.node) == ("division by zero", "SqrtBackward0")
    assert found.micro_batch is None


def test_the_page_and_the_recorded_results_have_every_fault():
    results = ROOT / "benchmarks" / "results" / "explain_faults.csv"
    with results.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
    assert [fault.name for fault in FAULTS] == [row["fault"] for row in rows]
    for fault, row in zip(FAULTS, rows, strict=True):
        tools = "ours", "anomaly mode", "DebugUnderflowOverflow"
        right = " | ".join(row[f"{tool} is right"] for tool in tools)
        operation = f"`{fault.operation}`" if fault.operation else "none"
        expected = f"| {operation} | {fault.origin} | {row['lower scale helps']} |"
        (line,) = [x for x in page.splitlines() if x.startswith(f"| {fault.name} |")]
        assert line.endswith(f"{expected} {right} |")
    assert f"We planted {len(FAULTS)} faults" in page
