"""The test harness: a pool of worker processes, oracles to compare with, and small models.

`@distributed(world=3)` makes a test body run on three ranks; `run(function, 3, ...)` returns what each rank returned.
"""

from tests.harness.compare import assert_same
from tests.harness.pool import DistributedError, distributed, run

__all__ = ["DistributedError", "assert_same", "distributed", "run"]
