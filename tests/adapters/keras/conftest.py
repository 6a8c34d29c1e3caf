"""Two devices for TensorFlow's strategies, and Keras's settings as they were."""

import os

import pytest

if os.environ.get("KERAS_BACKEND") == "tensorflow":
    try:
        import tensorflow as tf
    except ModuleNotFoundError:  # the tests say so
        pass
    else:
        # Before anything runs: a strategy over one real device has nothing to merge.
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * 2,
        )


@pytest.fixture(autouse=True)
def _settings():
    yield
    if "KERAS_BACKEND" in os.environ:
        import keras

        keras.config.set_dtype_policy("float32")
        keras.config.set_floatx("float32")
