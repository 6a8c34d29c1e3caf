"""The optimizers' kernels in Triton's interpreter, next to torch's functions."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "TRITON_INTERPRET=1 is not set: the interpreter is chosen when triton loads",
        allow_module_level=True,
    )
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from kernels import gpu_cases, optim_cases  # noqa: E402
from lossscale.torch import optim  # noqa: E402
from lossscale.torch.optim.kernels import addresses, tables  # noqa: E402
from lossscale.torch.optim.kernels.settings import Settings, host_rate  # noqa: E402

BLOCK = 64
CHECKS = dict(optim_cases.checks("cpu", block=BLOCK, many=20, steps=6))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    gpu_cases.small_chunks(monkeypatch, 16, 2, 4)
    gpu_cases.exact_bfloat16(monkeypatch)
    monkeypatch.setattr(tables, "BLOCK", BLOCK)
    monkeypatch.setattr(tables, "ROWS", 16)


# A skipped step has no finite divisor, and does not use it.
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_do_what_torchs_functions_do(name):
    CHECKS[name]()


def test_a_state_dict_that_chooses_torchs_functions_says_so_once():
    def make(**more):
        return optim.AdamW([torch.nn.Parameter(torch.ones(3))], **more)

    loaded = make()
    with pytest.warns(UserWarning, match="foreach and fused of each group"):
        loaded.load_state_dict(make(foreach=True).state_dict())
    loaded.load_state_dict(make(foreach=True).state_dict())
    make(fused=False).load_state_dict(make(fused=False).state_dict())
    make().load_state_dict(make(foreach=True).state_dict())


def test_a_rate_of_the_device_that_is_replaced_by_zero_is_copied():
    settings = Settings(1, torch.device("cpu"))
    of_device = torch.empty((), device="meta")
    for _ in range(2):
        settings.copy([[host_rate(of_device)]])
        settings.copy_rate(0, torch.tensor(0.5))
    settings.copy([[host_rate(0.0)]])
    assert 0.0 == settings.table[0, 0].item()


def test_a_rate_of_the_device_is_not_a_change_at_each_step():
    settings = Settings(1, torch.device("cpu"))
    of_device = torch.empty((), device="meta")
    settings.copy([[host_rate(of_device)]])
    settings.copy_rate(0, torch.tensor(0.5))
    settings.copy([[host_rate(of_device)]])
    assert 0.5 == settings.table[0, 0].item()


def test_a_gradient_that_is_missing_for_a_step_has_no_address():
    grads = [torch.ones(2), torch.ones(3)]
    first, second = (grad.data_ptr() for grad in grads)
    table = addresses.GradientAddresses(2, torch.device("cpu"))
    table.set(grads, has_all=True)
    assert [first, second] == table.table.tolist()
    table.set([grads[0], None], has_all=False)
    assert [first, 0] == table.table.tolist()
    table.set(grads, has_all=True)
    assert [first, second] == table.table.tolist()
