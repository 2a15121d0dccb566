"""``rpcsvc payouts`` and ``rpcsvc refund``: their output, on a real database."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.clock import iso8601
from rpcsvc.domain.events import TransferFailed, TransferPrepared, TransferUnknown
from rpcsvc.domain.order import TransferState
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.records import (
    Attempt,
    BlockPoint,
    EvmPayment,
    EvmPaymentOrder,
    EvmPaymentState,
    EvmPurpose,
    Inclusion,
)
from rpcsvc.settlement.onchain.pause import PauseSwitch
from tests.operator_cli import Cli, listening, served
from tests.sandbox import EVM, MONERO, Placed, Sandbox, sandbox


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, capsys)


async def settled(box: Sandbox, direction: str = "x2u") -> Placed:
    placed = await box.order(direction)
    await placed.fund()
    await box.settle(8)
    return placed


async def test_command_that_may_not_read_the_secret_says_so(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path):
        secret, hidden = tmp_path / "client-hash.key", tmp_path / "hidden.key"
        secret.rename(hidden)
        assert await cli.ask("payouts", "list") == 3
        assert "Run the command as the service's user" in cli.err.replace("\n", " ")
        hidden.rename(secret)
        assert await cli.ask("payouts", "list") == 0


# --- list and show -----------------------------------------------------------------------------


async def test_a_settled_payout_is_listed_only_when_asked_for(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        placed = await settled(box)
        assert (await cli.json("payouts", "list", "--json"))["transfers"] == []
        assert await cli.ask("payouts", "list") == 0
        assert cli.out == "none\n"
        for state in ("settled", "all"):
            (found,) = (await cli.json("payouts", "list", "--state", state, "--json"))["transfers"]
            assert found["transferId"] == f"{placed.order_id}/payout/1"
        order = await box.up.service.store.order(placed.order_id)
    assert order is not None
    assert order.payout is not None
    assert found["amount"] == f"{order.payout.units / 10**6:.6f}".rstrip("0") + " USDC"
    assert (found["state"], found["txid"]) == ("settled", order.payout.txid)
    assert "nothing" in found["next"]


async def test_a_settled_payout_off_its_chain_says_what_to_do(tmp_path: Path, cli: Cli) -> None:
    """The payout was reorged out: the wallet's record has it in no block."""
    async with served(tmp_path) as box:
        name = f"{(await settled(box)).order_id}/payout/1"
        ledger = EvmPaymentLedger(box.up.database)
        order = EvmPaymentOrder(name, EvmPurpose.TRANSFER, EVM, 7, "0xToken", b"", 65_000)
        attempt = Attempt("0xaa", "02", 5, 1, 1000)
        signed = EvmPayment("arbitrum", "0xHot", 0, order, (attempt,), 1000)
        await ledger.add_payment(signed)
        there = Inclusion("0xaa", BlockPoint(9, "0x9"), 45_000, 2, 0, 3)
        for inclusion, reported in (
            (there, "it is paid"),
            (None, f"rpcsvc payouts close {name} --note TEXT"),
        ):
            state = EvmPaymentState.SETTLED
            await ledger.put_payment(
                replace(signed, state=state, published_at=2000, inclusion=inclusion)
            )
            assert reported in (await cli.json("payouts", "show", name))["next"]


async def test_addresses_are_shortened_unless_asked_for_in_full(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        placed = await settled(box)
        transfer = f"{placed.order_id}/payout/1"
        short, full = (
            await cli.json("payouts", "show", transfer),
            await cli.json("payouts", "show", transfer, "--full"),
        )
    assert full["address"] == EVM
    assert EVM not in json.dumps(short)
    assert short["address"].startswith(EVM[:6])
    assert short["address"].endswith(EVM[-4:])


async def test_a_transfer_says_since_when_and_why(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        placed = await _executing(box)
        transfer = f"{placed.order_id}/payout/1"
        apply = box.up.service.processor.apply
        await apply(placed.order_id, TransferPrepared(transfer, "aa" * 32, "00"))
        box.clock.now += 5_000
        await apply(placed.order_id, TransferUnknown(transfer, "the node is deaf"))
        at = box.up.service.clock.now_ms()
        box.clock.now += 5_000
        (found,) = (await cli.json("payouts", "list", "--json"))["transfers"]
    assert (found["state"], found["reason"]) == ("unknown", "the node is deaf")
    assert found["since"] == iso8601(at)
    assert "same bytes" in found["next"]


async def test_planned_payout_shows_when_it_is_cancelled(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        placed = await _executing(box)
        order = await box.up.service.store.order(placed.order_id)
        (found,) = (await cli.json("payouts", "list", "--state", "planned", "--json"))["transfers"]
    assert order is not None
    assert order.deadline_at is not None
    assert iso8601(order.deadline_at) in found["next"]
    assert found["reason"] is None


async def test_unknown_transfer_and_an_order_id_get_their_own_words(
    tmp_path: Path, cli: Cli
) -> None:
    async with served(tmp_path) as box:
        placed = await settled(box)
        assert await cli.ask("payouts", "show", "ord_nothing") == 2
        assert "There is no transfer" in cli.err
        assert await cli.ask("payouts", "show", placed.order_id) == 2
        assert f"{placed.order_id}/payout/1" in cli.err


async def test_a_list_has_its_limit(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        first, second = await settled(box), await settled(box, "u2x")
        found = await cli.json("payouts", "list", "--state", "all", "--limit", "1", "--json")
        assert [each["orderId"] for each in found["transfers"]] == [second.order_id]
        assert first.order_id != second.order_id
    for bad in ("0", "-1", "many", "10001"):
        assert await cli.ask("payouts", "list", "--limit", bad) == 2
        assert f"argument --limit: must be 1 to 10000, not '{bad}'" in cli.err


async def test_transfers_are_listed_by_each_of_their_states(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path):
        for state in TransferState:
            found = await cli.json("payouts", "list", "--state", state.value, "--json")
            assert found == {"paused": None, "transfers": []}


@pytest.mark.parametrize(
    "arguments",
    [
        ("payouts", "list"),
        ("payouts", "show", "x"),
        ("payouts", "retry", "x"),
        ("refund", "x", "--to", EVM),
        ("relays",),
        ("relays", "close", "ord_0", "--note", "x"),
        ("integrators", "report"),
        ("tickets", "list"),
        ("tickets", "show", "t"),
        ("tickets", "close", "t"),
    ],
    ids=" ".join,
)
def test_commands_of_the_service_need_one_that_runs(cli: Cli, arguments: tuple[str, ...]) -> None:
    assert cli(*arguments) == 3
    assert f"No service runs on the data directory {cli.data_dir}" in cli.err
    assert "rpcsvc serve" in cli.err
    assert list(cli.data_dir.iterdir()) == []


# --- the switch --------------------------------------------------------------------------------


def test_payouts_are_paused_with_a_reason_and_resumed(cli: Cli) -> None:
    cli.environ["RPCSVC_ENGINE"] = "onchain"
    switch = PauseSwitch(cli.data_dir)
    with listening(cli.data_dir):
        assert cli("payouts", "pause", "--reason", "odd\n numbers") == 0
    assert f"on {cli.data_dir} are paused" in cli.out
    assert switch.reason() == "odd numbers"
    assert cli("payouts", "resume") == 0
    assert "odd numbers" in cli.out
    assert f"on {cli.data_dir} are resumed" in cli.out
    assert switch.reason() is None
    assert cli("payouts", "resume") == 0
    assert "not paused" in cli.out


async def test_payouts_of_a_service_that_is_stopped_are_paused(tmp_path: Path, cli: Cli) -> None:
    async with sandbox(tmp_path):
        pass
    cli.environ["RPCSVC_ENGINE"] = "onchain"
    assert await cli.ask("payouts", "pause", "--reason", "why") == 0


def test_pause_without_any_service_says_that_it_stops_none(cli: Cli) -> None:
    cli.environ["RPCSVC_ENGINE"] = "onchain"
    assert cli("payouts", "pause", "--reason", "why") == 1
    assert cli.out == ""
    assert f"No service has ever run on {cli.data_dir}" in cli.err
    assert "PAYOUTS OF ANY OTHER SERVICE CONTINUE" in cli.err
    assert PauseSwitch(cli.data_dir).reason() == "why"  # for one that begins there


def test_a_pause_needs_a_reason_and_the_engine_onchain(cli: Cli) -> None:
    assert cli("payouts", "pause") == 2
    assert cli("payouts", "pause", "--reason", " ") == 2
    assert cli("payouts", "pause", "--reason", "why") == 2
    assert "onchain" in cli.err


def test_a_switch_that_can_t_be_thrown_is_shouted(cli: Cli) -> None:
    cli.environ["RPCSVC_ENGINE"], cli.data_dir = "onchain", cli.data_dir / "nowhere"
    assert cli("payouts", "pause", "--reason", "why") == 2
    assert "PAYOUTS CONTINUE" in cli.err


# --- retry -------------------------------------------------------------------------------------


async def test_a_final_transfer_is_not_retried_and_says_what_instead(
    tmp_path: Path, cli: Cli
) -> None:
    async with served(tmp_path) as box:
        placed = await settled(box)
        assert await cli.ask("payouts", "retry", f"{placed.order_id}/payout/1") == 1
        assert "settled, which is final" in cli.err
        failed = await _executing(box)
        transfer = f"{failed.order_id}/payout/1"
        await box.up.service.processor.apply(failed.order_id, TransferFailed(transfer, "no"))
        assert await cli.ask("payouts", "retry", transfer) == 1
    assert f"rpcsvc refund {failed.order_id}" in cli.err


async def test_a_planned_transfer_is_retried_at_once(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        placed = await _executing(box)
        name = f"{placed.order_id}/payout/1"
        assert await cli.ask("payouts", "retry", name) == 0
        assert cli.out == f"{name} is retried now. Follow it with: rpcsvc payouts show {name}\n"


# --- refund ------------------------------------------------------------------------------------


async def _executing(box: Sandbox) -> Placed:
    """An order with a planned payout that is not being sent yet."""
    placed = await box.order("x2u")
    await placed.fund()
    for _ in range(20):
        box.clock.now += 500
        await box.up.engine.observe()
        order = await box.up.service.store.order(placed.order_id)
        assert order is not None
        if order.transfers:
            return placed
        await _reconcile_only(box)
    raise AssertionError("no payout was planned")


async def _reconcile_only(box: Sandbox) -> None:
    (reconcile,) = (step for step in box.up.worker._steps if step.__name__ == "reconcile")
    await reconcile()


async def _waiting(box: Sandbox) -> Placed:
    """An order whose XMR is to be refunded and that has no refund address yet."""
    placed = await box.order("x2u")
    await placed.fund("0.01")
    await box.settle(4)
    await box.jump(3_600_000)
    await box.settle(4)
    order = await box.up.service.store.order(placed.order_id)
    assert order is not None
    assert order.action_required == "refund_address"
    return placed


async def test_only_an_order_that_waits_takes_an_address(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        placed = await settled(box)
        assert await cli.ask("refund", "ord_nothing", "--to", MONERO, "--yes") == 2
        assert await cli.ask("refund", placed.order_id, "--to", MONERO, "--yes") == 2
    assert "does not wait" in cli.err


async def test_an_address_of_the_wrong_network_and_our_own_are_refused(
    tmp_path: Path, cli: Cli
) -> None:
    async with served(tmp_path) as box:
        placed = await _waiting(box)
        order = await box.up.service.store.order(placed.order_id)
        assert order is not None
        for bad in (EVM, MONERO[:-1], order.terms.deposit_address):
            assert await cli.ask("refund", placed.order_id, "--to", bad, "--yes") == 2
            assert (
                "rpcsvc: --to" in cli.err
            )  # beside the log of the service, which is in this process


async def test_off_a_terminal_a_refund_needs_yes(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        placed = await _waiting(box)
        assert await cli.ask("refund", placed.order_id, "--to", MONERO) == 2
    assert "0.01 XMR" in cli.err
    assert "--yes" in cli.err


@pytest.mark.parametrize(("typed", "status"), [("yes\n", 0), ("y\n", 2), ("", 2)])
async def test_on_a_terminal_a_refund_is_asked_about(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, typed: str, status: int
) -> None:
    async with served(tmp_path) as box:
        placed = await _waiting(box)
        monkeypatch.setattr("sys.stdin", _Terminal(typed))
        assert await cli.ask("refund", placed.order_id, "--to", MONERO) == status, cli.err
        order = await box.up.service.store.order(placed.order_id)
    assert order is not None
    assert order.refund_address == (MONERO if status == 0 else None)


async def test_an_address_that_was_given_is_not_changed(tmp_path: Path, cli: Cli) -> None:
    async with served(tmp_path) as box:
        placed = await _waiting(box)
        await placed.give_refund_address(MONERO)
        assert await cli.ask("refund", placed.order_id, "--to", MONERO, "--yes") == 2
    assert "does not wait" in cli.err


async def test_refund_of_an_agreed_address_is_not_redirected(tmp_path: Path, cli: Cli) -> None:
    swap = {"direction": "u2x", "chain": "arbitrum", "amount": "150", "to": MONERO}
    async with served(tmp_path) as box:
        made = await box.call("swap.execute", **swap, refundAddress=EVM)
        order_id = made["data"]["order"]["orderId"]
        placed = Placed(box, order_id, made["data"]["sessionId"])
        await placed.fault("refund_fails")
        await placed.fund("200000")
        await box.settle()
        assert await cli.ask("refund", order_id, "--to", "0x" + "1" * 40, "--yes") == 2
        assert f"refund address {EVM}" in cli.err
        assert "there and nowhere else" in cli.err
        assert await cli.ask("payouts", "show", f"{order_id}/refund/1") == 0
        assert f"rpcsvc payouts retry {order_id}/refund/1" in cli.out
        assert await cli.ask("payouts", "retry", f"{order_id}/refund/1") == 0


class _Terminal(io.StringIO):
    """A stdin that is a terminal."""

    def isatty(self) -> bool:
        return True
