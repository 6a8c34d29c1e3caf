# SPDX-License-Identifier: Apache-2.0
"""Several devices on the one CPU: two for TensorFlow's page, eight for JAX's.

They must be there before the framework starts, and other pages start it too. Setting
TensorFlow's a second time, as its page does, changes nothing.
"""

import os
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


def _make_eight_devices():
    flag = "--xla_force_host_platform_device_count=8"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


_make_two_devices()
_make_eight_devices()
