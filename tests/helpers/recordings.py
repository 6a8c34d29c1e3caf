"""What a recorded configuration means: the original's arguments as a preset."""

from lossscale import presets
from lossscale.core.validation import FLOAT32_MAX, SMALLEST_NORMAL


def tensorflow_contrib(config):
    return presets.get(
        "tensorflow_contrib",
        init_scale=float(config["init_loss_scale"]),
        growth_interval=config["incr_every_n_steps"],
        hysteresis=config["decr_every_n_nan_or_inf"],
        growth_factor=float(config["incr_ratio"]),
        backoff_factor=float(config["decr_ratio"]),
    )


def tensorflow(config):
    return presets.get(
        "tensorflow",
        init_scale=float(config["initial_loss_scale"]),
        growth_interval=config["increment_period"],
        growth_factor=float(config["multiplier"]),
    )


def deepspeed(config):
    return presets.get(
        "deepspeed_consecutive" if config["consecutive_hysteresis"] else "deepspeed",
        init_scale=config["init_scale"],
        growth_interval=config["scale_window"],
        min_scale=config["min_scale"],
        hysteresis=config["delayed_shift"],
    )


def megatron(config):
    return presets.get(
        "megatron",
        init_scale=config["initial_scale"],
        min_scale=config["min_scale"],
        growth_factor=config["growth_factor"],
        backoff_factor=config["backoff_factor"],
        growth_interval=config["growth_interval"],
        hysteresis=config["hysteresis"],
    )


def paddle(config):
    names = {
        "init_loss_scaling": "init_scale",
        "incr_ratio": "growth_factor",
        "decr_ratio": "backoff_factor",
        "incr_every_n_steps": "growth_interval",
        "decr_every_n_nan_or_inf": "hysteresis",
    }
    given = {names[name]: value for name, value in config.items()}
    return presets.get("paddle", **given)


def mindspore(config):
    return presets.get(
        "mindspore",
        init_scale=config["scale_value"],
        growth_factor=float(config["scale_factor"]),
        growth_interval=config["scale_window"],
    )


def apex(config):
    names = {"_loss_scale": "init_scale", "_scale_seq_len": "growth_interval"}
    return presets.get("apex", **{names[name]: v for name, v in config.items()})


def is_normal(scale):
    """Whether an original without floor or cap is still within the normal float32s."""
    return SMALLEST_NORMAL <= scale <= FLOAT32_MAX
