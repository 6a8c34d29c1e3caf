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


@pytest.mark.parametrize("policy", DATA_POLICIES, ids=lambda p: type(p).__name__)
def test_a_scaler_has_the_states_of_numpy(policy, monkeypatch):
    gpu_cases.small_chunks(monkeypatch, 16, 2, 4)
    policy_cases.check_policy("cpu", policy)
