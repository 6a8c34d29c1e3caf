"""How far a step goes through the package: calls, depth and files; no timings."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossscale  # noqa: E402
from lossscale.torch import GradScaler, native  # noqa: E402

PACKAGE = str(Path(lossscale.__file__).parent)
NOT_COUNTED = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


class Profile:
    """Counts the calls of our functions, their depth, and the files that they are in.

    Comprehensions, lambdas and what a dataclass generates are not counted.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.files: set[str] = set()
        self.depth = self.deepest = 0

    def __call__(self, frame, event, _argument) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(PACKAGE)
        if not is_ours or code.co_name in NOT_COUNTED:
            return
        if event == "call":
            self.calls.append(code.co_qualname if hasattr(code, "co_qualname") else "")
            self.files.add(code.co_filename.removeprefix(PACKAGE))
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
        elif event == "return":
            self.depth -= 1


def test_a_clipped_step_takes_at_most_60_calls_8_deep_in_10_files(monkeypatch):
    # The C code for kernels, which another test of this process may have loaded.
    monkeypatch.setattr(native, "code", None)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler("cpu")
    profile = Profile()
    for turn in range(4):  # the first ones make what is kept
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).sum()
        if turn == 3:
            sys.setprofile(profile)
        try:
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        finally:
            sys.setprofile(None)
    assert 0 < len(profile.calls) <= 60, profile.calls
    assert 0 < profile.deepest <= 8
    assert 0 < len(profile.files) <= 10, sorted(profile.files)
