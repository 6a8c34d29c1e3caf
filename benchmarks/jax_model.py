# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer in plain functions: float16 inside, float32 parameters.

The loss is float32, and so are normalisation and softmax. AdamW is here for machines
without optax.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """A transformer, its batch, and how often it is timed."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    turns: int = 30
    steps: int = 1
    """How many consecutive steps are timed together."""
    donates: bool = True
    """Whether a step donates the buffers of the state that it is passed."""


def make_parameters(case: Case):
    """Return the float32 parameters."""
    rng = np.random.default_rng(0)
    width = case.width

    def make_normal(*shape):
        return 0.02 * rng.standard_normal(shape, dtype=np.float32)

    def make_norm():
        return {"gain": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}

    def make_dense(inputs, outputs):
        return {
            "kernel": make_normal(inputs, outputs),
            "bias": np.zeros(outputs, "float32"),
        }

    blocks = [
        {
            "norm_1": make_norm(),
            "qkv": make_dense(width, 3 * width),
            "out": make_dense(width, width),
            "norm_2": make_norm(),
            "up": make_dense(width, 4 * width),
            "down": make_dense(4 * width, width),
        }
        for _ in range(case.layers)
    ]
    return {
        "tokens": make_normal(case.vocabulary, width),
        "positions": make_normal(case.length, width),
        "blocks": blocks,
        "norm": make_norm(),
    }


def make_batch(case: Case):
    """Return token ids, one more than the inputs, and the loss weight of each."""
    shape = (case.batch, case.length + 1)
    tokens = np.random.default_rng(1).integers(0, case.vocabulary, shape, np.int32)
    return {"tokens": tokens, "weights": np.ones((case.batch, case.length), np.float32)}


def make_loss(case: Case):
    """Return the loss as a function of parameters and batch, in float32."""
    mask = np.tril(np.ones((case.length, case.length), bool))

    def normalize(layer, x):
        standardized = jax.nn.standardize(x.astype(jnp.float32), axis=-1, epsilon=1e-5)
        return (standardized * layer["gain"] + layer["bias"]).astype(jnp.float16)

    def apply_dense(layer, x):
        return x @ layer["kernel"].astype(jnp.float16) + layer["bias"].astype(
            jnp.float16
        )

    def attend(block, x):
        heads = (*x.shape[:2], case.heads, case.width // case.heads)
        query, key, value = (
            part.reshape(heads)
            for part in jnp.split(apply_dense(block["qkv"], x), 3, -1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        scores = jnp.where(mask, scores / heads[-1] ** 0.5, -1e30)
        weights = jax.nn.softmax(scores).astype(jnp.float16)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return apply_dense(block["out"], attended.reshape(x.shape))

    def loss(parameters, batch):
        tokens = batch["tokens"]
        table = parameters["tokens"].astype(jnp.float16)
        x = table[tokens[:, :-1]] + parameters["positions"].astype(jnp.float16)
        for block in parameters["blocks"]:
            x = x + attend(block, normalize(block["norm_1"], x))
            hidden = jax.nn.gelu(
                apply_dense(block["up"], normalize(block["norm_2"], x))
            )
            x = x + apply_dense(block["down"], hidden)
        logits = (normalize(parameters["norm"], x) @ table.T).astype(jnp.float32)
        log_probabilities = jax.nn.log_softmax(logits)
        targets = jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1)[
            ..., 0
        ]
        return -jnp.mean(targets * batch["weights"])

    return loss


class Optimizer(NamedTuple):
    """The two functions of an optax gradient transformation."""

    init: Any
    update: Any


def adamw(rate, b1=0.9, b2=0.999, eps=1e-8, decay=1e-4) -> Optimizer:
    """Return AdamW, for machines without optax."""

    def init(parameters):
        first, second = (jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
        return jnp.int32(0), first, second

    def update(grads, state, parameters):
        count = state[0] + 1
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state[1], grads)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state[2], grads)
        power = count.astype(jnp.float32)

        def compute_update(m, v, p):
            m, v = m / (1 - b1**power), v / (1 - b2**power)
            return -rate * (m / (jnp.sqrt(v) + eps) + decay * p)

        updates = jax.tree.map(compute_update, first, second, parameters)
        return updates, (count, first, second)

    return Optimizer(init, update)
