"""Policies that see more than a flag, next to the interpreted kernels."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "TRITON_INTERPRET=1 is not set: the interpreter is chosen when triton loads",
        allow_module_level=True,
    )
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from conformance import DATA_POLICIES

from kernels import gpu_cases, policy_cases
from lossscale.torch.inspection.kernels.policy_trace import trace_step


@pytest.mark.parametrize("policy", DATA_POLICIES, ids=lambda p: type(p).__name__)
def test_a_scaler_has_the_states_of_numpy(policy, monkeypatch):
    gpu_cases.small_chunks(monkeypatch, 16, 2, 4)
    policy_cases.check_policy("cpu", policy)


@pytest.mark.parametrize("policy", DATA_POLICIES, ids=lambda p: type(p).__name__)
def test_a_kernel_has_the_states_of_numpy_whatever_flags_it_is_given(policy):
    policy_cases.check_flags("cpu", policy)


def test_a_policy_of_another_class_is_refused_where_it_asks_for_a_value():
    class Asking(type(DATA_POLICIES[0])):
        def step(self, state, signal, *, where):
            return self.init() if signal.finite else state

    with pytest.raises(TypeError, match="choose by `where`"):
        trace_step(Asking(), has_loss=False, has_measurements=False)
