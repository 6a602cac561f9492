"""Test configuration: one thread per process, and no worker left behind."""

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402

from tests.harness import pool as _pool  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _workers():
    """End the workers with the session, also when it is interrupted."""
    yield
    if _pool.pool.cache_info().currsize:
        _pool.pool().close()
