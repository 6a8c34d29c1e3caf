# SPDX-License-Identifier: Apache-2.0
"""What does loss scaling cost per step under `jit`, ours and that of others?

In one run and in turns, the same training step of a decoder-only transformer, float16
inside, float32 parameters and AdamW:

    no scaling               value_and_grad and update, nothing checked
    no scaling, again        the same program once more: how far ratios stray by chance
    lossscale.jax, select    value_and_grad and select
    lossscale.jax, cond      value_and_grad and apply_if_finite, which is lax.cond
    lossscale.optax          loss_scaled
    flax                     DynamicScale, and the selection that its docstring shows
    jmp                      DynamicLossScale, all_finite, select_tree

Three times, each with its ratio to no scaling, the median over turns:

    ms        the host's, until the device is done, over some steps in a row
    busy_ms   on a GPU the sum of all kernels' times in a profile of as many steps; on a
              CPU the processor time of all threads, which other programs disturb less
    compile   lowering and compiling once: wall, and processor time of all threads

Traffic and arithmetic are what XLA counts in the compiled program (of a condition, the
dearer branch), and so are its temporary memory and its instructions. Every program is
traced once, and no step may be skipped.

    python benchmarks/jax_step.py cpu FOLDER     writes FOLDER/jax_step.cpu.csv
    python benchmarks/jax_step.py cuda FOLDER    writes FOLDER/jax_step.cuda.csv
    python benchmarks/jax_step.py check          compares the variants, writes nothing

A package that is missing has no row. Without optax, AdamW is our own. Another case is
not begun after ten minutes on a CPU and four on a GPU, most of which are compilation.
"""

import csv
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax_model import Case, adamw, make_batch, make_loss, make_parameters
from jax_variants import NONE, SCALE, VARIANTS, Variant, missing
from machine import describe

WARM_UP = 3
RATE = 1e-4
PATIENCE = {"cpu": 600, "cuda": 240}
COLUMNS = ("case", "parameters", "leaves", "donated", "of")
COLUMNS += ("ms", "ms_20", "ms_80", "to_none", "to_none_20", "to_none_80")
COLUMNS += ("busy_ms", "busy_to_none", "busy_to_none_20", "busy_to_none_80")
COLUMNS += ("gigabytes", "bytes_to_none", "gigaflops", "flops_to_none")
COLUMNS += ("temporary_megabytes", "instructions", "compile_s", "compile_cpu_s")
COLUMNS += ("compile_cpu_to_none", "traces", "loss")
GPT2 = Case(
    layers=12,
    width=768,
    heads=12,
    vocabulary=50304,
    length=1024,
    batch=8,
    turns=5,
    steps=50,
)
SMALL = Case(layers=4, width=256, heads=4, vocabulary=2048, length=64, batch=4)
# As many leaves as GPT-2 has.
DEEP = dataclasses.replace(SMALL, layers=12, width=128, turns=20)
CASES = {
    "cpu": {
        "12 layers": DEEP,
        "12 layers, kept": dataclasses.replace(DEEP, donated=False),
        "4 layers": SMALL,
    },
    "cuda": {
        # Little arithmetic: what is done once per parameter shows.
        "GPT-2, 1 x 128 tokens": dataclasses.replace(GPT2, length=128, batch=1),
        "GPT-2, 8 x 1024 tokens": GPT2,
    },
}
TINY = Case(layers=2, width=32, heads=2, vocabulary=64, length=16, batch=2)


class Contender:
    """A variant that was compiled, and the state that it trains."""

    def __init__(self, variant: Variant, case: Case) -> None:
        self.traces = 0
        self._variant = variant
        self.state = self.first_state(case)
        self._batch = jax.device_put(make_batch(case))

        def step(state, batch):
            self.traces += 1
            return variant.step(state, batch)

        self._step = jax.jit(step, donate_argnums=0 if case.donated else ())
        start, busy = time.perf_counter(), time.process_time()
        compiled = self._step.lower(self.state, self._batch).compile()
        self.compile_seconds = time.perf_counter() - start
        self.compile_cpu_seconds = time.process_time() - busy
        self.instructions = compiled.as_text().count(" = ")
        costs = compiled.cost_analysis() or {}
        self.bytes = costs.get("bytes accessed", float("nan"))
        self.flops = costs.get("flops", float("nan"))
        self.temporary = compiled.memory_analysis().temp_size_in_bytes

    def first_state(self, case: Case):
        """Return a first state whose buffers are in no other one."""
        parameters = jax.tree.map(jnp.array, make_parameters(case))
        inner = self._variant.optimizer.init(parameters)
        return jax.tree.map(jnp.array, (parameters, inner, self._variant.scaling))

    def train(self, state, batch=None):
        """Take a step, which uses up the state; return the next one and the loss."""
        return self._step(state, self._batch if batch is None else batch)

    def scale(self, state) -> float:
        """Return the loss scale in a state."""
        return float(self._variant.scale(state))


def make_contenders(case: Case) -> dict[str, Contender]:
    """Return the variants whose packages are there, compiled."""
    loss = make_loss(case)
    if missing("optax"):
        print("AdamW is our own: optax is not installed")
        optimizer = adamw(RATE)
    else:
        import optax

        optimizer = optax.adamw(RATE)

    def apply(old, grads):
        parameters, inner = old
        updates, inner = optimizer.update(grads, inner, parameters)
        return jax.tree.map(jnp.add, parameters, updates), inner

    contenders = {}
    for name, (make, module) in VARIANTS.items():
        absent = missing(module)
        if absent is None:
            contenders[name] = Contender(make(loss, optimizer, apply), case)
        elif name.endswith(absent):
            print(f"not run: {absent} is not installed", flush=True)
        else:
            print(f"not run: {name} needs {absent}, which is not installed", flush=True)
    return contenders


class Lane:
    """A state under way, and what was timed of it."""

    def __init__(self, contender: Contender, state) -> None:
        self.contender = contender
        self.state = state
        self.loss = None

    def train(self, steps: int) -> None:
        """Take some steps in a row, and wait for the last."""
        for _ in range(steps):
            self.state, self.loss = self.contender.train(self.state)
        jax.block_until_ready((self.state, self.loss))

    def milliseconds(self, steps: int) -> tuple[float, float]:
        """Take some steps; return the milliseconds of one: by the clock, and busy."""
        jax.block_until_ready(self.state)
        start, busy = time.perf_counter(), time.process_time()
        self.train(steps)
        wall, busy = time.perf_counter() - start, time.process_time() - busy
        if jax.default_backend() != "cpu":
            busy = self._kernel_seconds(steps)
        return wall * 1e3 / steps, busy * 1e3 / steps

    def _kernel_seconds(self, steps: int) -> float:
        """Take some more steps; return the sum of their kernels' times."""
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.train(steps)
            (file,) = Path(folder).rglob("*.xplane.pb")
            profile = jax.profiler.ProfileData.from_file(str(file))
        kernels = [
            event.duration_ns
            for plane in profile.planes
            if "GPU" in plane.name
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
        assert kernels, "the profile shows no kernel"
        return sum(kernels) / 1e9


def measure(name: str, case: Case, write) -> None:
    """Time all variants in turns, and write a row for each."""
    contenders = make_contenders(case)
    lanes = {label: Lane(each, each.state) for label, each in contenders.items()}
    for each in contenders.values():
        each.state = None  # the lane's own: it will be donated
    again = Lane(contenders[NONE], contenders[NONE].first_state(case))
    lanes = {NONE: lanes.pop(NONE), f"{NONE}, again": again, **lanes}
    for lane in lanes.values():
        lane.train(WARM_UP)
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in lanes}
    for turn in range(case.turns):
        for label in list(lanes) if turn % 2 else reversed(lanes):
            times[label].append(lanes[label].milliseconds(case.steps))
    none = lanes[NONE].contender
    leaves = jax.tree.leaves(lanes[NONE].state[0])
    for label, lane in lanes.items():
        one = lane.contender
        scale, loss = one.scale(lane.state), float(lane.loss)
        assert scale == SCALE, f"{label} skipped a step: its scale is {scale}"
        assert np.isfinite(loss), f"{label}: the loss is {loss}"
        assert one.traces == 1, f"{label} was traced {one.traces} times"
        pairs = list(zip(times[label], times[NONE], strict=True))
        walls = [(own[0], own[0] / of_none[0]) for own, of_none in pairs]
        busy = [(own[1], own[1] / of_none[1]) for own, of_none in pairs]
        found = {
            "case": name,
            "parameters": sum(leaf.size for leaf in leaves),
            "leaves": len(leaves),
            "donated": case.donated,
            "of": label,
            **spread("ms", [wall for wall, _ in walls]),
            **spread("to_none", [ratio for _, ratio in walls]),
            "busy_ms": statistics.median(each for each, _ in busy),
            **spread("busy_to_none", [ratio for _, ratio in busy]),
            "gigabytes": one.bytes / 1e9,
            "bytes_to_none": one.bytes / none.bytes,
            "gigaflops": one.flops / 1e9,
            "flops_to_none": one.flops / none.flops,
            "temporary_megabytes": one.temporary / 1e6,
            "instructions": one.instructions,
            "compile_s": one.compile_seconds,
            "compile_cpu_s": one.compile_cpu_seconds,
            "compile_cpu_to_none": one.compile_cpu_seconds / none.compile_cpu_seconds,
            "traces": one.traces,
            "loss": loss,
        }
        write([as_text(found[column]) for column in COLUMNS])
        print(
            "{case:22} {of:22} {ms:9.3f} ms, {to_none:.3f} times none ({to_none_20:.3f}"
            " to {to_none_80:.3f}); busy {busy_ms:.3f} ms, {busy_to_none:.3f} times; "
            "traffic {bytes_to_none:.4f} times; {instructions} instructions, compiled "
            "in {compile_s:.1f} s, {compile_cpu_to_none:.2f} times".format(**found),
            flush=True,
        )


def as_text(value) -> str:
    return f"{value:.5f}" if isinstance(value, float) else str(value)


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Return the median, and the 20 and 80 percentiles."""
    low, *_, high = statistics.quantiles(values, n=5)
    return {name: statistics.median(values), f"{name}_20": low, f"{name}_80": high}


def check() -> None:
    """Train a tiny model with every variant, and again with a bad step in between."""
    jax.config.update("jax_platforms", "cpu")
    batch = make_batch(TINY)
    bad = batch | {"weights": np.full_like(batch["weights"], np.inf)}
    expected = None
    for label, one in make_contenders(TINY).items():
        losses, state = [], one.first_state(TINY)
        for _ in range(6):
            state, loss = one.train(state)
            losses.append(float(loss))
        expected = expected or losses
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=label)
        assert losses[-1] < losses[0]
        text = "nothing to skip"
        if label != NONE:
            repeated, state = [], one.state
            for turn in range(7):
                # Copies: the step uses up the buffers of the state.
                before = jax.tree.map(np.array, (state[0], moments(state)))
                state, loss = one.train(state, bad if turn == 3 else batch)
                after = (state[0], moments(state))
                if turn == 3:
                    assert not np.isfinite(loss)
                    jax.tree.map(np.testing.assert_array_equal, before, after)
                    assert one.scale(state) == SCALE / 2
                else:
                    repeated.append(float(loss))
            np.testing.assert_allclose(repeated, losses, rtol=1e-6, err_msg=label)
            text = "the bad step left no trace but half the scale"
        assert one.traces == 1, f"{label} was traced {one.traces} times"
        print(f"{label:22} losses {losses[0]:.6f} to {losses[-1]:.6f}; {text}; 1 trace")


def moments(state):
    """Return the optimizer's own state, out of whatever wraps it."""
    return getattr(state[1], "inner_state", state[1])


def main(device: str, folder: Path) -> None:
    jax.config.update("jax_platforms", device)
    others = [name for name in ("flax", "jmp", "optax") if not missing(name)]
    facts = describe("jax", "jaxlib", *others)
    if device != "cpu":
        facts = {"gpu": jax.devices()[0].device_kind, **facts}
    with (folder / f"jax_step.{device}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, *facts])
        start = time.perf_counter()
        for name, case in CASES[device].items():
            spent = time.perf_counter() - start
            if spent > PATIENCE[device]:
                print(f"not run: {name}, after {spent:.0f} s")
                break
            measure(name, case, lambda row: writer.writerow([*row, *facts.values()]))
            file.flush()


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check()
    else:
        main(sys.argv[1], Path(sys.argv[2]))
