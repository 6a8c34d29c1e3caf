"""The arguments of a launch by CUDA's driver, as the driver reads them."""

import ctypes
import struct

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from lossscale.torch.inspection.kernels.driver import (
    ArgumentBlock,
    prepare_launch,
)


def read(block, at, size):
    """Return the bytes at the address of an argument."""
    return ctypes.string_at(block.pointers[at], size)


def test_every_argument_is_where_its_address_says():
    block = ArgumentBlock(["*fp32", "i32", "fp32", "*i64", "i64", "fp64"])
    block.write([2**63 + 8, -5, 0.1, 24, -(2**40), 0.1])
    assert struct.pack("<Q", 2**63 + 8) == read(block, 0, 8)
    assert struct.pack("<i", -5) == read(block, 1, 4)
    assert struct.pack("<f", 0.1) == read(block, 2, 4)
    assert struct.pack("<Q", 24) == read(block, 3, 8)
    assert struct.pack("<q", -(2**40)) == read(block, 4, 8)
    assert struct.pack("<d", 0.1) == read(block, 5, 8)


def test_the_memory_that_triton_may_want_is_none():
    block = ArgumentBlock(["*fp32"])
    block.write([7])
    assert 3 == len(block.pointers)
    assert bytes(16) == read(block, 1, 8) + read(block, 2, 8)


def test_what_was_compiled_into_the_kernel_is_left_out():
    block = ArgumentBlock(["*fp32", "constexpr", "i32"])
    block.write([16, 1, 3])
    assert struct.pack("<i", 3) == read(block, 1, 4)


def test_arguments_are_written_again_to_the_same_addresses():
    block = ArgumentBlock(["*fp32", "fp32"])
    addresses = list(block.pointers)
    for number in (1.5, float("inf")):
        block.write([32, number])
        assert struct.pack("<f", number) == read(block, 1, 4)
    assert addresses == list(block.pointers)


def test_a_number_that_does_not_fit_is_refused():
    with pytest.raises(struct.error):
        ArgumentBlock(["i32"]).write([2**31])


def test_another_version_of_triton_launches_by_itself():
    assert prepare_launch(object(), 1) is None
