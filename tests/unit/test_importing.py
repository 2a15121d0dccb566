"""What the imports of ``rpcsvc serve`` load."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from rpcsvc.importing import Importing
with Importing():
    import rpcsvc.serving, rpcsvc.app_sandbox
print(*{"rich", "cffi", "pycparser"} & set(sys.modules))
import cffi
"""


def test_importing_for_serve_loads_neither_rich_nor_cffi() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == []
