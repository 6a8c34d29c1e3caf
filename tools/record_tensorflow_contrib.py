# SPDX-License-Identifier: Apache-2.0
"""Record traces of tf.contrib's ExponentialUpdateLossScaleManager by running it.

    pip install "tensorflow==1.15.5" "protobuf<3.21" "numpy<1.19" "h5py<3"
    python record_tensorflow_contrib.py OUTDIR

under Python 3.7, the last that TensorFlow 1 runs on; hence the old syntax. Writes
OUTDIR/tensorflow_contrib.jsonl.gz in the format of record_originals.py.
"""

import gzip
import json
import random
import sys
from pathlib import Path

import tensorflow as tf
from tensorflow.contrib.mixed_precision import ExponentialUpdateLossScaleManager

SEED = 20240918
CHOICES = {
    "init_loss_scale": (1.0, 2.0, 7.3, 100.0, 32768.0, 2.0**24, 1e30, 3e38),
    "incr_every_n_steps": (1, 2, 3, 4, 5, 7, 10),
    "decr_every_n_nan_or_inf": (1, 2, 3, 4),
    "incr_ratio": (2, 1.7, 3, 4, 1.5, 10),
    "decr_ratio": (0.8, 0.5, 0.25, 0.75, 0.33, 0.9),
}
RATES = (0.0, 0.05, 0.2, 0.5, 0.9, 1.0)


def record(config, pattern):
    manager = ExponentialUpdateLossScaleManager(**config)
    scales, good, bad = [], [], []
    for finite in pattern:
        manager.update_loss_scale(finite)
        scales.append(float(manager.get_loss_scale().numpy()))
        good.append(int(manager._num_good_steps.numpy()))
        bad.append(int(manager._num_bad_steps.numpy()))
    row = {
        "system": "tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager",
        "version": tf.__version__,
        "config": config,
        "finite": "".join("01"[finite] for finite in pattern),
        "scale": scales,
        "counters": {"good": good, "bad": bad},
    }
    return json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"


def main(outdir):
    tf.compat.v1.enable_eager_execution()
    rng, lines = random.Random(SEED), []
    for _ in range(1000):
        config = {name: rng.choice(values) for name, values in CHOICES.items()}
        rate, steps = rng.choice(RATES), rng.randint(10, 40)
        lines.append(record(config, [rng.random() >= rate for _ in range(steps)]))
    path = Path(outdir) / "tensorflow_contrib.jsonl.gz"
    with gzip.GzipFile(str(path), "wb", mtime=0) as out:
        out.write("".join(lines).encode())


if __name__ == "__main__":
    main(sys.argv[1])
