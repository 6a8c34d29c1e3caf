# SPDX-License-Identifier: Apache-2.0
"""How early are alarms, and how often are they false?

    python benchmarks/alarms.py benchmarks/results/alarms.csv
    python benchmarks/alarms.py benchmarks/results/alarms_new_seeds.csv new-seeds

The rules were tuned on the runs of the first table. Those of the second have seeds that
were not used for it.

Lead time: how many steps before the run was lost its first alarm came. A run counts as
lost from the step after which its loss never comes back; of a rebuilt run, from the
step that was published. Any alarm in a healthy run is false.
"""

import sys
from pathlib import Path

from alarm_runs import new_trainings, rebuilt, trainings

from lossscale.diagnostics.alarms import scan
from lossscale.diagnostics.records.layout import describe_policy

HEADS = (
    "run,kind,steps,skipped,lost at,alarms,first alarm,at step,lead,weights good until"
)


def judge(run):
    """Return a row of the table."""
    policy = describe_policy(run.policy) if run.policy_is_recorded else None
    found = list(scan(run.records, policy=policy))
    first = found[0] if found else None
    lead = run.lost - first.step if run.lost and first else ""
    return [
        run.name.replace(",", ""),
        run.kind,
        len(run.records),
        sum(not record.applied for record in run.records),
        run.lost or "",
        "; ".join(f"{a.kind} {a.step}" for a in found),
        first.kind if first else "",
        first.step if first else "",
        lead,
        "" if first is None or first.last_good_step is None else first.last_good_step,
    ]


RUNS = {"tuned-on": (trainings, rebuilt), "new-seeds": (new_trainings,)}


def main(output, runs):
    rows = [judge(run) for make in RUNS[runs] for run in make()]
    text = "\n".join([HEADS, *(",".join(map(str, row)) for row in rows)]) + "\n"
    print(text)
    healthy = [row for row in rows if row[0].startswith("healthy")]
    false = sum(bool(row[6]) for row in healthy)
    print(f"{false} of {len(healthy)} healthy runs raised an alarm")
    lost = [row for row in rows if row[4]]
    before = sum(row[8] != "" and row[8] > 0 for row in lost)
    missed = sum(not row[6] for row in lost)
    print(f"{len(lost)} lost runs: {before} alarms before the loss, {missed} none")
    if output:
        Path(output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else None,
        sys.argv[2] if len(sys.argv) > 2 else "tuned-on",
    )
