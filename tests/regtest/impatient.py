"""``python -m tests.regtest.impatient [SEAM WHEN N] serve ...``: the service, waiting shortly.

Others wait for a payment that its order does not take up for two seconds, not for 10 minutes. It
may be killed at a seam meanwhile, as by tests/e2e/crashing.py.
"""

from __future__ import annotations

import sys
from typing import Final
from unittest.mock import patch

from rpcsvc.__main__ import main
from rpcsvc.settlement.onchain import patience
from tests.e2e.crashing import arm, seam

MODULE: Final = "tests.regtest.impatient"

if __name__ == "__main__":
    with patch.object(patience, "PATIENCE_MS", 2_000):
        if sys.argv[1] != "serve":
            arm(seam(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
            sys.argv[1:4] = []
        main()
