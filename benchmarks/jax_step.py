# SPDX-License-Identifier: Apache-2.0
"""What does loss scaling cost per step under `jit`, in lossscale and other libraries?

One run alternates between variants of the same training step of a decoder-only
transformer, float16 inside, float32 parameters and AdamW:

    no scaling               value_and_grad and update, nothing checked
    no scaling, again        the same program once more: the noise of the ratios
    lossscale.jax, select    value_and_grad and select
    lossscale.jax, cond      value_and_grad and apply_if_finite, which is lax.cond
    lossscale.optax          loss_scaled
    lossscale.optax, cond    loss_scaled(skip="cond")
    flax                     DynamicScale, and the selection from its docstring
    jmp                      DynamicLossScale, all_finite, select_tree

Three durations, each with its ratio to no scaling, as medians over turns:

    ms        wall time until the device is done, averaged over consecutive steps
    busy_ms   on a GPU the sum of all kernel times in a profile of as many steps; on a
              CPU the processor time of all threads, which other programs disturb less
    compile   lowering and compiling once: wall time, and processor time of all threads

Memory traffic, arithmetic, temporary memory and instructions are XLA's own counts for
the compiled program (of a condition, the more expensive branch). Every program is
traced once, and no step may be skipped.

    python benchmarks/jax_step.py cpu FOLDER     writes FOLDER/jax_step.cpu.csv
    python benchmarks/jax_step.py cuda FOLDER    writes FOLDER/jax_step.cuda.csv
    python benchmarks/jax_step.py check          compares the variants, writes nothing

A package that is not installed has no row. Without optax, AdamW is that of
jax_model.py. No further case is started after ten minutes on a CPU and four on a GPU,
most of which are compilation.
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
from jax_variants import BASELINE, SCALE, VARIANTS, Variant, find_missing
from machine import describe

WARM_UP = 3
RATE = 1e-4
TIME_LIMIT_SECONDS = {"cpu": 600, "cuda": 240}
COLUMNS = ("case", "parameters", "leaves", "donates", "variant")
COLUMNS += ("ms", "ms_20", "ms_80", "ratio", "ratio_20", "ratio_80")
COLUMNS += ("busy_ms", "busy_ratio", "busy_ratio_20", "busy_ratio_80")
COLUMNS += ("gigabytes", "bytes_ratio", "gigaflops", "flops_ratio")
COLUMNS += ("temporary_megabytes", "instructions", "compile_s", "compile_cpu_s")
COLUMNS += ("compile_cpu_ratio", "traces", "loss")
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
# The same number of leaves as GPT-2.
DEEP = dataclasses.replace(SMALL, layers=12, width=128, turns=60)
CASES = {
    "cpu": {
        "12 layers": DEEP,
        "12 layers, not donated": dataclasses.replace(DEEP, donates=False),
        "4 layers": SMALL,
    },
    "cuda": {
        # Little arithmetic, so that work per parameter dominates.
        "GPT-2, 1 x 128 tokens": dataclasses.replace(GPT2, length=128, batch=1),
        "GPT-2, 8 x 1024 tokens": GPT2,
    },
}
TINY = Case(layers=2, width=32, heads=2, vocabulary=64, length=16, batch=2)


class CompiledVariant:
    """A compiled variant, and its first state."""

    def __init__(self, variant: Variant, case: Case) -> None:
        self.traces = 0
        self._variant = variant
        self.state = self.make_state(case)
        self._batch = jax.device_put(make_batch(case))

        def step(state, batch):
            self.traces += 1
            return variant.step(state, batch)

        self._step = jax.jit(step, donate_argnums=0 if case.donates else ())
        start, busy = time.perf_counter(), time.process_time()
        compiled = self._step.lower(self.state, self._batch).compile()
        self.compile_seconds = time.perf_counter() - start
        self.compile_cpu_seconds = time.process_time() - busy
        self.instructions = compiled.as_text().count(" = ")
        costs = compiled.cost_analysis() or {}
        self.bytes = costs.get("bytes accessed", float("nan"))
        self.flops = costs.get("flops", float("nan"))
        self.temporary = compiled.memory_analysis().temp_size_in_bytes

    def make_state(self, case: Case):
        """Return a first state that shares no buffers with another state."""
        parameters = jax.tree.map(jnp.array, make_parameters(case))
        inner = self._variant.optimizer.init(parameters)
        return jax.tree.map(jnp.array, (parameters, inner, self._variant.scaling))

    def train(self, state, batch=None):
        """Run a step, which may donate the state; return the next state and loss."""
        return self._step(state, self._batch if batch is None else batch)

    def read_scale(self, state) -> float:
        """Return the loss scale in a state."""
        return float(self._variant.scale(state))


def compile_variants(case: Case) -> dict[str, CompiledVariant]:
    """Compile the variants whose packages are installed."""
    loss = make_loss(case)
    if find_missing("optax"):
        print("AdamW is that of jax_model.py: optax is not installed")
        optimizer = adamw(RATE)
    else:
        import optax

        optimizer = optax.adamw(RATE)

    def apply(old, grads):
        parameters, inner = old
        updates, inner = optimizer.update(grads, inner, parameters)
        return jax.tree.map(jnp.add, parameters, updates), inner

    variants = {}
    for name, (make, module) in VARIANTS.items():
        package = find_missing(module)
        if package is None:
            variants[name] = CompiledVariant(make(loss, optimizer, apply), case)
        elif name.endswith(package):
            print(f"not run: {package} is not installed", flush=True)
        else:
            print(
                f"not run: {name} needs {package}, which is not installed", flush=True
            )
    return variants


class Run:
    """The training of a variant from one state."""

    def __init__(self, variant: CompiledVariant, state) -> None:
        self.variant = variant
        self.state = state
        self.loss = None

    def train(self, steps: int) -> None:
        """Run some steps, and wait for the last."""
        for _ in range(steps):
            self.state, self.loss = self.variant.train(self.state)
        jax.block_until_ready((self.state, self.loss))

    def time_steps(self, steps: int) -> tuple[float, float]:
        """Run some steps; return the milliseconds of one: wall time, and busy time."""
        jax.block_until_ready(self.state)
        start, cpu_start = time.perf_counter(), time.process_time()
        self.train(steps)
        wall, busy = time.perf_counter() - start, time.process_time() - cpu_start
        if jax.default_backend() != "cpu":
            busy = self._profile_kernels(steps)
        return wall * 1e3 / steps, busy * 1e3 / steps

    def _profile_kernels(self, steps: int) -> float:
        """Run some more steps; return the sum of their kernel times, in seconds."""
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
    variants = compile_variants(case)
    runs = {label: Run(variant, variant.state) for label, variant in variants.items()}
    for variant in variants.values():
        variant.state = None  # the run owns it, and will donate it
    baseline = variants[BASELINE]
    again = Run(baseline, baseline.make_state(case))
    runs = {BASELINE: runs.pop(BASELINE), f"{BASELINE}, again": again, **runs}
    for run in runs.values():
        run.train(WARM_UP)
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in runs}
    for turn in range(case.turns):
        for label in list(runs) if turn % 2 else reversed(runs):
            times[label].append(runs[label].time_steps(case.steps))
    leaves = jax.tree.leaves(runs[BASELINE].state[0])
    for label, run in runs.items():
        variant = run.variant
        scale, loss = variant.read_scale(run.state), float(run.loss)
        assert scale == SCALE, f"{label} skipped a step: its scale is {scale}"
        assert np.isfinite(loss), f"{label}: the loss is {loss}"
        assert variant.traces == 1, f"{label} was traced {variant.traces} times"
        pairs = list(zip(times[label], times[BASELINE], strict=True))
        wall_ratios = [own[0] / reference[0] for own, reference in pairs]
        busy_ratios = [own[1] / reference[1] for own, reference in pairs]
        row = {
            "case": name,
            "parameters": sum(leaf.size for leaf in leaves),
            "leaves": len(leaves),
            "donates": case.donates,
            "variant": label,
            **summarize("ms", [wall for wall, _ in times[label]]),
            **summarize("ratio", wall_ratios),
            "busy_ms": statistics.median(busy for _, busy in times[label]),
            **summarize("busy_ratio", busy_ratios),
            "gigabytes": variant.bytes / 1e9,
            "bytes_ratio": variant.bytes / baseline.bytes,
            "gigaflops": variant.flops / 1e9,
            "flops_ratio": variant.flops / baseline.flops,
            "temporary_megabytes": variant.temporary / 1e6,
            "instructions": variant.instructions,
            "compile_s": variant.compile_seconds,
            "compile_cpu_s": variant.compile_cpu_seconds,
            "compile_cpu_ratio": (
                variant.compile_cpu_seconds / baseline.compile_cpu_seconds
            ),
            "traces": variant.traces,
            "loss": loss,
        }
        write([format_cell(row[column]) for column in COLUMNS])
        print(
            "{case:22} {variant:22} {ms:9.3f} ms, ratio {ratio:.3f} ({ratio_20:.3f} to "
            "{ratio_80:.3f}); busy {busy_ms:.3f} ms, ratio {busy_ratio:.3f}; traffic "
            "ratio {bytes_ratio:.4f}; {instructions} instructions, compiled in "
            "{compile_s:.1f} s, ratio {compile_cpu_ratio:.2f}".format(**row),
            flush=True,
        )


def format_cell(value) -> str:
    return f"{value:.5f}" if isinstance(value, float) else str(value)


def summarize(name: str, values: list[float]) -> dict[str, float]:
    """Return the median, and the 20 and 80 percentiles."""
    low, *_, high = statistics.quantiles(values, n=5)
    return {name: statistics.median(values), f"{name}_20": low, f"{name}_80": high}


def check() -> None:
    """Train a tiny model with every variant, and again with an overflow in between."""
    jax.config.update("jax_platforms", "cpu")
    batch = make_batch(TINY)
    overflow = batch | {"weights": np.full_like(batch["weights"], np.inf)}
    expected = None
    for label, variant in compile_variants(TINY).items():
        losses, state = [], variant.make_state(TINY)
        for _ in range(6):
            state, loss = variant.train(state)
            losses.append(float(loss))
        expected = expected or losses
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=label)
        assert losses[-1] < losses[0]
        text = "nothing to skip"
        if label != BASELINE:
            repeated, state = [], variant.state
            for turn in range(7):
                # Copies: the step donates the buffers of the state.
                before = jax.tree.map(np.array, (state[0], get_inner_state(state)))
                state, loss = variant.train(state, overflow if turn == 3 else batch)
                after = (state[0], get_inner_state(state))
                if turn == 3:
                    assert not np.isfinite(loss)
                    jax.tree.map(np.testing.assert_array_equal, before, after)
                    assert variant.read_scale(state) == SCALE / 2
                else:
                    repeated.append(float(loss))
            np.testing.assert_allclose(repeated, losses, rtol=1e-6, err_msg=label)
            text = "the overflow changed nothing but the scale"
        assert variant.traces == 1, f"{label} was traced {variant.traces} times"
        print(f"{label:22} losses {losses[0]:.6f} to {losses[-1]:.6f}; {text}; 1 trace")


def get_inner_state(state):
    """Return the state of the optimizer itself, without a wrapper."""
    return getattr(state[1], "inner_state", state[1])


def main(device: str, folder: Path) -> None:
    jax.config.update("jax_platforms", device)
    others = [name for name in ("flax", "jmp", "optax") if not find_missing(name)]
    machine = describe("jax", "jaxlib", *others)
    if device != "cpu":
        machine = {"gpu": jax.devices()[0].device_kind, **machine}
    with (folder / f"jax_step.{device}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, *machine])
        start = time.perf_counter()
        for name, case in CASES[device].items():
            elapsed = time.perf_counter() - start
            if elapsed > TIME_LIMIT_SECONDS[device]:
                print(f"not run: {name}, after {elapsed:.0f} s")
                break
            measure(name, case, lambda row: writer.writerow([*row, *machine.values()]))
            file.flush()


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check()
    else:
        main(sys.argv[1], Path(sys.argv[2]))
