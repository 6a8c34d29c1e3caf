"""A program of TensorFlow 1, with everything of TensorFlow 2 switched off."""

import json
import subprocess
import sys

import pytest
from helpers.limits import HANG_SECONDS

pytest.importorskip("tensorflow", reason="tensorflow is not installed")

PROGRAM = """
import json, sys
import tensorflow.compat.v1 as tf
import lossscale.tensorflow as mixed_precision

tf.disable_v2_behavior()
def train_and_restore(kind, folder):
    x = tf.placeholder(tf.float32, ())
    weight = tf.get_variable("weight", initializer=1.0)
    step = tf.train.get_or_create_global_step()
    if kind == "manager":
        scale = mixed_precision.ExponentialUpdateLossScaleManager(8, 1, 1, 2, 0.5)
        value = scale.get_loss_scale()
    else:
        scale = mixed_precision.DynamicLossScale(8, 1)
        value = scale()
    momentum = tf.train.MomentumOptimizer(1.0, 0.5)
    optimizer = mixed_precision.LossScaleOptimizer(momentum, scale)
    train = optimizer.minimize(x * weight, step)
    seen = []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for gradient in (1.0, float("nan"), 1.0):
            session.run(train, {x: gradient})
            seen.append([y.item() for y in session.run([weight, value, step])])
        path = tf.train.Saver().save(session, folder + "/model")
    with tf.Session() as session:
        tf.train.Saver().restore(session, path)
        seen.append([y.item() for y in session.run([weight, value, step])])
    return seen

found = {}
for kind in sys.argv[2:]:
    with tf.Graph().as_default():
        found[kind] = train_and_restore(kind, sys.argv[1] + kind)
print(json.dumps(found))
"""


def test_it_trains_skips_saves_and_restores(folder):
    # One process for both: to import TensorFlow takes longer than all the rest.
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder + "/", "manager", "loss scale"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    if finished.returncode:
        raise AssertionError(finished.stderr[-4000:])
    found = json.loads(finished.stdout.splitlines()[-1])
    # Momentum 0.5: steps of 1 and 1.5; the NaN in between leaves no trace.
    expected = [[0.0, 16.0, 1], [0.0, 8.0, 1], [-1.5, 16.0, 2], [-1.5, 16.0, 2]]
    assert {"manager": expected, "loss scale": expected} == found
