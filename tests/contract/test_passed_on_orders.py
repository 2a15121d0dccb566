"""An order from a third party, verified by its payer with a copy of verify.py and with the CLI."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rpcsvc import verify
from tests.contract.serving import EVM, MONERO, SWAP, Served, serving
from tests.e2e.processes import free_port, until

Json = dict[str, Any]
THIEF = (
    "44AFFq5kSiGBoZ4NMDwYtN18obc8AemS33DBLWs3H7otXft3Xjrp"
    "DtQGv7SqSsaBYBb98uNbr2VBBEt7f2wfn3RVGQBEP3A"
)
MINE = ["--direction", "x2u", "--chain-id", "42161", "--amount", "0.8", "--to", EVM]
HOME = ["--refund-to", MONERO]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    port = free_port()
    environ = {"RPCSVC_SITE_URL": f"http://127.0.0.1:{port}"}
    async with serving(tmp_path / "data", environ, port=port) as ready:
        yield ready


async def made(served: Served, **extra: Any) -> Json:
    answer = await served.post("/agent/swap/execute", {**SWAP, **extra})
    assert answer.body["ok"], answer.body
    return dict(answer.body["data"])


COMMAND = ("-m", "rpcsvc", "verify")


async def checked(
    served: Served, order: Json, *more: str, program: Sequence[str] = COMMAND
) -> Json:
    """The JSON that the command prints, with its exit status."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *program, "attestation", order["order"]["attestation"], *MINE,
        "--issuer", served.url, *more, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    return {"exit": process.returncode, **json.loads(out)}


async def test_verify_file_its_copy_and_the_command_agree(served: Served, tmp_path: Path) -> None:
    order = await made(served, refundAddress=MONERO)
    copy = shutil.copy(verify.__file__, tmp_path / "verify.py")

    answers = [
        await checked(served, order, *HOME, program=each)
        for each in (("-I", str(copy)), (str(copy),), (verify.__file__,), COMMAND)
    ]

    left = [answer.pop("secondsLeft") for answer in answers]
    assert all(3_500 < seconds <= 3_600 for seconds in left)
    assert answers == [answers[0]] * 4
    assert (answers[0]["exit"], answers[0]["verified"]) == (0, True)
    assert answers[0]["status"] == "awaiting_deposit"
    assert answers[0]["terms"]["refundAddress"] == MONERO


@pytest.mark.parametrize("refund", [{}, {"refundAddress": THIEF}], ids=["session", "address"])
async def test_an_attackers_order_on_the_payers_terms_is_not_verified(
    served: Served, refund: Json
) -> None:
    """All terms are the payer's, but the attacker controls the refund."""
    order = await made(served, **refund)

    unsaid, named = [await checked(served, order, *more) for more in ([], HOME)]

    assert (unsaid["exit"], unsaid["error"]["code"]) == (1, "foreign_refunds")
    assert unsaid["error"]["refundControl"] == ("address" if refund else "session")
    assert unsaid["error"]["refundAddress"] == refund.get("refundAddress")
    assert (named["exit"], named["error"]["fields"]) == (1, ["refundAddress"])


async def test_an_order_of_the_payers_own_session_is_verified(served: Served) -> None:
    order = await made(served)
    answer = await checked(served, order, "--session", order["sessionId"])
    assert (answer["exit"], answer["verified"]) == (0, True)


@pytest.mark.parametrize("amount", ["0.001", "1000"], ids=["dust", "over the maximum"])
async def test_an_order_that_somebody_has_paid_to_is_not_to_be_paid(
    served: Served, amount: str
) -> None:
    order = await made(served, refundAddress=MONERO)
    order_id = order["order"]["orderId"]
    await served.post("/sandbox/fund", {"orderId": order_id, "amount": amount})

    async def seen() -> bool:
        shown = await served.http("GET", f"/agent/swap/status/{order_id}")
        return bool(shown.body["data"]["order"]["status"] != "awaiting_deposit")

    await until(seen)

    answer = await checked(served, order, *HOME)
    blind = await checked(served, order, *HOME, "--offline")

    assert (answer["exit"], answer["error"]["code"]) == (1, "not_payable")
    assert (blind["exit"], blind["status"][:9]) == (0, "not asked")


async def test_an_order_that_ends_too_soon_is_not_to_be_paid(served: Served) -> None:
    order = await made(served, refundAddress=MONERO)
    answer = await checked(served, order, *HOME, "--min-time", "3601")
    assert (answer["exit"], answer["error"]["code"]) == (1, "not_payable")
