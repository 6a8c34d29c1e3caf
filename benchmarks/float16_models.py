# SPDX-License-Identifier: Apache-2.0
"""Four small models whose gradients pass through float16, for comparisons of policies.

    demo          the network of `lossscale demo`: eight layers, digits, Muon; NumPy
    transformer   two pre-norm layers that predict the characters of Python's reference
                  manual (`pydoc_data.topics`, part of Python); Adam; JAX
    detector      four convolutions that find digits on a canvas: at each of its 576
                  places ten sigmoids under focal loss and an offset, averaged over all
                  places and images; Adam; JAX
    lstm          one LSTM that reads a digit two pixels at a time, 32 steps deep, and
                  classifies it; Adam; JAX

Weights, activations and gradients are stored in float16; master weights and the
optimizer are float32. Every model has

    start(seed)                          the first train state: masters and moments
    draw(random)                         a batch
    gradients(train_state, batch, scale) the loss, and the scaled float16 gradients
    exact(train_state, batch)            the same gradients in float32, without a scale
    apply(train_state, grads, step)      the train state after an update
"""
# ruff: noqa: D102  # the methods of all models are described above

import os
from itertools import pairwise
from typing import Any, NamedTuple

# XLA may leave out roundings to float16 between operations without this flag.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"
)

import jax
import jax.numpy as jnp
import numpy as np

import lossscale.numpy as ls
from lossscale.core.policies import Policy, wanted_measurements
from lossscale.demo import load_digits, muon, network

PROBE_INTERVAL = 20
"""Every so many steps the gradients are compared with exact ones."""

FINAL_STEPS = 20


class Demo:
    """The network of `lossscale demo`."""

    name, steps, batch_size = "demo", 300, 64

    def __init__(self) -> None:
        self.digits = load_digits()

    def start(self, seed: int) -> Any:
        weights = network.initial_weights(np.random.default_rng(seed))
        return weights, [np.zeros_like(weight) for weight in weights]

    def draw(self, random: np.random.Generator) -> Any:
        rows = random.integers(len(self.digits.train_labels), size=self.batch_size)
        return self.digits.train_images[rows], self.digits.train_labels[rows]

    def gradients(self, train_state: Any, batch: Any, scale: Any) -> Any:
        return self._differentiate(train_state, batch, np.float32(scale), np.float16)

    def exact(self, train_state: Any, batch: Any) -> Any:
        return self._differentiate(train_state, batch, np.float32(1), np.float32)[1]

    def _differentiate(
        self, train_state: Any, batch: Any, scale: Any, number: Any
    ) -> Any:
        weights, (images, labels) = train_state[0], batch
        trace = network.forward(weights, images, number)
        loss, slope = network.cross_entropy(trace.logits, labels)
        return loss, network.backward(weights, trace, slope * scale, number)

    def apply(self, train_state: Any, grads: Any, step: int) -> Any:
        rate = muon.RATE * (1 - step / self.steps)
        return muon.step(*train_state, grads, rate)


class JaxModel:
    """A model of JAX under Adam; a subclass gives its parameters, batches and loss."""

    name = ""
    steps = 300
    rate = 2e-3

    def __init__(self) -> None:
        def scaled(masters: Any, batch: Any, scale: Any, dtype: Any) -> Any:
            weights = jax.tree.map(lambda x: x.astype(dtype), masters)

            def compute(weights: Any) -> Any:
                loss = self.loss(weights, batch, dtype)
                return loss * scale, loss

            (_, loss), grads = jax.value_and_grad(compute, has_aux=True)(weights)
            return loss, grads

        def adam(train_state: Any, grads: Any, count: Any) -> Any:
            masters, first, second = train_state
            first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
            second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)
            rate = self.rate * (1 - count / self.steps)

            def move(weight: Any, m: Any, v: Any) -> Any:
                m, v = m / (1 - 0.9 ** (count + 1)), v / (1 - 0.99 ** (count + 1))
                return weight - rate * m / (jnp.sqrt(v) + 1e-8)

            return jax.tree.map(move, masters, first, second), first, second

        self._half = jax.jit(lambda *a: scaled(*a, jnp.float16))
        self._single = jax.jit(lambda *a: scaled(*a, 1.0, jnp.float32))
        self._adam = jax.jit(adam)

    def start(self, seed: int) -> Any:
        masters = self.parameters(np.random.default_rng(seed))
        zeros = jax.tree.map(jnp.zeros_like, masters)
        return masters, zeros, zeros

    def gradients(self, train_state: Any, batch: Any, scale: Any) -> Any:
        loss, grads = self._half(train_state[0], batch, jnp.float32(scale))
        return loss, jax.tree.map(np.asarray, grads)

    def exact(self, train_state: Any, batch: Any) -> Any:
        return jax.tree.map(np.asarray, self._single(train_state[0], batch)[1])

    def apply(self, train_state: Any, grads: Any, step: int) -> Any:
        return self._adam(train_state, grads, jnp.float32(step))

    def parameters(self, random: np.random.Generator) -> Any:
        raise NotImplementedError

    def loss(self, weights: Any, batch: Any, dtype: Any) -> Any:
        raise NotImplementedError


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the mean cross-entropy, computed in float32."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))


def normalize(x: Any, gain: Any) -> Any:
    """Return a layer norm without bias, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * gain


class Transformer(JaxModel):
    """Two pre-norm layers over characters of Python's reference manual."""

    name, layers, width, heads, context, batch_size = "transformer", 2, 64, 4, 64, 8

    def __init__(self) -> None:
        super().__init__()
        from pydoc_data.topics import topics  # its text alone

        text = "\n".join(topics[name] for name in sorted(topics))
        characters = sorted(set(text))
        index = {character: number for number, character in enumerate(characters)}
        self.text = np.array([index[character] for character in text], np.int32)
        self.vocabulary = len(characters)

    def parameters(self, random: np.random.Generator) -> Any:
        def draw(*shape: int) -> Any:
            return jnp.float32(random.normal(0, 0.02, shape))

        width = self.width
        layer = {"qkv": (width, 3 * width), "out": (width, width)}
        layer |= {"up": (width, 4 * width), "down": (4 * width, width)}
        return {
            "embedding": draw(self.vocabulary, width),
            "position": draw(self.context, width),
            "gain": jnp.ones(width),
            "layers": [
                {name: draw(*shape) for name, shape in layer.items()}
                | {"gain_1": jnp.ones(width), "gain_2": jnp.ones(width)}
                for _ in range(self.layers)
            ],
            "head": draw(width, self.vocabulary),
        }

    def draw(self, random: np.random.Generator) -> Any:
        first = random.integers(len(self.text) - self.context - 1, size=self.batch_size)
        rows = first[:, None] + np.arange(self.context + 1)
        return self.text[rows[:, :-1]], self.text[rows[:, 1:]]

    def loss(self, weights: Any, batch: Any, dtype: Any) -> Any:
        del dtype  # that of the embedding
        inputs, labels = batch
        hidden = weights["embedding"][inputs] + weights["position"]
        for layer in weights["layers"]:
            hidden += self._attend(normalize(hidden, layer["gain_1"]), layer)
            wide = normalize(hidden, layer["gain_2"]) @ layer["up"]
            hidden += jax.nn.gelu(wide) @ layer["down"]
        return cross_entropy(
            normalize(hidden, weights["gain"]) @ weights["head"], labels
        )

    def _attend(self, x: Any, layer: Any) -> Any:
        size = self.width // self.heads
        shape = (*x.shape[:-1], 3, self.heads, size)
        queries, keys, values = jnp.moveaxis((x @ layer["qkv"]).reshape(shape), -3, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / size**0.5
        mask = np.tril(np.ones((self.context, self.context), bool))
        scores = jnp.where(mask, scores.astype(jnp.float32), -1e9)
        chosen = jax.nn.softmax(scores).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", chosen, values)
        return mixed.reshape(x.shape) @ layer["out"]


class Lstm(JaxModel):
    """An LSTM that reads a digit two pixels at a time."""

    name, width, batch_size = "lstm", 48, 32

    def __init__(self) -> None:
        super().__init__()
        self.digits = load_digits()

    def parameters(self, random: np.random.Generator) -> Any:
        inputs = 2 + self.width
        gates = random.normal(0, inputs**-0.5, (inputs, 4 * self.width))
        bias = np.zeros(4 * self.width)
        bias[: self.width] = 1.0  # the forget gate starts open
        head = random.normal(0, 0.02, (self.width, 10))
        return {
            name: jnp.float32(x)
            for name, x in {"gates": gates, "bias": bias, "head": head}.items()
        }

    def draw(self, random: np.random.Generator) -> Any:
        rows = random.integers(len(self.digits.train_labels), size=self.batch_size)
        return self.digits.train_images[rows], self.digits.train_labels[rows]

    def loss(self, weights: Any, batch: Any, dtype: Any) -> Any:
        images, labels = batch
        pixels = jnp.moveaxis(images.astype(dtype).reshape(len(labels), 32, 2), 1, 0)
        zeros = jnp.zeros((len(labels), self.width), dtype)

        def step(carry: Any, pair: Any) -> Any:
            cell, hidden = carry
            gates = jnp.concatenate([pair, hidden], -1) @ weights["gates"]
            forget, write, new, read = jnp.split(gates + weights["bias"], 4, -1)
            cell = cell * jax.nn.sigmoid(forget)
            cell += jax.nn.sigmoid(write) * jnp.tanh(new)
            return (cell, jax.nn.sigmoid(read) * jnp.tanh(cell)), None

        (_, hidden), _ = jax.lax.scan(step, (zeros, zeros), pixels)
        return cross_entropy(hidden @ weights["head"], labels)


class Detector(JaxModel):
    """Convolutions that say at every place whether a digit is centred there."""

    name, width, depth, size, batch_size = "detector", 16, 4, 24, 8
    rate = 1e-2

    def __init__(self) -> None:
        super().__init__()
        self.digits = load_digits()

    def parameters(self, random: np.random.Generator) -> Any:
        def draw(inputs: int, outputs: int, deviation: float) -> Any:
            return jnp.float32(random.normal(0, deviation, (inputs, outputs)))

        sizes = [1] + [self.width] * self.depth
        layers = [draw(9 * a, b, (2 / (9 * a)) ** 0.5) for a, b in pairwise(sizes)]
        # As in RetinaNet, every class starts at a probability of 1 %.
        bias = np.concatenate([np.full(10, -np.log(99.0)), np.zeros(2)])
        head = draw(self.width, 12, 0.01)
        return {"layers": layers, "head": head, "bias": jnp.float32(bias)}

    def draw(self, random: np.random.Generator) -> Any:
        size, count = self.size, self.batch_size
        canvas = random.normal(0, 0.1, (count, size, size)).astype(np.float32)
        classes = np.zeros((count, size, size, 10), np.float32)
        offsets = np.zeros((count, size, size, 2), np.float32)
        for image in range(count):
            row, column = random.integers(size - 8, size=2)
            chosen = random.integers(len(self.digits.train_labels))
            digit = self.digits.train_images[chosen].reshape(8, 8)
            canvas[image, row : row + 8, column : column + 8] += digit
            middle = np.s_[image, row + 3 : row + 6, column + 3 : column + 6]
            classes[(*middle, self.digits.train_labels[chosen])] = 1.0
            offsets[middle] = np.stack(np.mgrid[-1:2, -1:2], axis=-1)
        return canvas, classes, offsets

    def loss(self, weights: Any, batch: Any, dtype: Any) -> Any:
        canvas, classes, offsets = batch
        hidden = canvas.astype(dtype)[..., None]
        for layer in weights["layers"]:
            hidden = jax.nn.relu(self._convolve(hidden, layer))
        output = (hidden @ weights["head"] + weights["bias"]).astype(jnp.float32)
        logits, places = output[..., :10], output[..., 10:]
        logs = jax.nn.log_sigmoid(jnp.where(classes > 0, logits, -logits))
        focal = jnp.where(classes > 0, 0.25, 0.75) * (1 - jnp.exp(logs)) ** 2 * -logs
        is_digit = classes.max(-1, keepdims=True)
        return jnp.mean(focal) + jnp.mean(is_digit * jnp.abs(places - offsets))

    def _convolve(self, x: Any, weight: Any) -> Any:
        """Convolve with 3 x 3 weights, by nine shifted copies."""
        wide = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        rows, columns = x.shape[1:3]
        shifted = [
            wide[:, i : i + rows, j : j + columns] for i in range(3) for j in range(3)
        ]
        return jnp.concatenate(shifted, -1) @ weight


MODELS = {model.name: model for model in (Demo, Transformer, Detector, Lstm)}


class Outcome(NamedTuple):
    """What a run did."""

    skipped: int
    first_updates: int
    """Updates in the first 100 steps."""
    attempts: int
    """How often a batch was computed again."""
    lost: float
    """Of the gradient values that are not zero in float32, the fraction that are zero
    in float16; over every 20th step that was finite."""
    final_loss: float
    final_scale: float


def run(
    model: Any,
    policy: Policy,
    seed: int,
    *,
    steps: int | None = None,
    retries: int = 0,
    every_overflow: bool = False,
) -> Outcome:
    """Train a model with a policy.

    Args:
        model: One of these models.
        policy: The policy.
        seed: Chooses the first weights and the batches.
        steps: How many, if not as many as the model's learning rate has.
        retries: How often a batch that overflows may be computed again.
        every_overflow: Do so on every step, and not only while `AutoStart` searches.
    """
    steps = steps or model.steps
    random = np.random.default_rng(seed)
    train_state, state = model.start(seed), ls.init(policy)
    applied, losses, attempts, lost, found = [], [], 0, 0, 0
    for step in range(steps):
        batch = model.draw(random)
        for attempt in range(retries + 1):
            attempts += attempt > 0
            may_retry = every_overflow or (retries and policy.is_starting(state))
            loss, stored = model.gradients(train_state, batch, state.scale)
            measured = {"amax", *wanted_measurements(policy)}
            grads, signal = ls.unscale(stored, state, measure=measured)
            state = ls.update(policy, state, signal)
            if signal.finite or not may_retry:
                break
        if step % PROBE_INTERVAL == 0 and signal.finite:
            exact = jax.tree.leaves(model.exact(train_state, batch))
            for ours, theirs in zip(jax.tree.leaves(stored), exact, strict=True):
                lost += int(np.count_nonzero((ours == 0) & (theirs != 0)))
                found += int(np.count_nonzero(theirs))
        if signal.finite:
            train_state = model.apply(train_state, grads, step)
        applied.append(bool(signal.finite))
        losses.append(float(loss))
    return Outcome(
        skipped=steps - sum(applied),
        first_updates=sum(applied[:100]),
        attempts=attempts,
        lost=lost / max(1, found),
        final_loss=float(np.mean(losses[-FINAL_STEPS:])),
        final_scale=float(state.scale),
    )
