# SPDX-License-Identifier: Apache-2.0
"""Other libraries' behaviour, as data.

Each preset is a `Dynamic` that takes the same steps as the library it is named after,
with a sentence on where the facts come from and one on what the original does that
ours does not. The tests compare each with the installed original or with a recording
of it. Where an original has no floor or cap and runs off to 0 or infinity, the preset
stops at the last safe number; up to there the two agree.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lossscale.core.policies import Dynamic
from lossscale.core.validation import FLOAT32_MAX, did_you_mean
from lossscale.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A library's behaviour: its settings, their source, and what remains different.

    Example:
        >>> from lossscale import presets
        >>> presets.PRESETS["flax"].policy.growth_delay
        'always'
    """

    name: str
    """What to pass to `get`."""
    policy: Dynamic
    """The settings under which our rule takes the library's steps."""
    source: str
    """Where the facts come from."""
    differs: str
    """What the original does that the preset does not."""


_NO_BOUNDS = (
    "The original has no floor: it halves on to 0, from which it never returns. "
    "Ours stops at 2**-126."
)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="torch",
            policy=Dynamic(max_scale=FLOAT32_MAX),
            source="torch.amp.GradScaler and torch._amp_update_scale_, torch 2.13.",
            differs=_NO_BOUNDS
            + " Growth fires at the interval or above it, torch's only exactly at it."
            " A factor that is no float32 number, such as 0.8, is rounded to one here;"
            " torch multiplies by it in float64.",
        ),
        Preset(
            name="keras",
            policy=Dynamic(init_scale=2.0**15, max_scale=FLOAT32_MAX),
            source="keras.optimizers.LossScaleOptimizer, Keras 3.15.",
            differs=_NO_BOUNDS + " It has no cap either: it doubles on to infinity.",
        ),
        Preset(
            name="tensorflow",
            policy=Dynamic(
                init_scale=2.0**15,
                backoff_divisor=2.0,
                min_scale=1.0,
                max_scale=FLOAT32_MAX,
            ),
            source="tf.compat.v1.mixed_precision.DynamicLossScale, TensorFlow 1.14 to "
            "2.21, and tf.keras's LossScaleOptimizer.",
            differs="An optimised graph of the original multiplies by a rounded "
            "reciprocal where it is written to divide; ours divides everywhere.",
        ),
        Preset(
            name="tensorflow_contrib",
            policy=Dynamic(
                init_scale=2.0**15,
                backoff_factor=0.8,
                hysteresis=2,
                min_scale=1.0,
                max_scale=FLOAT32_MAX,
            ),
            source="tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager, "
            "TensorFlow 1.15.",
            differs="The original has no default for the first scale and the growth "
            "interval; here they are those of DynamicLossScale.",
        ),
        Preset(
            name="flax",
            policy=Dynamic(
                max_scale=FLOAT32_MAX, at_max="clamp", growth_delay="always"
            ),
            source="flax.training.dynamic_scale.DynamicScale, flax 0.12.",
            differs="Nothing up to its own bounds.",
        ),
        Preset(
            name="jmp",
            policy=Dynamic(
                init_scale=2.0**15,
                backoff_divisor=2.0,
                min_scale=1.0,
                max_scale=FLOAT32_MAX,
            ),
            source="jmp.DynamicLossScale, jmp 0.0.4.",
            differs="The original forgets any floor but 1 when it passes through jit.",
        ),
        Preset(
            name="apex",
            policy=Dynamic(backoff_divisor=2.0, max_scale=2.0**24, at_max="clamp"),
            source="apex.amp.scaler.LossScaler of NVIDIA/apex, commit 03b0eeb; amp was "
            "removed from apex in 2025.",
            differs=_NO_BOUNDS,
        ),
        Preset(
            name="megatron",
            policy=Dynamic(
                init_scale=2.0**32,
                growth_interval=1000,
                hysteresis=2,
                min_scale=1.0,
                max_scale=FLOAT32_MAX,
                backoff_resets_hysteresis=False,
            ),
            source="megatron.core.optimizer.grad_scaler.DynamicGradScaler, "
            "megatron-core 0.16.",
            differs="The original has no cap: it doubles on to infinity.",
        ),
        Preset(
            name="deepspeed",
            policy=Dynamic(
                growth_interval=1000,
                hysteresis=2,
                min_scale=1.0,
                max_scale=FLOAT32_MAX,
                backoff_divisor=2.0,
                growth_delay="first",
                backoff_resets_hysteresis=False,
            ),
            source="deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler with the "
            "defaults of DeepSpeed's fp16 configuration, DeepSpeed 0.19.",
            differs="The original keeps the scale in float64, so it has no cap, and "
            "raises at the floor.",
        ),
        Preset(
            name="deepspeed_consecutive",
            policy=Dynamic(
                growth_interval=1000,
                hysteresis=2,
                min_scale=1.0,
                max_scale=FLOAT32_MAX,
                backoff_divisor=2.0,
                growth_delay="first",
                consecutive_overflows=True,
                backoff_resets_hysteresis=False,
            ),
            source="deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler with "
            "consecutive_hysteresis.",
            differs="As deepspeed.",
        ),
        Preset(
            name="paddle",
            policy=Dynamic(max_scale=FLOAT32_MAX, consecutive_overflows=True),
            source="paddle.amp.GradScaler, Paddle 3.",
            differs=_NO_BOUNDS + " It has no cap either: it doubles on to infinity.",
        ),
        Preset(
            name="mindspore",
            policy=Dynamic(
                init_scale=2.0**24,
                backoff_divisor=2.0,
                min_scale=1.0,
                max_scale=FLOAT32_MAX,
            ),
            source="mindspore.amp.DynamicLossScaler and DynamicLossScaleManager, "
            "MindSpore 2.10.",
            differs="The original's manager multiplies by a float64 reciprocal, which "
            "for a factor such as 3 is not the quotient, and raises after 1,000 "
            "overflows in a row.",
        ),
    )
}
"""Every preset by name."""


def get(name: str, **overrides: object) -> Dynamic:
    """Return the policy of a library, with some of its settings changed.

    Args:
        name: One of `PRESETS`.
        **overrides: Settings of `Dynamic` that replace the preset's.

    Raises:
        SettingError: If there is no such preset or no such setting.

    Example:
        >>> from lossscale import presets
        >>> presets.get("torch", init_scale=2.0**10).init().scale
        1024.0
    """
    if not isinstance(name, str) or name not in PRESETS:
        message = (
            f"There is no preset {name!r}; there are {', '.join(PRESETS)}."
            f"{did_you_mean(str(name), PRESETS)}"
        )
        raise SettingError(message)
    return make_dynamic(PRESETS[name].policy, overrides)


def make_dynamic(base: Dynamic, overrides: Mapping[str, object]) -> Dynamic:
    """Return a policy with some settings changed, whatever way it backs off.

    Raises:
        SettingError: If there is no such setting.
    """
    settings: dict[str, object] = asdict(base)
    unknown = [key for key in overrides if key not in settings]
    if unknown:
        message = (
            f"Dynamic has no setting {unknown[0]!r}; its settings are "
            f"{', '.join(settings)}.{did_you_mean(unknown[0], settings)}"
        )
        raise SettingError(message)
    # The two ways to back off exclude each other: the one asked for wins. A library
    # with one multiplier for both ways keeps one.
    if "backoff_factor" in overrides or "backoff_divisor" in overrides:
        settings |= {"backoff_factor": None, "backoff_divisor": None}
    elif base.backoff_divisor == base.growth_factor and "growth_factor" in overrides:
        settings["backoff_divisor"] = overrides["growth_factor"]
    return Dynamic(**(settings | dict(overrides)))  # type: ignore[arg-type]
