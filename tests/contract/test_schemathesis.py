"""Schemathesis against the live service: every answer must agree with the OpenAPI document.

It runs as a program of its own, with all of its checks and phases, from a fixed seed. The document
has closed schemas, so undescribed fields of answers are found, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from rpcsvc.http.openapi.document import openapi_document
from rpcsvc.http.site import API_ROOT, BFF_ROOT, site_of
from tests.contract.described import closed_document
from tests.contract.good_addresses import with_formats
from tests.contract.serving import BACK, Served, serving

ROOT = Path(__file__).parents[2]
SEED = "20261128"
# A payment that can't be read is answered as not safe to send (schemathesis_hooks.py).
CHECK = f"{API_ROOT}/agent/swap/check/{{orderId}}"
SWAP, FAULT = f"{API_ROOT}/agent/swap", f"{API_ROOT}/sandbox/fault"
PHASES_OF_ONE = "examples,coverage,fuzzing"
PHASES = f"{PHASES_OF_ONE},stateful"
LONGEST_SECONDS = 600
# Statuses by the service's state for a request that follows the schemas: not modified, another
# session or destination, no such order, a used key, an order that is funded or has to be paid.
STATE = ["2xx", 304, 402, 403, 404, 409]
# These are also refused with 400 for changing limits and an order's state, which
# schemathesis_hooks.py distinguishes from other reasons.
MOVING = [
    *(f"{SWAP}/{name}" for name in ("plan", "quote", "create", "execute", "list")),
    *(f"{BFF_ROOT}/{name}" for name in ("quote", "orders")),
    f"{SWAP}/refund-address/{{orderId}}",
    f"{SWAP}/fund/{{orderId}}",
    f"{API_ROOT}/sandbox/fund",
    FAULT,
]
# Only these paths always refuse requests that follow the schemas: they need an order's own
# session, its payer's signature, or an order of the bridge.
NEVER_ACCEPTED = {
    f"{SWAP}/fund/{{orderId}}",
    f"{SWAP}/cancel/{{orderId}}",
    f"{SWAP}/refund-address/{{orderId}}",
    f"{BFF_ROOT}/orders/{{orderId}}/cancel",
    f"{BFF_ROOT}/bridge/order/{{orderId}}",
}
TALLY = "tally.jsonl"
CONFIG = f"""
[checks.positive_data_acceptance]
expected-statuses = {STATE}

[[operations]]
include-path = {MOVING}

[operations.checks.positive_data_acceptance]
expected-statuses = {[*STATE, 400]}

[[operations]]
include-path = [{json.dumps(CHECK)}]

[operations.checks.negative_data_rejection]
expected-statuses = [200, "4xx"]
"""


async def run(served: Served, folder: Path, examples: int, *selection: str) -> tuple[int, str]:
    """Schemathesis' exit status and report."""
    document = openapi_document(site_of(served.up.settings, served.up.service))
    made = (await served.post("/agent/swap/create", BACK)).body["data"]
    described = folder / "openapi.json"
    described.write_text(json.dumps(with_formats(closed_document(document))))
    (folder / "schemathesis.toml").write_text(CONFIG)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "run", str(described),
        "--url", served.url, "--checks", "all",
        "--max-examples", str(examples), "--seed", SEED, "--continue-on-failure", "--no-color",
        *selection,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SCHEMATHESIS_HOOKS": "tests.contract.schemathesis_hooks",
            "SCHEMATHESIS_ORDER": f"{made['order']['orderId']} {made['sessionId']}",
            "SCHEMATHESIS_TALLY": str(folder / TALLY),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(LONGEST_SECONDS):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


@pytest.mark.parametrize(
    ("examples", "selection"),
    [
        # The effects of sandbox.fault would be found as server errors elsewhere.
        pytest.param(
            40,
            ("--exclude-path", FAULT, "--exclude-path-regex", f"^{BFF_ROOT}", "--phases", PHASES),
            id="all but faults",
            marks=pytest.mark.slow(seconds=200),
        ),
        # No links lead to these, so there are no sequences of calls to try.
        pytest.param(80, ("--include-path", FAULT, "--phases", PHASES_OF_ONE), id="faults"),
        pytest.param(
            60,
            ("--include-path-regex", f"^{BFF_ROOT}", "--phases", PHASES_OF_ONE),
            id="bff",
            marks=pytest.mark.slow(seconds=60),
        ),
    ],
)
async def test_schemathesis_finds_nothing(
    tmp_path: Path, examples: int, selection: tuple[str, ...]
) -> None:
    folder = tmp_path / "schemathesis"
    folder.mkdir(mode=0o700)
    async with serving(tmp_path / "data") as served:
        status, report = await run(served, folder, examples, *selection)
    assert status == 0, report
    answered = [json.loads(line) for line in (folder / TALLY).read_text().splitlines()]
    accepted = {path for path, code in answered if code == 200}
    assert {path for path, _ in answered} - accepted <= NEVER_ACCEPTED
    for phase in selection[-1].split(","):
        assert f"✅  {phase.capitalize()}" in report, report
