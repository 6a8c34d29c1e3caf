# SPDX-License-Identifier: Apache-2.0
"""Two logical devices on the one CPU, for the block on distribution strategies.

They must be there before TensorFlow starts, and other pages start it too. Setting them
a second time, as the block does, changes nothing.
"""

from contextlib import suppress


def _make_two_devices():
    with suppress(ImportError):
        import triton  # noqa: F401  # after TensorFlow it would end the process
    try:
        import tensorflow as tf
    except ImportError:
        return
    (cpu,) = tf.config.list_physical_devices("CPU")
    device = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [device, device])


_make_two_devices()
