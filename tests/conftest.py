"""What holds for all tests: drawn examples are the same in every run, and none is timed.

How long an example takes is a matter of what else the machine does meanwhile. What does not live
here: fixtures (tests/contract/conftest.py, tests/regtest/conftest.py).
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
