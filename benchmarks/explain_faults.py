# SPDX-License-Identifier: Apache-2.0
"""What do we, torch's anomaly mode and transformers' DebugUnderflowOverflow say?

    python benchmarks/explain_faults.py benchmarks/results/explain_faults.csv
    python benchmarks/explain_faults.py --markdown

Every fault of tests/helpers/planted is planted into a model of its own, three times,
and each tool is asked. What is right is written down with the fault, not asked of any
of the tools:

- ours: module, pass, operation, cause, and whether a lower scale helps, all of them;
- anomaly mode: the node that it names is the planted operation's;
- DebugUnderflowOverflow: the module that it stops at is the planted one. It watches
  forward passes only.

"nothing" means that the tool ran and had nothing to say.
"""

import csv
import io
import re
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import torch
from machine import describe

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.planted import FAULTS
from transformers.debug_utils import DebugUnderflowOverflow

from lossscale.torch import GradScaler

ROOT = Path(__file__).parent.parent
COLUMNS = (
    *("fault", "module", "pass", "operation", "cause", "lower scale helps"),
    *("ours", "ours is right"),
    *("anomaly mode", "anomaly mode is right"),
    *("DebugUnderflowOverflow", "DebugUnderflowOverflow is right"),
)


def build(fault):
    """Return the model of a fault and its step; the same each time."""
    torch.manual_seed(0)
    return fault.build()


def ask_ours(fault):
    """Return what `GradScaler.explain` says, and whether all of it is right."""
    model, step = build(fault)
    scaler = GradScaler("cpu", init_scale=fault.scale, module=model)
    seen = scaler.explain(lambda: step(scaler))
    found = seen.first
    expected = (fault.module, fault.direction, fault.operation, fault.origin)
    said = (found.module, found.direction, found.operation, found.origin)
    right = expected == said and fault.helps is seen.lower_scale_helps
    helps = {True: "a lower scale helps", False: "no lower scale helps"}
    return f"{found}; {helps[seen.lower_scale_helps]}", right


def ask_anomaly_mode(fault):
    """Return the error of torch's anomaly mode, and whether it names the operation."""
    _, step = build(fault)
    scaler = torch.amp.GradScaler("cpu", init_scale=fault.scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                step(scaler)
        except RuntimeError as error:
            text = str(error)
        else:
            return "nothing", False
    named = re.search(r"Function '(\w+)'", text)
    node = named[1] if named else ""
    expected = fault.node or f"{(fault.operation or '?').capitalize()}Backward0"
    return text, node.lower() == expected.lower()


def ask_debug_utils(fault):
    """Return where DebugUnderflowOverflow stops, and whether it is the module."""
    model, step = build(fault)
    scaler = torch.amp.GradScaler("cpu", init_scale=fault.scale)
    printed = io.StringIO()
    with redirect_stdout(printed):
        debug = DebugUnderflowOverflow(model)
        try:
            step(scaler)
        except ValueError as error:
            if "inf/nan detected" not in str(error):
                raise
        # It stops where its own reading of a tensor fails, such as one of integers.
        except RuntimeError as error:
            return f"its own error: {error}", False
    if not debug.detected_overflow:
        return "nothing", False
    text = printed.getvalue()
    what = [
        line for line in text.splitlines() if line.endswith((" has nans", " has infs"))
    ]
    frames = re.findall(rf"^{debug.prefix} (?!\*)(\S* ?\w+)$", text, re.MULTILINE)
    name, _, kind = frames[-1].rpartition(" ")
    return f"{name} ({kind}): {', '.join(what)}", name == fault.module


def ask(fault):
    """Return a row: what is planted, and what each tool says."""
    row = [
        fault.name,
        "outside the model" if fault.module is None else fault.module,
        fault.direction,
        fault.operation or "",
        fault.origin,
        "yes" if fault.helps else "no",
    ]
    for tool in (ask_ours, ask_anomaly_mode, ask_debug_utils):
        said, right = tool(fault)
        row += [" ".join(said.split()), "yes" if right else "no"]
    return row


def write_markdown(rows):
    """Print the table of the page, and how many each tool got right."""
    head = (
        *("planted fault", "module", "pass", "operation", "cause"),
        *("a lower scale helps", "ours", "anomaly mode", "DebugUnderflowOverflow"),
    )
    print(f"| {' | '.join(head)} |")
    print(f"|{'---|' * len(head)}")
    for row in rows:
        module = f"`{row[1]}`" if " " not in row[1] else row[1]
        operation = f"`{row[3]}`" if row[3] else "none"
        tools = row[7], row[9], row[11]
        cells = (row[0], module, row[2], operation, row[4], row[5], *tools)
        print(f"| {' | '.join(cells)} |")
    print()
    print("| tool | right | said something else | said nothing |")
    print("|---|---|---|---|")
    names = "`scaler.explain`", "anomaly mode", "`DebugUnderflowOverflow`"
    for index, name in zip((6, 8, 10), names, strict=True):
        right = sum(row[index + 1] == "yes" for row in rows)
        silent = sum(row[index] == "nothing" for row in rows)
        print(f"| {name} | {right} | {len(rows) - right - silent} | {silent} |")


def main(arguments):
    rows = [ask(fault) for fault in FAULTS]
    for row in rows:
        print(row[0], *(f"{COLUMNS[i]}: {row[i]}" for i in (6, 8, 10)), sep="\n    ")
    if "--markdown" in arguments:
        print()
        write_markdown(rows)
        return
    for output in arguments:
        machine = describe("torch", "transformers")
        with Path(output).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*COLUMNS, *machine])
            writer.writerows([*row, *machine.values()] for row in rows)


if __name__ == "__main__":
    main(sys.argv[1:])
