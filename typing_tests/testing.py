"""Types of `lossscale.testing`; checked by mypy, never run."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from lossscale.testing import jax as jax_faults
from lossscale.testing import keras as keras_faults
from lossscale.testing import numpy as numpy_faults
from lossscale.testing import tensorflow as tensorflow_faults
from lossscale.testing import torch as torch_faults
from lossscale.testing.keras_outputs import OutputInjection

model = torch.nn.Linear(2, 2)
injection: torch_faults.Injection = torch_faults.inject(
    model, "weight", "inf", steps=[1, 3], where="output", element=None
)
with injection as entered:
    written: tuple[int, ...] = entered.written
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch_faults.inject(optimizer, "param_groups[0]['params'][0]", 1e4, steps=range(3))
torch_faults.inject(model, "weight", None, steps=1)  # type: ignore[arg-type]
torch_faults.inject([], "weight", "inf", steps=1)  # type: ignore[arg-type]
torch_faults.inject(model, "weight", "inf")  # type: ignore[call-arg]

grads: Any = jax_faults.inject({"w": 1.0}, "['w']", "nan", step=1, steps=2)
grads = jax_faults.inject({}, "", "nan", step=jnp.int32(1), steps={2}, where="gradient")
jax_faults.inject({}, "", "nan", step="1", steps=2)  # type: ignore[arg-type]
grads = tensorflow_faults.inject([], "[0]", "huge", step=1, steps=[2])
arrays: Any = numpy_faults.inject([np.ones(2)], "[0]", "-inf", step=1, steps=1)
fit: keras_faults.Injection = keras_faults.inject(None, "a/b", "inf", steps=1)
output: OutputInjection = keras_faults.inject(None, "a", "inf", steps=1, where="output")
keras_faults.inject(None, "a", "inf", steps=1, where="input")  # type: ignore[call-overload]
