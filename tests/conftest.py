"""What holds for all tests: drawn examples are the same in every run, and none is timed.

How long an example takes is a matter of what else the machine does meanwhile.
"""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# Hypothesis also draws numbers and texts that it finds in the modules loaded so far. These are
# others when one file runs than when all do, and others in each process of pytest-xdist.
patch.object(
    providers, "_get_local_constants", lambda: providers._local_constants, create=True
).start()
