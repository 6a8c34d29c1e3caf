"""What stays in float32, and what is refused because it would be needed in both."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import lossscale.torch as ls  # noqa: E402
from lossscale.errors import SettingError  # noqa: E402

X = torch.ones(2, 4)


def vector(*names, shape=(4,)):
    """Return the class of a layer with parameters of one shape."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.ones(shape)))

        def forward(self, x):
            for name in names:
                x = x * getattr(self, name)
            return x

    return Layer


class Matrix(vector("bias")):
    """What contains a normalisation, and multiplies by a matrix."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.dense(self.norm(x)) + self.bias


class OwnMatrix(vector("scale")):
    """The same in one module."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return (x * self.scale) @ self.weight


def named(name, base):
    return type(name, (base,), {})()


@pytest.mark.parametrize(
    "name",
    [
        "LlamaRMSNorm",
        "RmsNorm2d",
        "T5LayerNorm",
        "LayerNorm2d",
        "LayerNormFp32",
        "NemotronLayerNorm1P",
        "MambaRMSNormGated",
        "FrozenBatchNorm2d",
        "BatchNormAct2d",
        "Fp32GroupNorm",
        "FilterInstanceNorm",
        "LayerNormalization",
    ],
)
def test_a_normalisation_of_another_package_is_known_by_its_name(name):
    model = nn.Sequential(nn.Linear(4, 4), named(name, vector("weight", "bias")))
    report = ls.to_float16(model)
    assert {"1": "normalisation"} == report.reasons
    model(X)


def test_buffers_make_a_normalisation_too():
    class FrozenBatchNorm2d(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_var", torch.full((4,), 1e-8))

        def forward(self, x):
            return x * self.running_var.rsqrt()

    model = nn.Sequential(nn.Linear(4, 4), FrozenBatchNorm2d())
    ls.to_float16(model)
    assert model(X).isfinite().all()


def test_a_normalisation_with_a_weight_for_each_head_is_one():
    norm = named("CohereLayerNorm", vector("weight", shape=(2, 4)))
    assert ("1",) == ls.to_float16(nn.Sequential(nn.Linear(4, 4), norm)).kept


def test_a_subclass_of_a_normalisation_is_one():
    class RMSNorm(vector("weight")):
        pass

    model = nn.Sequential(nn.Linear(4, 4), named("Scaling", RMSNorm))
    assert ("1",) == ls.to_float16(model).kept


@pytest.mark.parametrize(
    "name", ["GroupNormal", "Abnormal", "LayerNormalizer", "Normalize", "SublayerNorm"]
)
def test_other_words_are_no_normalisation(name):
    model = nn.Sequential(nn.Linear(4, 4), named(name, vector("weight")))
    assert () == ls.to_float16(model).kept
    model(X)


@pytest.mark.parametrize(
    "name",
    ["Wav2Vec2EncoderStableLayerNorm", "LayerNormLinear", "HubertNoLayerNormConvLayer"],
)
def test_a_layer_with_matrices_is_converted_whatever_its_name(name):
    model = nn.Sequential(named(name, Matrix), named(name, OwnMatrix))
    report = ls.to_float16(model)
    assert ("0", "0.dense", "1") == report.converted
    assert ("0.norm",) == report.kept
    model(X)


class Heads(nn.Module):
    """Parts in containers that have no forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])
        self.more = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(4, 5)])})

    def forward(self, x):
        x = self.body(x)
        return [head(x) for head in [*self.heads, *self.more["a"]]]


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["heads"], ("heads.0", "heads.1")),
        (["more"], ("more.a.0",)),
        ([nn.ModuleList], ("heads.0", "heads.1", "more.a.0")),
    ],
)
def test_what_a_kept_container_has_is_kept(names, kept):
    model = Heads()
    report = ls.to_float16(model, keep_float32=names)
    assert kept == report.kept
    assert all(reason.startswith("part of '") for reason in report.reasons.values())
    assert [torch.float32] * 3 == [out.dtype for out in model(X)]


def test_models_in_a_container_are_cast_around_one_by_one():
    models = nn.ModuleDict(
        {"one": nn.Linear(4, 2), "two": nn.LayerNorm(4), "three": Heads()}
    )
    ls.to_float16(models)
    assert torch.float32 == models["one"](X).dtype == models["two"](X).dtype
    assert torch.float32 == models["three"](X)[0].dtype
    ls.to_float32(models)
    ls.to_float16(models)


def test_a_model_in_another_one_of_a_container_is_refused():
    models = nn.ModuleDict({"model": Heads()})
    models["body"] = models["model"].body
    with pytest.raises(SettingError, match=r"'body' and 'model\.body' are the same"):
        ls.to_float16(models)
    assert torch.float32 == models["body"].weight.dtype


class Tied(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.other = nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.other(self.first(x)))


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_shared_module_is_kept_by_any_of_its_names(name):
    model = Tied()
    report = ls.to_float16(model, keep_float32=[name])
    assert (("other",), ("first",)) == report[:2]
    model(X)


def test_a_module_in_a_kept_one_and_outside_of_it_is_refused_and_nothing_changes():
    model = nn.Sequential()
    model.block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    model.again = model.block[0]
    with pytest.raises(SettingError, match=r"'block\.0' and 'again' are the same"):
        ls.to_float16(model, keep_float32=["block"])
    assert torch.float32 == model.again.weight.dtype
    ls.to_float16(model, keep_float32=["again"])  # what the message says to do
    model(X)


def test_a_shared_normalisation_is_kept_wherever_it_is():
    norm = nn.LayerNorm(4)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), norm), nn.Linear(4, 4), norm)
    assert ("0.1",) == ls.to_float16(model).kept
    model(X)
    ls.to_float32(model)
    model(X)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.GELU()

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0])


@pytest.mark.parametrize("keep", ["attention.out_proj", nn.Linear])
def test_attention_is_kept_with_its_output_projection(keep):
    # torch reads the weights of the projection and never calls it.
    model = Attention()
    report = ls.to_float16(model, keep_float32=[keep])
    assert ("attention", "attention.out_proj") == report.kept
    assert "'attention.out_proj'" in report.reasons["attention"]
    model(X[None])


def test_single_parameters_and_buffers_are_kept_by_name():
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.ones(1))
    model.scale.grad = torch.ones(1)
    model.register_buffer("table", torch.ones(2))
    report = ls.to_float16(model, keep_float32=["scale", "table"])
    assert (("",), ("scale", "table")) == report[:2]
    assert torch.float32 == model.scale.dtype == model.table.dtype
    assert torch.float32 == model.scale.grad.dtype


def test_a_parameter_list_is_converted_and_kept():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(4), torch.ones(4)])
            self.matrices = nn.ParameterList([torch.ones(4, 4)])

        def forward(self, x):
            return x @ self.matrices[0] * self.scales[0]

    model = Model()
    report = ls.to_float16(model, keep_float32=["scales"])
    assert (("matrices",), ("scales",)) == report[:2]
    assert torch.float32 == model(X).dtype
    model.scales[0].grad = None
    model(X).sum().backward()
    assert torch.float32 == model.scales[0].grad.dtype
