"""Annotated transactions are no differences, and payments that may be made twice are named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from rpcsvc.audit.check import check
from rpcsvc.audit.records import (
    MONERO,
    Annotated,
    Annotation,
    Arrival,
    AuditReport,
    Books,
    Departure,
    Difference,
    EvmFacts,
    MoneroFacts,
    OrderEntry,
    PaymentEntry,
    TokenTransfer,
)
from rpcsvc.domain.order import TransferState
from tests.unit.audit_world import ARBITRUM, DEEP, HOT, SINCE, TOP, U2X, X2U, World, evm_address

XMR, USDC = 10**12, 10**6
COLD = evm_address(77)
OPEN = TransferState.PLANNED


@dataclass
class Restored:
    """A world with transactions that its books lack, as after a restore."""

    world: World
    annotations: tuple[Annotation, ...] = ()
    nonces: dict[str, int | None] | None = None
    closed: frozenset[str] = frozenset()

    def books(self) -> Books:
        return replace(self.world.books(), annotations=self.annotations, closed=self.closed)

    def monero(self) -> MoneroFacts:
        return self.world.monero()

    def evm(self) -> EvmFacts:
        return replace(self.world.evm(), annotated=self.nonces or {})

    def report(self) -> AuditReport:
        return check(self.books(), self.monero(), [self.evm()])

    def only(self) -> Difference:
        (found,) = self.report().differences
        return found

    def explain(self, network: str, txid: str, nonce: int | None = None) -> None:
        self.annotations += (Annotation(network, txid, "to the cold wallet"),)
        if network == ARBITRUM:
            self.nonces = {**(self.nonces or {}), txid: nonce}

    def leaves(self, txid: str, units: int, *paid: tuple[str, int]) -> None:
        self.world.departures.append(Departure(txid, units, 5, DEEP, paid))

    def moves(self, txid: str, to: str, units: int, source: str = HOT) -> int:
        self.world.moves.append(TokenTransfer(txid, source, to, units, DEEP))
        self.world.nonce += 1
        return self.world.nonce - 1


def world_with(direction: object, state: TransferState = OPEN) -> tuple[Restored, OrderEntry]:
    """An order whose payout is unpaid in the books."""
    world = World()
    way = X2U if direction is X2U else U2X
    order = world.deposit(world.order(way), XMR if way is X2U else 165 * USDC)
    order = replace(world.pay_out(order, state), status="deposit_confirmed")
    world.keep(order)
    world.fill()
    return Restored(world), order


# --- transactions that may be payouts ----------------------------------------------------------


def test_hint_for_an_open_transfer_names_the_adopt_command() -> None:
    at, order = world_with(U2X)
    (transfer,) = order.transfers
    at.leaves("paid", transfer.units, (order.to_address, transfer.units))
    assert at.only().hint == (
        f"looks like the payment of transfer {transfer.transfer_id}: adopt it with:"
        f" rpcsvc payouts adopt {transfer.transfer_id} paid"
    )


def test_evm_annotation_matches_the_address_in_any_case() -> None:
    at, order = world_with(X2U)
    (transfer,) = order.transfers
    at.moves("0xpaid", transfer.address.upper().replace("0X", "0x"), transfer.units)
    found = {item.kind: item.hint for item in at.report().differences}
    assert f"payouts adopt {transfer.transfer_id} 0xpaid" in found["unrecorded_payment"]


def test_of_a_transaction_that_pays_several_each_is_named() -> None:
    world = World()
    orders = [
        world.keep(world.pay_out(world.deposit(world.order(U2X), units * USDC), OPEN))
        for units in (100, 200)
    ]
    at = Restored(world)
    paid = [(order.to_address, order.transfers[0].units) for order in orders]
    at.leaves("paid", sum(units for _, units in paid), *paid)
    (hint,) = [d.hint for d in at.report().differences if d.kind == "unrecorded_payment"]
    assert all(order.transfers[0].transfer_id in hint for order in orders)


def test_another_amount_to_a_transfers_address_is_reported() -> None:
    at, order = world_with(U2X)
    (transfer,) = order.transfers
    at.leaves("paid", transfer.units - 1, (order.to_address, transfer.units - 1))
    assert "not its" in at.only().hint
    assert "adopt" not in at.only().hint


def test_hint_for_an_abandoned_transfer_warns_of_its_refund() -> None:
    at, order = world_with(U2X, TransferState.CANCELLED)
    (transfer,) = order.transfers
    order = replace(order, status="refunding", transfers=(replace(transfer, txid=None),))
    at.world.orders[:] = [order]
    at.world.payments[:] = [p for p in at.world.payments if not p.is_transfer]
    at.leaves("paid", transfer.units, (order.to_address, transfer.units))
    (hint,) = [d.hint for d in at.report().differences if d.kind == "unrecorded_payment"]
    assert "abandoned" in hint
    assert "adopt" not in hint


def test_an_order_without_a_payout_is_to_find_its_deposit_first() -> None:
    world = World()
    order = world.keep(world.order(U2X))
    at = Restored(world)
    at.leaves("paid", 7, (order.to_address, 7))
    assert order.order_id in at.only().hint
    assert "audit again" in at.only().hint


def test_a_wallet_that_forgot_whom_it_paid_is_asked_for_a_key() -> None:
    at, order = world_with(U2X)
    at.leaves("paid", order.transfers[0].units)
    assert at.only().hint.endswith(f"adopt {order.transfers[0].transfer_id} paid --tx-key KEY")


def test_forgotten_batch_is_named_as_the_sum_of_its_transfers() -> None:
    world = World()
    orders = [
        world.keep(world.pay_out(world.deposit(world.order(U2X), units * USDC), OPEN))
        for units in (100, 200, 401)
    ]
    at = Restored(world)
    first, _, last = (order.transfers[0] for order in orders)
    at.leaves("paid", first.units + last.units)
    (hint,) = [d.hint for d in at.report().differences if d.kind == "unrecorded_payment"]
    for item in (first, last):
        assert f"rpcsvc payouts close {item.transfer_id} paid --note TEXT" in hint
    assert hint.endswith(f"adopt {first.transfer_id} paid --tx-key KEY")
    at.explain(MONERO, "paid")
    kinds = {item.kind for item in at.report().differences}
    assert "unrecorded_payment" in kinds, "it would be paid once more"


def test_forgotten_payment_is_no_other_orders_once_closed() -> None:
    at, order = world_with(U2X)
    twin = at.world.pay_out(at.world.deposit(at.world.order(U2X), 165 * USDC), OPEN)
    at.world.keep(replace(twin, status="deposit_confirmed"))
    (mine,), (other,) = order.transfers, twin.transfers
    assert mine.units == other.units
    at.leaves("one", mine.units)
    at.leaves("two", mine.units)
    hints = {item.subject: item.hint for item in at.report().differences}
    for txid in ("one", "two"):
        for item in (mine, other):
            assert f"rpcsvc payouts close {item.transfer_id} {txid} " in hints[txid]

    closed = replace(mine, state=TransferState.SETTLED, txid="one")
    at.world.orders[0] = replace(order, status="completed", transfers=(closed,))
    hints = {item.subject: item.hint for item in at.report().differences}
    assert hints["one"] == ""
    assert mine.transfer_id not in hints["two"]
    assert f"rpcsvc payouts close {other.transfer_id} two " in hints["two"]


def test_transfers_that_are_closed_by_hand_are_not_looked_for() -> None:
    at, order = world_with(U2X)
    (transfer,) = order.transfers
    closed = replace(transfer, state=TransferState.SETTLED, txid="paid")
    at.world.orders[0] = replace(order, status="completed", transfers=(closed,))
    at.leaves("paid", transfer.units)
    at.explain(MONERO, "paid")
    assert "not_on_chain" in {item.kind for item in at.report().differences}
    at.closed = frozenset({transfer.transfer_id})
    assert at.report().differences == ()


def test_payment_is_named_without_a_recorded_scan_start() -> None:
    at, order = world_with(U2X)
    (transfer,) = order.transfers
    at.leaves("old", 7, ("4stranger", 7))
    at.leaves("paid", transfer.units, (order.to_address, transfer.units))
    at.leaves("forgotten", transfer.units)
    fresh = replace(at.books(), watched={ARBITRUM: at.books().watched[ARBITRUM]})
    found = check(fresh, at.monero(), [at.evm()]).differences
    assert [item.subject for item in found] == ["paid", "forgotten"]


def test_second_event_of_a_recorded_payment_is_not_adoptable() -> None:
    at, order = world_with(X2U, TransferState.PREPARED)
    (transfer,) = order.transfers
    for _ in range(2):
        at.moves(transfer.txid or "", transfer.address, transfer.units)
    hints = {item.kind: item.hint for item in at.report().differences}
    assert "adopt" not in hints["unrecorded_payment"]


def test_what_looks_like_nothing_has_no_hint() -> None:
    at, _ = world_with(U2X)
    at.leaves("stolen", 7, ("4stranger", 7))
    assert at.only().hint == ""


# --- annotations ------------------------------------------------------------------------------


def test_annotated_withdrawal_is_shown_and_is_no_difference() -> None:
    at = Restored(World())
    at.world.top_up(XMR)
    at.world.fill()
    at.leaves("xmr", 7, ("4cold", 7))
    nonce = at.moves("0xusdc", COLD, 9)
    assert len(at.report().differences) == 3
    at.explain(MONERO, "xmr")
    at.explain(ARBITRUM, "0xusdc", nonce)
    report = at.report()
    assert (report.differences, report.notes) == ((), ())
    assert report.annotated == (
        Annotated(MONERO, "xmr", 12, 0, "XMR", "to the cold wallet"),
        Annotated(ARBITRUM, "0xusdc", 9, 0, "USDC", "to the cold wallet"),
    )


def test_beside_an_annotated_transaction_another_one_is_found() -> None:
    at = Restored(World())
    at.world.top_up(XMR)
    at.leaves("xmr", 7, ("4cold", 7))
    at.explain(MONERO, "xmr")
    at.leaves("stolen", 7, ("4cold", 7))
    assert (at.only().kind, at.only().subject) == ("unrecorded_payment", "stolen")


def test_annotated_nonce_covers_no_other() -> None:
    at = Restored(World())
    at.world.fill()
    at.moves("0xusdc", COLD, 9)
    at.explain(ARBITRUM, "0xusdc", at.world.nonce - 1)
    at.world.nonce += 1
    assert at.only().kind == "unrecorded_transaction"


@pytest.mark.parametrize(
    ("state", "is_annotated", "kinds"),
    [
        ("failed", True, set()),
        ("failed", False, {"unrecorded_transaction"}),
        ("published", True, {"unrecorded_transaction"}),
        ("settled", True, {"unrecorded_transaction"}),
    ],
)
def test_nonce_of_a_failed_payment_is_annotated(
    state: str, is_annotated: bool, kinds: set[str]
) -> None:
    """As spent by hand; what the books count as paid, or may yet be, is not let off."""
    at = Restored(World())
    at.world.fill()
    at.world.mined.clear()
    payment = at.world.payments[-1]
    at.world.payments[-1] = replace(payment, state=state)
    if is_annotated:
        at.explain(ARBITRUM, "0xhand", payment.nonce)
    assert {item.kind for item in at.report().differences} == kinds


def test_transaction_of_ether_alone_is_annotated_by_its_nonce() -> None:
    at = Restored(World())
    at.world.fill()
    at.world.nonce += 1
    assert at.only().kind == "unrecorded_transaction"
    at.explain(ARBITRUM, "0xether", at.world.nonce - 1)
    assert at.report().differences == ()
    (reported,) = at.report().annotated
    assert (reported.sent, reported.received) == (0, 0)


def test_annotation_does_not_hide_a_possible_second_payment() -> None:
    for way, network in ((U2X, MONERO), (X2U, ARBITRUM)):
        at, order = world_with(way)
        (transfer,) = order.transfers
        if network == MONERO:
            at.leaves("paid", transfer.units, (transfer.address, transfer.units))
            at.explain(network, "paid")
        else:
            nonce = at.moves("paid", transfer.address, transfer.units)
            at.explain(network, "paid", nonce)
        assert at.only().kind == "unrecorded_payment"
        assert "payouts adopt" in at.only().hint


def test_annotated_forgotten_payment_still_needs_its_tx_key() -> None:
    at, order = world_with(U2X)
    at.leaves("paid", order.transfers[0].units)
    at.explain(MONERO, "paid")
    assert "--tx-key" in at.only().hint


def test_sweep_of_a_lost_database_is_annotated_recorded_or_not() -> None:
    world = World()
    order = world.keep(world.pay_out(world.deposit(world.order(U2X), 5 * USDC)))
    world.fill()
    world.sweep(order)
    lost = world.payments.pop()
    at = Restored(world)
    world.sweeps[:] = [replace(world.sweeps[0], payment_id=None)]  # done, without a payment
    assert at.only().kind == "unrecorded_transaction"
    at.explain(ARBITRUM, lost.txids[0], lost.nonce)
    assert at.report().differences == ()
    world.sweeps.clear()
    assert at.report().differences == ()


def test_annotated_top_up_is_shown() -> None:
    at = Restored(World())
    at.world.arrivals.append(Arrival("topup", "primary", 5, SINCE + 1))
    at.explain(MONERO, "topup")
    assert at.report().differences == ()
    assert [(item.sent, item.received) for item in at.report().annotated] == [(0, 5)]


def test_an_explanation_of_what_no_chain_shows_is_a_note() -> None:
    at = Restored(World())
    at.annotations = (Annotation(MONERO, "gone", "x"), Annotation(ARBITRUM, "0xgone", "y"))
    assert len(at.report().notes) == 2


def test_annotated_batch_may_have_paid_lost_orders() -> None:
    world = World()
    order = world.keep(world.pay_out(world.deposit(world.order(U2X), 165 * USDC)))
    (departure,) = world.departures
    world.departures[:] = [replace(departure, units=departure.units + 9)]
    at = Restored(world)
    assert (at.only().kind, at.only().subject) == ("sent", order.transfers[0].transfer_id)
    at.explain(MONERO, departure.txid)
    assert at.report().differences == ()
    world.departures[:] = [replace(departure, units=departure.units - 9)]
    assert at.only().kind == "sent"


def test_batch_payment_is_compared_with_the_sum_of_its_transfers() -> None:
    world = World()
    orders = [
        world.keep(world.pay_out(world.deposit(world.order(U2X), units * USDC)))
        for units in (100, 200)
    ]
    both = sum(order.transfers[0].units for order in orders)
    _merge(world, orders, both)
    assert Restored(world).report().differences == ()
    world.departures[:] = [replace(world.departures[0], units=both + 1)]
    assert Restored(world).only().kind == "sent"


def _merge(world: World, orders: list[OrderEntry], units: int) -> None:
    """Have one transaction pay both orders."""

    def merged(entry: PaymentEntry) -> PaymentEntry:
        return replace(entry, txids=("batch",)) if entry.is_transfer else entry

    world.payments[:] = [merged(entry) for entry in world.payments]
    world.orders[:] = [
        replace(order, transfers=(replace(order.transfers[0], txid="batch"),)) for order in orders
    ]
    world.departures[:] = [Departure("batch", units, 31, DEEP)]
    world.proven.update({key: replace(item, txid="batch") for key, item in world.proven.items()})


# --- unattributed deposits --------------------------------------------------------------------


def test_unattributed_deposit_is_a_note_until_it_is_annotated() -> None:
    at = Restored(World())
    lost = evm_address(88)
    at.world.deposit_addresses.add(lost)
    at.world.arrivals.append(Arrival("xmr", "sub99", 7, TOP))
    at.world.moves.append(TokenTransfer("0xusdc", COLD, lost, 9, TOP))
    assert [("sub99" in note, lost in note) for note in at.report().notes] == [
        (True, False),
        (False, True),
    ]
    at.explain(MONERO, "xmr")
    at.explain(ARBITRUM, "0xusdc")
    assert at.report().notes == ()
