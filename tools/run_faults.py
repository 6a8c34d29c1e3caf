"""Put faults into a training loop, thousands of steps per optimizer, and report.

    python tools/run_faults.py torch
    python tools/run_faults.py torch --device cuda --jobs 14
    KERAS_BACKEND=jax python tools/run_faults.py keras --only Adam

Each optimizer runs with our scaler and with the framework's own, on the same faults:
inf, -inf, NaN, the largest finite number, 1e20, subnormals, zeros, missing gradients,
bursts of hundreds, exceptions at every call, saving and resuming. After every step the
weights and the optimizer's state must be finite, the scale within its bounds, and a
skipped step must have changed nothing. Prints a Markdown table; exits with 1 if our
scaler let anything through. `tests/faults` runs the same, shortened.
"""

import argparse
import functools
import importlib
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.faults import Outcome, table


def run(configuration: str, own: bool, arguments: argparse.Namespace) -> Outcome:
    """Run one optimizer with one scaler."""
    driver = importlib.import_module(f"faults.{arguments.framework}_driver")
    outcome = driver.run(
        configuration,
        own=own,
        steps=arguments.steps,
        seed=arguments.seed,
        device=arguments.device,
    )
    print(outcome, file=sys.stderr, flush=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=("torch", "jax", "tensorflow", "keras"))
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="a part of an optimizer's name")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    arguments = parser.parse_args()
    driver = importlib.import_module(f"faults.{arguments.framework}_driver")
    names = []
    for name in driver.CONFIGURATIONS:
        if arguments.only not in name:
            continue
        if hasattr(driver, "runs_on") and not driver.runs_on(name, arguments.device):
            print(f"{name}: not on {arguments.device}", file=sys.stderr)
            continue
        names += [name, name]
    scalers = [False, True] * (len(names) // 2)
    job = functools.partial(run, arguments=arguments)
    if arguments.jobs == 1:
        outcomes = list(map(job, names, scalers))
    else:
        # A framework with threads of its own, or a GPU, does not survive a fork.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
            outcomes = list(pool.map(job, names, scalers))
    passed = not any(
        outcome.broken
        for outcome, own in zip(outcomes, scalers, strict=True)
        if not own
    )
    print(table(outcomes))
    return 0 if passed and outcomes else 1


if __name__ == "__main__":
    sys.exit(main())
