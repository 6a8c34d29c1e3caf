"""Four logical devices on the one CPU, set before TensorFlow starts, for strategies."""

import pytest

DEVICES = ("CPU:0", "CPU:1", "CPU:2", "CPU:3")


def pytest_configure(config):
    del config
    try:
        import tensorflow as tf
    except ImportError:
        return
    (cpu,) = tf.config.list_physical_devices("CPU")
    device = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [device] * len(DEVICES))


@pytest.fixture
def folder(tmp_path):
    """A folder for checkpoints, as the string that TensorFlow wants."""
    return str(tmp_path)
