"""Pools of ranks that the tests of a session share."""

import pytest
from helpers.ranks import Pool

pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="session")
def four_ranks():
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks():
    pool = Pool(2)
    yield pool
    pool.close()
