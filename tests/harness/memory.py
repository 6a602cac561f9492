"""Memory that a process has resident, as Linux counts it.

`ru_maxrss` will not do: a program that is started takes over the most that its parent had.
"""

from pathlib import Path

import pytest

needs_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured as Linux counts it"
)


class PeakMemory:
    """Bytes that became resident since this was made, at the most: `PeakMemory()()`."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at VmRSS
        self.before = _resident("VmRSS")

    def __call__(self) -> int:
        return _resident("VmHWM") - self.before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
