"""The fault harness on PyTorch, shortened; tools/run_faults.py runs it whole."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from faults import torch_driver  # noqa: E402

STEPS = 300


@pytest.mark.parametrize("configuration", torch_driver.CONFIGURATIONS)
def test_no_fault_reaches_weights_or_state(configuration):
    device = "cuda" if configuration.endswith("capturable") else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    outcome = torch_driver.run(
        configuration, own=False, steps=STEPS, seed=3, device=device
    )
    assert "" == outcome.broken
    assert outcome.applied > STEPS // 10
    assert outcome.skipped > STEPS // 10


def test_torchs_own_scaler_does_not_stand_the_same_faults():
    outcome = torch_driver.run(
        "AdamW foreach", own=True, steps=2000, seed=3, device="cpu"
    )
    assert outcome.broken
