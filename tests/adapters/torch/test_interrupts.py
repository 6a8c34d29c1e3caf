"""^C at every line of a step: what comes next is right, or refused."""

import copy
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import snapshot  # noqa: E402

import lossscale.torch as ls  # noqa: E402

REFUSED = (RuntimeError, AssertionError)
FILES = (
    str(Path(ls.__file__).parent),
    str(Path(torch.amp.__file__).parent / "grad_scaler.py"),
    str(Path(torch.optim.__file__).parent / "sgd.py"),
    str(Path(torch.optim.__file__).parent / "optimizer.py"),
)


class Interrupt:
    """Raises KeyboardInterrupt before one of the lines that are run; counts them."""

    def __init__(self, at=None):
        self.at = at
        self.lines = 0

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.enter_call)

    def __exit__(self, *_):
        sys.settrace(self.before)

    def enter_call(self, frame, *_):
        is_watched = frame.f_code.co_filename.startswith(FILES)
        return self.enter_line if is_watched else None

    def enter_line(self, frame, event, _):
        if event == "line":
            self.lines += 1
            if self.lines - 1 == self.at:
                raise KeyboardInterrupt
        return self.enter_line


class Run:
    """One weight and its optimizer, stepped by a scaler in one of several ways."""

    def __init__(self, path, fused):
        self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        self.optimizer = torch.optim.SGD(
            [self.weight], lr=0.5, momentum=0.5, fused=fused
        )
        self.scaler = ls.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.path = path
        self.new_gradients(1.0)
        self.iterate()

    def new_gradients(self, factor):
        self.optimizer.zero_grad()
        self.factor = factor
        self.scaler.scale((self.weight * factor).sum()).backward()

    def calls(self):
        """Return the calls of an iteration after its backward pass."""
        first = {
            "step": [],
            "unscale_": [lambda: self.scaler.unscale_(self.optimizer)],
            "clip": [lambda: self.scaler.clip_grad_norm_(self.optimizer, 100.0)],
            "accumulate": [lambda: self.scaler.accumulate(self.optimizer)],
        }[self.path]
        return [
            *first,
            lambda: self.scaler.step(self.optimizer),
            self.scaler.update,
        ]

    def iterate(self, start=0):
        for call in self.calls()[start:]:
            call()

    def interrupt(self, at):
        """Take a step; return the call that was interrupted, or `None`."""
        self.new_gradients(3.0)
        watch = Interrupt(at)
        for number, call in enumerate(self.calls()):
            with watch:
                try:
                    call()
                except KeyboardInterrupt:
                    # An interrupt in torch's own no_grad leaves autograd switched off.
                    torch.set_grad_enabled(True)
                    return number
        self.lines = watch.lines
        return None

    def expected(self, factor):
        """Return what one more step of torch's optimizer makes of weight and state."""
        weight, optimizer = copy.deepcopy((self.weight, self.optimizer))
        (weight,) = optimizer.param_groups[0]["params"]
        weight.grad = torch.full_like(weight, factor)
        optimizer.step()
        return snapshot(optimizer)


WAYS = [
    (path, fused)
    for path in ("step", "unscale_", "clip", "accumulate")
    for fused in (False, True)
]
every_way = pytest.mark.parametrize(("path", "fused"), WAYS)


def points(path, fused):
    """Return the numbers of all lines of a step."""
    run = Run(path, fused)
    assert run.interrupt(None) is None
    assert run.lines > 50
    return range(run.lines)


@every_way
def test_the_same_step_again_is_taken_once_or_refused(path, fused):
    refused = 0
    for at in points(path, fused):
        run = Run(path, fused)
        right = run.expected(3.0)
        interrupted = run.interrupt(at)
        assert interrupted is not None
        try:
            run.iterate(start=interrupted)
        except REFUSED:
            refused += 1
            continue
        assert right == snapshot(run.optimizer), at
        assert run.scaler.get_scale() in (1024.0, 2048.0)
    assert refused < len(points(path, fused))


@every_way
def test_a_new_iteration_is_right_or_refused_until_discard(path, fused):
    for at in points(path, fused):
        run = Run(path, fused)
        run.interrupt(at)
        if path == "accumulate":
            run.scaler.discard()  # what was added up would be part of the next step
        right = run.expected(5.0)
        refusal = ""
        try:
            run.new_gradients(5.0)
            run.iterate()
        except REFUSED as error:
            refusal = str(error)
        if refusal:
            # Ours, or torch's own: a step that is complete lacks its update().
            words = ("discard()", "since the last update()", "called after step()")
            assert any(word in refusal for word in words), at
            run.scaler.discard()
            right = run.expected(5.0)
            run.new_gradients(5.0)
            run.iterate()
        assert right == snapshot(run.optimizer), at
        assert run.scaler.get_scale() in (1024.0, 2048.0)
