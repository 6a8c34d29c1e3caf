"""Converted models in the rest of torch: files, compilers, ranks, recomputation."""

import copy
import dataclasses
import io
import os
import pickle
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import lossscale.torch as ls  # noqa: E402

X = torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.0, 0.0, -0.5, 3.0]])


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8),
        nn.LayerNorm(8),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()),
        nn.Linear(8, 2),
    )
    ls.to_float16(model, keep_float32=["3"])
    return model


def save_and_load(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),  # noqa: S301
    "torch.save": save_and_load,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_casts_of_its_own(name):
    model = make_model()
    expected = copy.deepcopy(model)(X)
    other = COPIES[name](model)
    model.float()  # the casts of the copy follow the weights of the copy
    assert torch.equal(expected, other(X))
    assert torch.float16 == other[0].weight.dtype
    ls.to_float32(other)
    assert not any(
        [*module._forward_hooks, *module._forward_pre_hooks]
        for module in other.modules()
    )
    assert torch.float32 == other(X).dtype


def test_a_copy_of_a_part_does_not_copy_the_weight_whose_dtype_it_reads():
    model = nn.Sequential(nn.Embedding(1000, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4))
    ls.to_float16(model)
    for index in (1, 2):
        seen = {}
        copy.deepcopy(model[index], seen)
        assert id(model[0].weight) not in seen
    model.append(copy.deepcopy(model[1]))
    tokens = torch.tensor([[1, 2]]).T
    dtypes = []
    for layer in model:
        layer.register_forward_hook(lambda *args: dtypes.append(args[2].dtype))
    for convert in (model.bfloat16, model.float, model.half):
        convert()
        model(tokens.flatten())
    expected = [torch.bfloat16] * 4 + [torch.float32] * 4 + [torch.float16] * 4
    assert expected == dtypes


@pytest.mark.parametrize("way", ["weight_norm", "prune"])
def test_a_weight_that_was_renamed_still_says_the_dtype(way):
    model = make_model()
    if way == "weight_norm":
        nn.utils.parametrizations.weight_norm(model[0])
    else:
        prune.identity(model[0], "weight")
        prune.identity(model[1], "weight")
    model.float()
    assert torch.float32 == model(X).dtype


LOAD = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
for module in model.modules():
    for _ in range(9):
        module.register_forward_pre_hook(lambda module, inputs: None)
        module.register_forward_hook(lambda module, inputs, output: None)
assert model(torch.ones(2, 4)).dtype == torch.float32
"""


def test_new_hooks_of_another_process_do_not_replace_the_casts(tmp_path):
    # torch counts hooks from 0 in every process.
    make = """
import sys, torch, lossscale.torch as ls
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
ls.to_float16(model)
torch.save(model, sys.argv[1])
"""
    for code in (make, LOAD):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "model.pt")],
            check=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )


def test_the_state_dict_has_the_same_keys_throughout():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    keys = list(model.state_dict())
    ls.to_float16(model)
    assert keys == list(model.state_dict())
    saved = copy.deepcopy(model.state_dict())
    ls.to_float32(model)
    assert keys == list(model.state_dict())
    model.load_state_dict(saved)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_model_is_compiled_in_one_graph(backend):
    torch.compiler.reset()
    model = make_model()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for train in (True, False):
        model.train(train)
        reference.train(train)
        actual, expected = compiled(X), reference(X)
        assert torch.equal(expected, actual)
    actual.sum().backward()
    expected.sum().backward()
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)
    model.float()
    torch.testing.assert_close(compiled(X), expected, rtol=1e-2, atol=1e-2)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


# The compiler reads the gradient of what any hook reads from a dataclass.
@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf")
def test_containers_are_cast_in_one_graph():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch):
            return Output(self.linear(batch["x"][0])), {"more": (batch["x"][0],)}

    torch.compiler.reset()
    model = Model()
    ls.to_float16(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    result, more = compiled({"x": [X]})
    assert torch.float32 == result.logits.dtype == more["more"][0].dtype


def test_the_model_is_exported():
    model = make_model().eval()
    program = torch.export.export(model, (X,))
    assert torch.equal(model(X), program.module()(X))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_forward_pass_that_is_computed_again_gives_the_same_gradients(use_reentrant):
    model = make_model().eval()
    reference = copy.deepcopy(model)
    reference(X).sum().backward()
    x = X.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(other.grad, ours.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_around_the_model_changes_no_dtype_outside_of_it(dtype):
    model = make_model()
    with torch.autocast("cpu", dtype):
        result = model(X)
    assert torch.float32 == result.dtype
    result.sum().backward()
    assert all(param.grad.dtype == param.dtype for param in model.parameters())


def test_a_functional_call_computes_with_the_weights_that_it_is_given():
    model = make_model()
    weights = {name: x.float() for name, x in model.named_parameters()}
    buffers = dict(model.named_buffers())
    result = torch.func.functional_call(model, (weights, buffers), X)
    assert torch.float32 == result.dtype


def test_one_rank_of_distributed_data_parallel_trains(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = make_model()
        reference = copy.deepcopy(model)
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(X).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    reference(X).sum().backward()
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(other.grad, ours.grad)
        assert ours.grad.dtype == ours.dtype


class Recurrent(nn.Module):
    """An embedding with padding, an LSTM with its state, a normalisation, a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4, padding_idx=0)
        self.lstm = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens, state=None):
        hidden, state = self.lstm(self.embedding(tokens), state)
        return self.head(self.norm(hidden)), state


@pytest.mark.parametrize("keep", [[], ["lstm"], [nn.Embedding, nn.LSTM]])
def test_a_recurrent_model_gives_its_state_back_to_itself(keep):
    tokens = torch.tensor([[1, 2, 0], [3, 4, 0]])
    torch.manual_seed(0)
    model = Recurrent()
    expected, _ = model(tokens)
    ls.to_float16(model, keep_float32=keep)
    actual, state = model(tokens)
    torch.testing.assert_close(expected, actual, rtol=1e-2, atol=1e-2)
    result, _ = model(tokens, state)
    assert torch.float32 == state[0].dtype == result.dtype
    result.sum().backward()
    assert 0 == model.embedding.weight.grad[0].abs().max()
    ls.to_float32(model)
    actual, _ = model(tokens)
    torch.testing.assert_close(expected, actual, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
@pytest.mark.parametrize("keep", [[], [nn.MultiheadAttention], ["layers.0.linear1"]])
@pytest.mark.parametrize("train", [True, False])
def test_torchs_transformer_computes(train, keep):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).train(train)
    x = torch.randn(2, 3, 8)
    padding = torch.tensor([[False, False, True]] * 2)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)[:, :2]
        ls.to_float16(model, keep_float32=keep)
        actual = model(x, src_key_padding_mask=padding)[:, :2]
    torch.testing.assert_close(expected, actual, rtol=1e-2, atol=1e-2)
