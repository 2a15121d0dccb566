"""The checkout page's contents: terms, what has arrived, the payout, and the line that verifies."""

from __future__ import annotations

import asyncio
import html
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.http.pages.rendering import Catalogues
from tests.command_line import Done, clean_environ
from tests.contract.checkout import (
    U2X,
    X2U,
    Json,
    Ordered,
    awaiting_refund_address,
    fund,
    make_order,
    status_of,
    until,
)
from tests.contract.processes import free_port
from tests.contract.serving import EVM, MONERO, Served, serving

SAY = Catalogues().choose("en").say
REFRESH = '<meta http-equiv="refresh"'


async def markup(served: Served, path: str) -> str:
    response = await served.client.get(path)
    assert response.status == 200
    return await response.text()


def part(text: str, name: str) -> str:
    """The text of a section, without markup."""
    found = re.search(rf'<section id="{name}"[^>]*>(.*?)</section>', text, re.DOTALL)
    assert found is not None, name
    return html.unescape(re.sub(r"<[^>]*>", "", found[1]))


async def test_page_shows_rate_minimum_and_the_deposit_cases(served: Served) -> None:
    order = await make_order(served, X2U, refundAddress=MONERO)
    text = await markup(served, order.path)
    get = part(text, "get")
    assert SAY("checkout.rate_is", rate="165") in get
    assert f"129.9771 USDC, {SAY('checkout.get_least_note')}" in get
    cases = part(text, "cases")
    for says in (
        SAY("checkout.case_late_says"),
        SAY("checkout.case_little_says", minimum="0.060606060607 XMR"),
        SAY("checkout.case_much_says", maximum="303.030303030303 XMR"),
        SAY("checkout.case_wrong_says"),
    ):
        assert says in cases
    assert SAY("checkout.support_says", order=order.order_id) in part(text, "support")


async def test_page_spells_out_network_and_token(served: Served) -> None:
    order = await make_order(served, U2X)
    funding = (await status_of(served, order))["fundingInstructions"]
    pay = part(await markup(served, order.path), "pay")
    token = funding["paymentUri"].removeprefix("ethereum:")
    contract, chain_id = token.partition("/")[0].split("@")
    assert chain_id == str(funding["chainId"])
    assert SAY("checkout.pay_chain_id", network="Arbitrum Sepolia", chain_id=chain_id) in pay
    assert SAY("checkout.pay_token_usdc", contract=contract) in pay
    order = await make_order(served, X2U)
    pay = part(await markup(served, order.path), "pay")
    assert f"{SAY('checkout.pay_network')}Monero Stagenet" in pay
    assert SAY("checkout.pay_token_xmr") in pay


@pytest.mark.parametrize(("swap", "says"), [(X2U, "session"), (U2X, "sender")])
async def test_page_says_who_decides_about_refunds(served: Served, swap: Json, says: str) -> None:
    order = await make_order(served, swap)
    assert SAY(f"checkout.refund_{says}") in part(await markup(served, order.path), "refund")


async def test_page_shows_what_has_arrived_and_what_is_missing(served: Served) -> None:
    order = await make_order(served, X2U, refundAddress=MONERO)
    await fund(served, order, amount="0.3")
    found = await until(served, order, amountDue="0.5")
    text = await markup(served, order.path)
    says = SAY("checkout.says_partial", arrived="0.3 XMR", missing="0.5 XMR")
    assert says in part(text, "state")
    shown = part(text, "arrived")
    assert f"{SAY('checkout.arrived')}0.3 XMR" in shown
    assert f"{SAY('checkout.missing')}0.5 XMR" in shown
    assert found["deposits"][0]["txid"] in shown
    assert "0.5 XMR" in part(text, "pay")


async def test_page_of_a_settled_order_shows_the_payout_and_stays(served: Served) -> None:
    order = await make_order(served, X2U, refundAddress=MONERO)
    assert REFRESH in await markup(served, order.path)
    assert REFRESH not in await markup(served, f"{order.path}?refresh=off")
    await fund(served, order)
    (payout,) = (await until(served, order, status="completed"))["transfers"]
    text = await markup(served, order.path)
    for shown in (EVM, payout["txid"], f"{payout['amount']} USDC"):
        assert shown in part(text, "sent")
    assert REFRESH not in text


async def test_page_with_the_refund_form_does_not_reload(served: Served) -> None:
    order = await awaiting_refund_address(served)
    assert REFRESH not in await markup(served, order.path)


# --- the line of rpcsvc verify -----------------------------------------------------------------


async def verified(served: Served, order: Ordered, folder: Path, **own: str) -> Done:
    """The page's command, run by a shell beside the saved terms, with the payer's own values."""
    terms = await markup(served, f"{order.path}/attestation")
    (folder / f"{order.order_id}.jws").write_text(terms)
    found = re.search(r"<pre[^>]*><code>(.*?)</code></pre>", await markup(served, order.path), re.S)
    assert found is not None
    command = html.unescape(found[1])
    for blank, value in own.items():
        command = command.replace(blank, value)
    assert command.startswith("rpcsvc verify attestation - <")
    assert not re.search("YOUR_|YOU_", command)
    return await asyncio.to_thread(
        subprocess.run,
        ["sh", "-c", f"{sys.executable} -m {command}"],
        cwd=folder, env=clean_environ(), capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("swap", "more"),
    [(X2U, {"refundAddress": MONERO}), (X2U, {}), (U2X, {}), (U2X, {"refundAddress": EVM})],
)
async def test_line_of_the_page_verifies_the_saved_terms(
    tmp_path: Path, swap: Json, more: dict[str, Any]
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with serving(tmp_path / "data", port=int(port), site_url=url) as served:
        order = await make_order(served, swap, **more)
        funding = (await status_of(served, order))["fundingInstructions"]
        own = {
            "YOUR_USDC_ADDRESS": EVM,
            "YOUR_XMR_ADDRESS": MONERO,
            "YOUR_SESSION_ID": order.session_id,
            "ADDRESS_YOU_WERE_GIVEN": funding["depositAddress"],
        }
        done = await verified(served, order, tmp_path, **own)
        assert (done.returncode, '"verified": true' in done.stdout) == (0, True), done
        swapped = {**own, "ADDRESS_YOU_WERE_GIVEN": MONERO if swap is X2U else EVM}
        done = await verified(served, order, tmp_path, **swapped)
        assert (done.returncode, "terms_mismatch" in done.stdout) == (1, True), done
