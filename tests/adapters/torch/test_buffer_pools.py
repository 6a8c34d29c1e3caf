"""Pinned memory that kernels write to is kept until they have."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from lossscale.torch.inspection import buffer_pools  # noqa: E402


class Event:
    """An event of a device, which happens when the test says so."""

    def __init__(self):
        self.has_happened = False

    def query(self):
        return self.has_happened


def test_a_buffer_is_kept_until_its_event(monkeypatch):
    monkeypatch.setattr(buffer_pools, "_written", buffer_pools.deque())
    events = [Event() for _ in range(3)]
    references = []
    for event in events[:2]:
        buffer = torch.zeros(4)
        references.append(weakref.ref(buffer))
        buffer_pools.keep_until(event, buffer)
    del buffer
    gc.collect()
    assert None not in [reference() for reference in references]
    events[0].has_happened = True
    buffer_pools.keep_until(events[2], torch.zeros(4))
    gc.collect()
    assert references[0]() is None
    assert references[1]() is not None
    for event in events:
        event.has_happened = True
    last = Event()
    last.has_happened = True
    buffer_pools.keep_until(last, torch.zeros(4))
    gc.collect()
    assert references[1]() is None
    assert not buffer_pools._written
