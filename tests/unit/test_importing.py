"""Modules that the imports of ``rpcsvc serve`` load."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from rpcsvc.importing import Importing

CODE = """
import sys
from rpcsvc.importing import Importing
with Importing():
    import rpcsvc.serving, rpcsvc.settlement.sandbox.wiring
unneeded = {"rich", "cffi", "pycparser", "jinja2", "segno", "jsonschema", "rpcsvc.audit"}
unneeded |= {"rpcsvc.treasury", "rpcsvc.settlement.onchain", "rpcsvc.settlement.upstream"}
print(*unneeded & set(sys.modules))
import cffi
"""


def test_importing_for_serve_loads_no_more_than_it_needs() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("is_on", [True, False])
def test_importing_leaves_garbage_collection_as_it_was(is_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        with Importing():
            assert not gc.isenabled()
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if before else gc.disable)()
