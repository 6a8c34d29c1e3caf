"""Faults that make the forward pass or the loss not finite: no scale helps."""

import math
import warnings

import torch
from torch import nn

from helpers.planted.fault import (
    Block,
    Middle,
    autocast_step,
    normal_batch,
    plain_step,
    plant,
)
from lossscale.torch import to_float16


class Attention(nn.Module):
    """One head, written out; the scores can be made large, or masked."""

    def __init__(self, width=8, gain=1.0):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.gain = gain

    def forward(self, x, mask=None):
        q, k = self.query(x) * self.gain, self.key(x) * self.gain
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        return scores.softmax(-1) @ x.to(scores.dtype)


class Transformer(nn.Module):
    """An embedding, attention, a head."""

    def __init__(self, gain=1.0, mask=None):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.attention = Attention(gain=gain)
        self.head = nn.Linear(8, 8)
        self.mask = mask

    def forward(self, x):
        return self.head(self.attention(self.embed(x), self.mask))


@plant(
    "attention",
    "forward",
    "overflow",
    "bmm",
    role="intermediate",
    nan=("attention", "inf - inf"),
)
def attention_logits_too_large():
    model = Transformer(gain=1000.0)
    return model, autocast_step(model, normal_batch()[None])


@plant("attention", "forward", "row of -inf", "softmax", role="intermediate")
def softmax_of_a_masked_row():
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[2] = True
    model = Transformer(mask=mask)
    return model, autocast_step(model, normal_batch()[None])


@plant("middle", "forward", "0 / 0", "div", role="output")
def norm_without_epsilon():
    model = Block(lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt())
    nn.init.zeros_(model.embed.weight)
    nn.init.zeros_(model.embed.bias)
    return model, autocast_step(model, normal_batch())


@plant("1", "forward", "0 / 0", "layer_norm", role="output")
def layer_norm_with_epsilon_0():
    model = nn.Sequential(nn.Identity(), nn.LayerNorm(8, eps=0.0), nn.Linear(8, 8))
    return model, plain_step(model, torch.ones(4, 8))


@plant("head", "forward", "overflow", "to", role="input")
def embedding_with_huge_values():
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(10, 8))
    model.add_module("head", nn.Linear(8, 8))
    with torch.no_grad():
        model.embed.weight[3] = 1e6
    return model, autocast_step(model, torch.tensor([1, 3, 5]))


@plant("1", "forward", "overflow", "to", role="parameter", tensor="1.weight")
def weight_beyond_float16():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight[0, 0] = 1e5
    return model, autocast_step(model, normal_batch())


@plant(None, "forward", "log of 0", "log", role="intermediate")
def loss_with_log_of_0():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def loss_of(output):
        return -output.float().log().mean()

    return model, autocast_step(model, normal_batch(), loss_of)


@plant("middle", "forward", "log of 0", "log", role="output")
def log_of_a_softmax():
    model = Block(lambda x: (x * 1000).softmax(-1).half().log())
    return model, autocast_step(model, normal_batch())


@plant(None, "forward", "0 / 0", "div", role="loss")
def loss_divided_by_a_count_of_0():
    model = nn.Sequential(nn.Linear(8, 8))
    mask = torch.zeros(4, 8)

    def loss_of(output):
        return (output.float().pow(2) * mask).sum() / mask.sum()

    return model, autocast_step(model, normal_batch(), loss_of)


@plant(None, "forward", "0 / 0", "nll_loss_forward", role="loss")
def cross_entropy_of_ignored_targets():
    model = nn.Sequential(nn.Linear(8, 8))
    targets = torch.full((4,), -100)

    def loss_of(output):
        return nn.functional.cross_entropy(output.float(), targets)

    return model, autocast_step(model, normal_batch(), loss_of)


class Residual(nn.Module):
    """A stream to which every block adds eight times itself."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Middle(_eight_times_more) for _ in range(12))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _eight_times_more(x):
    return x + 7 * x


@plant("blocks.5", "forward", "overflow", "mul", role="intermediate")
def exploding_residuals():
    # 8**5 = 32,768 goes into the sixth block, and 7 * 32,768 is beyond 65,504.
    model = Residual()
    to_float16(model)
    return model, plain_step(model, torch.ones(4, 8))


@plant("middle", "forward", "overflow", "add", nan=("middle", "inf - inf"))
def inf_minus_inf_of_two_branches():
    model = Block(lambda x: (60000 + x.abs() + 60000) - (x.abs() + 65000 + 60000))
    to_float16(model)
    return model, plain_step(model, normal_batch())


@plant("middle", "forward", "overflow", "exp", role="output")
def exp_overflow():
    model = Block(lambda x: (x * 0 + 12).exp())
    to_float16(model)
    return model, plain_step(model, normal_batch())


@plant("middle", "forward", "overflow", "pow", role="intermediate")
def sum_of_squares_in_float16():
    model = Block(lambda x: x * (300 + x).pow(2).mean(-1, keepdim=True).sqrt())
    to_float16(model)
    return model, plain_step(model, normal_batch())


@plant("1", "forward", "overflow", "addmm", role="output")
def linear_layer_overflow():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].bias.fill_(1000.0)
        model[1].weight.fill_(1000.0)
    return model, autocast_step(model, normal_batch())


@plant("1", "forward", "overflow", "convolution", role="output")
def convolution_overflow():
    model = nn.Sequential(nn.Identity(), nn.Conv2d(1, 2, 3), nn.ReLU())
    with torch.no_grad():
        model[1].weight.fill_(1000.0)
    return model, autocast_step(model, torch.full((1, 1, 5, 5), 100.0))


@plant("1", "forward", "overflow", "convolution", role="output")
def convolution_overflow_before_a_relu_in_place():
    model = nn.Sequential(
        nn.Identity(), nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 3)
    )
    with torch.no_grad():
        model[1].weight.fill_(1000.0)
    return model, autocast_step(model, torch.full((1, 1, 7, 7), 100.0))


@plant("middle", "forward", "log of 0", "log", role="intermediate")
def log_of_0_with_a_sum_in_place():
    model = Block(lambda x: (x * 0).log().mul(2.0).add_(1.0))
    return model, autocast_step(model, normal_batch())


def _add_in_place(x):
    y = 1.0 * (x * 0 + 12).exp()
    y += x
    return y


@plant("middle", "forward", "overflow", "exp", role="intermediate")
def residual_added_in_place_to_an_overflow():
    model = Block(_add_in_place)
    to_float16(model)
    return model, plain_step(model, normal_batch())


@plant("middle", "forward", "overflow", "mul", role="output")
def product_in_place_beyond_float16():
    model = Block(lambda x: (x * 0 + 10).mul_(1e4))
    to_float16(model)
    return model, plain_step(model, normal_batch())


@plant("middle", "forward", "division by zero", "rsqrt", nan=("middle", "inf * 0"))
def batch_norm_in_place_without_epsilon():
    def normalise(x):
        x = x.float() * 0 + 1
        return x.subtract(x.mean(0)).mul_(x.var(0).rsqrt()).add_(1.0)

    model = Block(normalise)
    return model, autocast_step(model, normal_batch())


@plant("middle", "forward", "division by zero", "rsqrt", nan=("middle", "inf * 0"))
def epsilon_that_float16_rounds_to_0():
    def normalise(x):
        x = x * 0
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-8).rsqrt()

    model = Block(normalise)
    to_float16(model)
    return model, plain_step(model, normal_batch())


@plant("middle", "forward", "constant", "mul", role="output")
def product_with_a_nan():
    model = Block(lambda x: x * math.nan)
    return model, autocast_step(model, normal_batch())


@plant("middle", "forward", "constant", "add", role="output", nan=("head", "inf - inf"))
def sum_with_an_infinity():
    model = Block(lambda x: x + math.inf)
    return model, autocast_step(model, normal_batch())


def _assign_nan(x):
    y = x.clone()
    y[0, 0] = math.nan
    return y


@plant("middle", "given", "constant", None, role="constant")
def nan_written_to_one_element():
    model = Block(_assign_nan)
    return model, autocast_step(model, normal_batch())


@plant("middle", "forward", "constant", "masked_fill", nan=("middle", "inf * 0"))
def masked_scores_without_a_softmax():
    def attend(x):
        mask = torch.eye(4, dtype=torch.bool)
        return (x @ x.T).masked_fill(mask, -math.inf) @ torch.zeros_like(x)

    model = Block(attend)
    return model, autocast_step(model, normal_batch())


@plant("middle", "forward", "overflow", "to", role="intermediate")
def cast_to_float16_by_hand():
    model = Block(lambda x: (x * 0 + 1e6).half().float())
    return model, plain_step(model, normal_batch())


@plant("middle", "forward", "too few values", "var", role="intermediate")
def variance_of_one_element():
    def normalise(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of it
            return x / (1 + x.var(0))

    model = Block(normalise)
    return model, autocast_step(model, normal_batch(rows=1))


@plant("middle", "forward", "0 / 0", "div")
def standard_score_of_a_constant():
    model = Block(lambda x: (x * 0 + 1 - 1) / (x * 0).std(0))
    return model, autocast_step(model, normal_batch())


@plant("middle", "forward", "0 / 0", "div")
def cosine_similarity_of_zeros():
    def cosine(x):
        y = torch.zeros_like(x)
        product = (x * y).sum(-1, keepdim=True)
        return x * (product / (x.norm(dim=-1, keepdim=True) * y.norm(dim=-1)[:, None]))

    model = Block(cosine)
    return model, autocast_step(model, normal_batch())


@plant("middle", "forward", "negative base", "pow", role="output")
def power_of_a_negative_number():
    model = Block(lambda x: x.pow(0.3))
    return model, autocast_step(model, normal_batch())


@plant("middle", "forward", "root of a negative number", "sqrt", role="output")
def root_of_a_negative_number():
    model = Block(lambda x: (x * 0 - 1e-3).sqrt())
    return model, autocast_step(model, normal_batch())


@plant("middle", "forward", "outside the domain", "acos", role="output")
def acos_beyond_1():
    model = Block(lambda x: (x * 0 + 1.01).acos())
    return model, autocast_step(model, normal_batch())


@plant("middle", "forward", "division by zero", "reciprocal")
def reciprocal_of_a_learned_0():
    model = Block(lambda x: x)
    nn.init.zeros_(model.middle.weight)
    weight = model.middle.weight
    model.middle.function = lambda x: x + 1 / weight
    return model, autocast_step(model, normal_batch())


@plant("middle", "forward", "overflow", "div", role="output")
def division_by_a_small_mask_sum():
    model = Block(lambda x: (x * 0 + 10) / 1e-4)
    to_float16(model)
    return model, plain_step(model, normal_batch())


@plant("1", "forward", "overflow", "mul", role="output")
def dropout_with_a_large_factor():
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.999), nn.Linear(64, 8))
    nn.init.constant_(model[0].bias, 1000.0)
    to_float16(model)
    return model, plain_step(model, normal_batch(rows=64))


@plant("0", "given", "batch", None, role="batch")
def nan_in_the_batch():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    batch = normal_batch()
    batch[1, 3] = math.nan
    return model, autocast_step(model, batch)


@plant("0", "given", "batch", None, role="batch", nan=("0", "inf * 0"))
def inf_in_the_batch():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.zeros_(model[0].weight)
    batch = normal_batch()
    batch[1, 3] = math.inf
    return model, autocast_step(model, batch)


@plant("0", "given", "batch", None, role="batch", nan=("0", "inf * 0"))
def minus_inf_in_the_batch():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.zeros_(model[0].weight)
    batch = normal_batch()
    batch[1, 2] = -math.inf
    return model, autocast_step(model, batch)


@plant(None, "forward", "log of 0", "log", micro_batch=2)
def log_of_0_in_the_preprocessing_of_a_micro_batch():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def step(scaler):
        for factor in (1.0, 1.0, 0.0):
            features = (normal_batch().abs() * factor).log().abs()
            autocast_step(model, features)(scaler)

    return model, step


@plant("discriminator", "forward", "overflow", "to", role="input", loss=1)
def second_loss_of_two_networks():
    model = nn.ModuleDict({"generator": nn.Linear(8, 8)})
    model["discriminator"] = nn.Linear(8, 1)

    def step(scaler):
        with torch.autocast("cpu", torch.float16):
            fake = model["generator"](normal_batch())
            loss = model["discriminator"](fake).float().mean()
        scaler.scale(loss).backward()
        with torch.autocast("cpu", torch.float16):
            loss = model["discriminator"](1e6 * normal_batch()).float().mean()
        scaler.scale(loss).backward()

    return model, step


@plant("0", "given", "batch", None, role="batch", micro_batch=1)
def one_bad_micro_batch():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    batches = [normal_batch() for _ in range(3)]
    batches[1][0, 0] = math.nan

    def step(scaler):
        for batch in batches:
            autocast_step(model, batch)(scaler)

    return model, step


@plant("1", "given", "parameter", None, role="parameter", tensor="1.weight")
def float16_weights_after_an_overflowing_update():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    to_float16(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=6e4)
    step = plain_step(model, normal_batch())
    (100 * model(normal_batch()).pow(2).mean()).backward()
    model[0].zero_grad()  # the second layer alone is updated
    model[1].bias.grad = None
    optimizer.step()
    optimizer.zero_grad()
    return model, step


@plant("1", "given", "buffer", None, role="buffer", tensor="1.running_mean")
def nan_in_running_statistics():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).eval()
    model[1].running_mean[2] = math.nan
    return model, autocast_step(model, normal_batch())
