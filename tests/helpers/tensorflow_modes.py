"""The four ways in which TensorFlow runs the same lines.

A test gives each way a `build()`, which makes objects and returns a step: a function
of one tensor that returns tensors. What comes back is a function of a NumPy value
that returns NumPy values, whatever the way.
"""

import contextlib

import numpy as np
import tensorflow as tf


@contextlib.contextmanager
def eager(build, example):
    del example
    step = build()
    yield lambda value: tf.nest.map_structure(np.asarray, step(tf.constant(value)))


@contextlib.contextmanager
def function(build, example, **options):
    del example
    # To trace with AutoGraph takes twice as long. The conformance suite traces with it.
    step = tf.function(build(), autograph=False, **options)
    yield lambda value: tf.nest.map_structure(np.asarray, step(tf.constant(value)))


def xla(build, example):
    return function(build, example, jit_compile=True)


@contextlib.contextmanager
def graph(build, example):
    """A graph of TensorFlow 1 with a session."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        example = np.asarray(example)
        fed = tf.compat.v1.placeholder(example.dtype, example.shape)
        fetched = build()(fed)
        session.run(tf.compat.v1.global_variables_initializer())
        yield lambda value: session.run(fetched, {fed: value})


MODES = {"eager": eager, "function": function, "xla": xla, "graph": graph}
