"""The auditor's rules: no difference in right books, one for each changed amount or address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import asdict, replace

from rpcsvc.audit import spilled
from rpcsvc.audit.check import check
from rpcsvc.audit.records import (
    MONERO,
    Arrival,
    AuditReport,
    Books,
    Departure,
    EvmFacts,
    FillEntry,
    MoneroFacts,
    OrderEntry,
    PaymentEntry,
    Sighting,
    SweepEntry,
    TokenTransfer,
    Watched,
)
from rpcsvc.audit.spilled import SpilledDict, SpilledList
from rpcsvc.domain.order import DepositState, TransferKind, TransferState
from tests.unit.audit_world import (
    ARBITRUM,
    DEEP,
    DEPTH,
    HOT,
    OPERATOR,
    RATE,
    SINCE,
    TOP,
    U2X,
    X2U,
    World,
    evm_address,
)

XMR = 10**12
USDC = 10**6


def audited(world: World) -> AuditReport:
    return check(world.books(), world.monero(), [world.evm()])


def kinds(report: AuditReport) -> set[str]:
    return {item.kind for item in report.differences}


# --- random histories ------------------------------------------------------------------------


def swapped(world: World, units: list[int], spread: int) -> None:
    order = world.order(X2U, spread, integrator=spread // 2)
    for some in units:
        order = world.deposit(order, some * XMR // 1000)
    world.keep(world.pay_out(order))


def swapped_back(world: World, units: list[int], spread: int) -> None:
    order = world.order(U2X, spread)
    for some in units:
        order = world.deposit(order, some * USDC)
    world.keep(world.pay_out(order))
    if spread % 2:
        world.sweep(order)


def repriced(world: World, units: list[int], spread: int) -> None:
    order = replace(world.order(X2U, spread), rates=(RATE - 3, RATE - 7))
    world.keep(world.pay_out(world.deposit(order, units[0] * XMR), rate=RATE - 7))


def refunded(world: World, units: list[int], spread: int) -> None:
    order = world.order(X2U, spread)
    for some in units:
        order = world.deposit(order, some * XMR)
    world.keep(world.give_back(order, "4refund"))


def sent_back(world: World, units: list[int], spread: int) -> None:
    order = world.deposit(world.order(U2X, spread), units[0] * USDC)
    world.keep(world.give_back(order, evm_address(5) if spread % 2 else None))


def held(world: World, units: list[int], spread: int) -> None:
    for direction in (X2U, U2X):
        order = world.order(direction, spread)
        world.keep(replace(world.deposit(order, units[0]), status="refunding"))


def waiting(world: World, units: list[int], spread: int) -> None:
    world.keep(world.order(X2U, spread))
    world.keep(world.order(U2X, spread))


def others(world: World, units: list[int], spread: int) -> None:
    world.fill()
    world.upkeep(units[0] * XMR, spread)
    world.top_up(units[0] * XMR)
    world.ether_by_hand(units[0] * 10**15, units[-1] * 10**15, spread)


HISTORIES: list[Callable[[World, list[int], int], None]] = [
    swapped, swapped_back, repriced, refunded, sent_back, held, waiting, others,
]  # fmt: skip


@st.composite
def worlds(draw: st.DrawFn) -> World:
    world = World()
    for add in draw(st.lists(st.sampled_from(HISTORIES), min_size=1, max_size=8)):
        units = draw(st.lists(st.integers(1, 5_000), min_size=1, max_size=3))
        add(world, units, draw(st.integers(1, 200)))
    return world


# 1 XMR at 165 and 2 at 160, less the spread of 0.5 % and the fee of 0.001 USDC.
AT_TWO_RATES = 164_175_000 + 318_400_000 - 1_000


@pytest.mark.parametrize(
    ("paid", "found"),
    [
        (AT_TWO_RATES, set()),
        (AT_TWO_RATES + 1, {"payout"}),
        (3 * 164_175_000 - 1_000, {"payout"}),
        (3 * 159_200_000 - 1_000, {"payout"}),
    ],
)
def test_each_deposit_is_audited_at_its_own_rate(paid: int, found: set[str]) -> None:
    world = World()
    order = world.deposit(world.order(X2U), XMR, rate=RATE)
    order = world.deposit(order, 2 * XMR, rate=160_000_000)
    world.keep(world.pay_out(order, units=paid))
    assert kinds(audited(world)) == found


@pytest.mark.parametrize(("more", "found"), [(0, set()), (1, {"payout"}), (-1, {"payout"})])
def test_exact_payout_is_audited_to_the_unit(more: int, found: set[str]) -> None:
    """A unit of USDC is worth some 6,000 of XMR, which rounding leaves with the service."""
    world, wanted = World(), 500_000_000_000
    order = world.order(U2X)
    units = order.price.deposit_for(U2X, wanted)
    assert order.price.output(U2X, units) > wanted
    order = replace(order, deposit_amount=units, receive_amount=wanted)
    order = world.deposit(order, units, rate=RATE)
    world.keep(world.pay_out(order, units=wanted + more))
    assert kinds(audited(world)) == found


@given(worlds())
@settings(max_examples=150, deadline=None)
def test_books_of_correct_histories_have_no_difference(world: World) -> None:
    report = audited(world)
    assert report.differences == ()
    assert report.notes == ()
    assert report.pending == ()


# The fields that are changed: amounts and addresses of every record on either adapter.
CHANGED = frozenset(
    ("units", "fee", "integrator_fee", "taken", "paid", "balance", "opening", "address",
     "recipient", "source", "sender", "to_address", "deposit_address", "wei")
)  # fmt: skip


def other(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    if value.startswith("0x"):
        return value[:-1] + ("0" if value[-1] != "0" else "1")
    return value + "x"


def changes(record: Any, where: str) -> Iterator[tuple[str, Any]]:
    """All copies of a record with one amount or address changed, with the path of the change."""
    if isinstance(record, dict):
        for key, value in record.items():
            leaf = [("", value + 1)] if isinstance(value, int) else changes(value, "")
            for path, changed in leaf:
                yield f"{where}[{key}]{path}", {**record, key: changed}
    elif isinstance(record, tuple):
        for at, value in enumerate(record):
            for path, changed in changes(value, f"{where}[{at}]"):
                yield path, (*record[:at], changed, *record[at + 1 :])
    elif isinstance(record, Struct):
        yield from changed_fields(record, where)


def changed_fields(record: Any, where: str) -> Iterator[tuple[str, Any]]:
    for name, value in asdict(record).items():
        path = f"{where}.{name}"
        if name in CHANGED and value is not None and not says_nothing(record, name):
            yield path, replace(record, **{name: other(value)})
        for deeper, changed in changes(value, path):
            yield deeper, replace(record, **{name: changed})


def says_nothing(record: Any, name: str) -> bool:
    """Whether the audit can't check a field: unused terms, moves within a wallet, the operator."""
    match record:
        case OrderEntry():
            paid_out = any(t.kind is TransferKind.PAYOUT for t in record.transfers)
            return not (record.deposits if name == "deposit_address" else paid_out)
        case PaymentEntry():
            silent = not record.is_transfer and name != "fee"
        case Sighting() | Departure():
            silent = record.txid.startswith("upkeep") and name in ("paid", "units")
        case Arrival():
            silent = record.address == "primary" and name == "address"
        case TokenTransfer():
            silent = record.source == OPERATOR and name == "source"
        case _:
            silent = isinstance(record, SweepEntry) and name == "units"
    return silent


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_one_unit_or_address_changed_anywhere_is_a_difference(data: st.DataObject) -> None:
    world = data.draw(worlds())
    books, monero, evm = world.books(), world.monero(), world.evm()
    changed = (
        [(path, (wrong, monero, evm)) for path, wrong in changes(books, "books")]
        + [(path, (books, wrong, evm)) for path, wrong in changes(monero, "monero")]
        + [(path, (books, monero, wrong)) for path, wrong in changes(evm, "evm")]
    )
    path, (its_books, its_monero, its_evm) = data.draw(st.sampled_from(changed))
    assert check(its_books, its_monero, [its_evm]).differences, path


# --- in files -----------------------------------------------------------------------------------


def in_files(books: Books, monero: MoneroFacts, evm: EvmFacts) -> AuditReport:
    """The report on books and facts as readers give them: spilled ones."""
    return check(
        replace(
            books,
            orders=SpilledList(OrderEntry, books.orders),
            payments=SpilledList(PaymentEntry, books.payments),
            sweeps=SpilledList(SweepEntry, books.sweeps),
            evm_addresses=SpilledDict(None, ((address, None) for address in books.evm_addresses)),
        ),
        replace(
            monero,
            arrivals=SpilledList(Arrival, monero.arrivals),
            departures=SpilledList(Departure, monero.departures),
            payments=SpilledDict(Sighting, monero.payments.items()),
        ),
        [
            replace(
                evm,
                moves=SpilledList(TokenTransfer, evm.moves),
                balances=SpilledDict(int, evm.balances.items()),
                mined=SpilledDict(None, ((txid, None) for txid in evm.mined)),
            )
        ],
    )


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_findings_do_not_depend_on_files(data: st.DataObject) -> None:
    """The books are right, have a change anywhere, or lack a record."""
    world = data.draw(worlds())
    books, monero, evm = world.books(), world.monero(), world.evm()
    for name in ("orders", "payments", "sweeps"):
        kept = [item for item in getattr(books, name) if data.draw(st.integers(0, 5))]
        books = replace(books, **{name: tuple(kept)})
    broken = [(wrong, evm) for _, wrong in changes(books, "")]
    broken += [(books, wrong) for _, wrong in changes(evm, "")]
    books, evm = data.draw(st.sampled_from([*broken, (books, evm)]))
    expected = check(books, monero, [evm])
    for entries in (1, 3):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(spilled, "IN_MEMORY", entries)
            patched.setattr(spilled, "_PAGE", 2)
            assert _sorted(in_files(books, monero, evm)) == _sorted(expected)


def _sorted(report: AuditReport) -> Any:
    parts = asdict(report).items()
    return {
        name: sorted(map(str, part)) if isinstance(part, tuple) else part for name, part in parts
    }


# --- too few confirmations --------------------------------------------------------------------


def test_a_young_deposit_that_is_not_on_its_order_is_pending() -> None:
    world = World()
    order = world.keep(world.order(X2U))
    world.deposit(order, XMR, block=TOP - DEPTH + 2)
    report = audited(world)
    assert report.differences == ()
    assert len(report.pending) == 1


def test_a_deep_deposit_that_is_not_on_its_order_is_missing() -> None:
    world = World()
    order = world.keep(world.order(X2U))
    world.deposit(order, XMR, block=TOP - DEPTH + 1)
    assert kinds(audited(world)) == {"deposit_missing"}


def test_unscanned_blocks_are_pending() -> None:
    world = World()
    order = world.keep(world.order(X2U))
    world.deposit(order, XMR, block=DEEP)
    books = world.books()
    books = replace(books, watched={**books.watched, MONERO: Watched(SINCE, DEEP, "deep")})
    report = check(books, world.monero(), [world.evm()])
    assert report.differences == ()
    assert report.pending


def test_a_deep_deposit_that_is_only_seen_is_not_credited() -> None:
    world = World()
    world.keep(world.deposit(world.order(U2X), USDC, state=DepositState.SEEN))
    assert kinds(audited(world)) == {"deposit_not_credited"}


def test_a_time_locked_deposit_may_stay_seen() -> None:
    world = World()
    world.keep(world.deposit(world.order(X2U), XMR, state=DepositState.SEEN))
    world.arrivals[0] = replace(world.arrivals[0], timelocked=True)
    report = audited(world)
    assert report.differences == ()
    assert report.pending


def test_confirmed_deposit_on_no_chain_is_a_difference() -> None:
    world = World()
    world.keep(world.deposit(world.order(X2U), XMR))
    world.arrivals.clear()
    assert kinds(audited(world)) == {"deposit_not_on_chain"}


def test_deposit_gone_after_its_payout_is_lost() -> None:
    world = World()
    order = world.pay_out(world.deposit(world.order(X2U), XMR))
    gone = replace(order.deposits[0], state=DepositState.REMOVED)
    world.keep(replace(order, deposits=(gone,)))
    world.arrivals.clear()
    assert kinds(audited(world)) == {"deposit_lost"}


@pytest.mark.parametrize(
    "state", [TransferState.PREPARED, TransferState.PUBLISHED, TransferState.UNKNOWN]
)
def test_a_payout_that_is_signed_and_not_mined_is_pending(state: TransferState) -> None:
    world = World()
    order = world.pay_out(world.deposit(world.order(U2X), USDC), state)
    world.keep(replace(order, status="executing_swap"))
    report = audited(world)
    assert report.differences == ()
    assert len(report.pending) == 1


def test_settled_payout_back_in_the_pool_is_pending() -> None:
    world = World()
    world.keep(world.pay_out(world.deposit(world.order(U2X), 100 * USDC)))
    world.departures.clear()
    world.proven = {k: replace(v, block=None) for k, v in world.proven.items()}
    report = audited(world)
    assert report.differences == ()
    assert report.pending


def test_a_settled_payout_that_stays_in_the_pool_is_a_difference() -> None:
    world = World()
    world.keep(world.pay_out(world.deposit(world.order(U2X), 100 * USDC)))
    world.departures.clear()
    world.proven = {k: replace(v, block=None) for k, v in world.proven.items()}
    for block, found in ((TOP - 30, set()), (TOP - 31, {"not_on_chain"})):
        world.payments = [replace(item, block=block) for item in world.payments]
        assert kinds(audited(world)) == found


@pytest.mark.parametrize("state", [DepositState.SEEN, DepositState.CONFIRMED])
def test_paid_out_deposit_back_in_the_pool_is_a_difference(
    state: DepositState,
) -> None:
    """A reorganisation was deeper than the confirmations of a deposit."""
    world = World()
    order = world.pay_out(world.deposit(world.order(X2U), XMR))
    world.keep(replace(order, deposits=(replace(order.deposits[0], state=state),)))
    world.arrivals = [replace(item, block=None) for item in world.arrivals]
    assert kinds(audited(world)) == {"deposit_unmined"}


def test_settled_payout_on_no_chain_is_a_difference() -> None:
    world = World()
    world.keep(world.pay_out(world.deposit(world.order(U2X), 100 * USDC)))
    world.departures.clear()
    world.proven.clear()
    assert kinds(audited(world)) == {"not_on_chain"}


def test_contents_of_unnoticed_replaced_blocks_are_pending() -> None:
    world = World()
    world.keep(world.pay_out(world.deposit(world.order(X2U), XMR)))
    swept = world.keep(world.pay_out(world.deposit(world.order(U2X), 100 * USDC)))
    world.sweep(swept)
    world.arrivals.clear()
    world.departures.clear()
    world.proven.clear()
    world.moves.clear()
    world.nonce = 3
    monero, evm = replace(world.monero(), stale=True), replace(world.evm(), stale=True)
    report = check(world.books(), monero, [evm])
    assert report.differences == ()
    assert len(report.pending) == 7, "two networks, two deposits, two payouts, a sweep"
    assert {"not_on_chain", "deposit_not_on_chain"} == kinds(audited(world))


# --- payments without an order ----------------------------------------------------------------


def test_two_payouts_of_one_order_on_the_chain_are_found() -> None:
    world = World()
    order = world.deposit(world.order(X2U), XMR)
    first = world.pay_out(order)
    again = world.pay_out(order)
    second = replace(again.transfers[0], transfer_id=f"{order.order_id}/payout/2")
    world.payments[-1] = replace(world.payments[-1], payment_id=second.transfer_id)
    world.keep(replace(first, transfers=(*first.transfers, second)))
    assert {"payouts", "paid_twice"} <= kinds(audited(world))


def test_abandoned_payout_that_is_mined_is_found() -> None:
    world = World()
    order = world.pay_out(world.deposit(world.order(X2U), XMR))
    cancelled = replace(order.transfers[0], state=TransferState.CANCELLED)
    free = replace(order.deposits[0], transfer_id=None)
    world.keep(replace(order, status="refunding", deposits=(free,), transfers=(cancelled,)))
    assert kinds(audited(world)) == {"paid_though_abandoned"}


def test_unrecorded_payout_to_the_same_address_is_found() -> None:
    world = World()
    order = world.keep(world.pay_out(world.deposit(world.order(X2U), XMR)))
    world.moves.append(TokenTransfer("other", HOT, order.to_address, 1, TOP))
    assert kinds(audited(world)) == {"unrecorded_payment"}


def test_a_second_event_within_a_recorded_payment_is_found() -> None:
    world = World()
    order = world.keep(world.pay_out(world.deposit(world.order(X2U), XMR)))
    world.moves.append(TokenTransfer(world.moves[-1].txid, HOT, order.to_address, 1, DEEP))
    assert {"unrecorded_payment", "paid_on_chain"} <= kinds(audited(world))


def test_unrecorded_xmr_transaction_is_found_since_block_one() -> None:
    world = World()
    world.top_up(XMR)
    assert kinds(audited(world)) == set()
    world.departures.append(Departure("stolen", 7, 1, SINCE))
    assert kinds(audited(world)) == {"unrecorded_payment"}


def test_a_deposit_address_that_pays_a_stranger_is_found() -> None:
    world = World()
    order = world.keep(world.deposit(world.order(U2X), 5 * USDC))
    world.moves.append(
        TokenTransfer("stolen", order.deposit_address, evm_address(9), 5 * USDC, DEEP)
    )
    assert kinds(audited(world)) == {"unrecorded_payment"}


def test_a_nonce_that_was_used_for_something_else_is_found() -> None:
    world = World()
    world.fill()
    world.nonce += 1
    world.fill()
    assert kinds(audited(world)) == {"unrecorded_transaction"}


def test_a_payment_whose_nonce_another_transaction_has_is_found() -> None:
    world = World()
    world.fill()
    world.mined.clear()
    assert kinds(audited(world)) == {"unrecorded_transaction"}


def test_xmr_payment_beyond_its_recipient_is_found() -> None:
    world = World()
    world.keep(world.pay_out(world.deposit(world.order(U2X), 100 * USDC)))
    world.departures[0] = replace(world.departures[0], units=world.departures[0].units + 9)
    assert kinds(audited(world)) == {"sent"}


def test_a_payment_of_a_transfer_that_no_order_has_is_found() -> None:
    world = World()
    world.pay_out(world.deposit(world.order(X2U), XMR))
    assert "payment_without_order" in kinds(audited(world))


@pytest.mark.parametrize("network", [MONERO, ARBITRUM])
@pytest.mark.parametrize("state", list(TransferState))
def test_withdrawal_on_record_is_no_difference(network: str, state: TransferState) -> None:
    world = World()
    world.keep(world.pay_out(world.deposit(world.order(U2X), 100 * USDC)))
    if state not in (TransferState.FAILED, TransferState.CANCELLED):
        world.withdraw(network, 7, state)
    report = audited(world)
    assert (report.differences, report.annotated) == ((), ())
    waits = state.may_be_live
    assert [text for text in report.pending if "wd_0000" in text] == (
        [f"wd_0000 is {state}"] if waits else []
    )


@pytest.mark.parametrize("network", [MONERO, ARBITRUM])
def test_withdrawal_of_another_amount_or_address_is_found(network: str) -> None:
    world = World()
    made = world.withdraw(network, 7)
    world.withdrawals[0] = replace(made, units=6)
    assert "payment_units" in kinds(audited(world))
    world.withdrawals[0] = replace(made, address="somebody else's")
    assert "recipient" in kinds(audited(world))
    world.withdrawals.clear()
    assert "payment_without_order" in kinds(audited(world))


@pytest.mark.parametrize("network", [MONERO, ARBITRUM])
def test_cancelled_withdrawal_that_was_paid_is_found(network: str) -> None:
    world = World()
    made = world.withdraw(network, 7)
    world.withdrawals[0] = replace(made, state=TransferState.CANCELLED)
    assert "paid_though_abandoned" in kinds(audited(world))


def test_payment_signed_to_somebody_else_is_found_before_mining() -> None:
    world = World()
    order = world.pay_out(world.deposit(world.order(X2U), XMR), TransferState.PREPARED)
    world.keep(replace(order, status="executing_swap"))
    world.payments[0] = replace(world.payments[0], recipient=evm_address(9))
    assert kinds(audited(world)) == {"recipient"}


def test_payment_cost_from_the_wallet_matches_the_record() -> None:
    world = World()
    world.keep(world.pay_out(world.deposit(world.order(U2X), 100 * USDC)))
    world.departures[0] = replace(world.departures[0], fee=world.departures[0].fee + 1)
    assert kinds(audited(world)) == {"fee"}


# --- authorizations ---------------------------------------------------------------------------


@pytest.mark.parametrize("others_were_first", [False, True])
def test_sent_authorization_is_no_payment_of_ours(others_were_first: bool) -> None:
    world = World()
    order = world.keep(world.deposit(world.order(U2X), 5 * USDC))
    (world.revert_authorization if others_were_first else world.authorize)(order)
    assert audited(world).differences == ()


def test_transfer_out_in_a_sent_authorization_is_found() -> None:
    world = World()
    order = world.keep(world.deposit(world.order(U2X), 5 * USDC))
    world.authorize(order)
    world.moves.append(TokenTransfer(order.deposits[-1].txid, HOT, order.deposit_address, 5, DEEP))
    assert "unrecorded_payment" in kinds(audited(world))


# --- sweeps -----------------------------------------------------------------------------------


def test_oversized_sweep_is_found_even_while_blocks_are_replaced() -> None:
    world = World()
    order = world.keep(world.deposit(world.order(U2X), 5 * USDC))
    world.moves.append(TokenTransfer("other", order.deposit_address, HOT, 1, DEEP))
    report = check(world.books(), world.monero(), [replace(world.evm(), stale=True)])
    assert kinds(report) == {"sweep"}


def test_running_sweep_is_pending_before_and_after_mining() -> None:
    for mined in (False, True):
        world = World()
        order = world.keep(world.deposit(world.order(U2X), 5 * USDC))
        world.sweep(order)
        world.sweeps[0] = replace(world.sweeps[0], state="signed", taken=0)
        if not mined:
            world.moves.pop()
            world.payments.clear()
            world.nonce -= 1
        report = audited(world)
        assert report.differences == (), mined
        assert report.pending == (f"sweep sweep-{order.order_id} is under way",)


def test_settled_sweep_off_the_chain_is_pending_until_it_fails() -> None:
    """Deposit and sweep were reorged out; the sweep reverts, and is made again."""
    world = World()
    order = world.keep(world.deposit(world.order(U2X), 5 * USDC))
    world.sweep(order)
    txid = world.moves.pop().txid
    world.nonce -= 1
    report = audited(world)
    assert report.differences == ()
    assert report.pending == (f"sweep sweep-{order.order_id} was settled and is off the chain",)
    world.sweeps[0] = replace(world.sweeps[0], state="void", taken=0)
    world.payments[-1] = replace(world.payments[-1], state="failed")
    world.nonce += 1
    world.mined.add(txid)  # reverted: no event of the token
    report = audited(world)
    assert (report.differences, report.pending) == ((), ())


def void_sweep_that_is_mined(authorization: str | None) -> World:
    """The block in which a sweep failed was replaced, and the service has not looked again yet."""
    world = World()
    world.sweep(world.keep(world.deposit(world.order(U2X), 5 * USDC)))
    world.sweeps[0] = replace(
        world.sweeps[0], state="void", taken=0, authorization_hash=authorization
    )
    world.payments[-1] = replace(world.payments[-1], state="failed")
    return world


def test_void_sweep_that_is_mined_after_all_is_pending() -> None:
    world = void_sweep_that_is_mined("ab" * 32)
    report = audited(world)
    assert report.differences == ()
    name = world.sweeps[0].payment_id
    assert report.pending == (f"sweep {name} had failed and is mined after all",)
    world.moves[-1] = replace(world.moves[-1], units=world.moves[-1].units + 1)
    assert kinds(audited(world)) == {"sweep"}


def test_void_sweep_without_authorization_is_a_difference() -> None:
    """The service has no way to find out that it was mined after all."""
    assert kinds(audited(void_sweep_that_is_mined(None))) == {"sweep"}


def test_units_of_a_void_sweep_count_once() -> None:
    """A later sweep of the address has recorded them already."""
    world = void_sweep_that_is_mined("ab" * 32)
    void = world.sweeps[0]
    world.sweeps.append(replace(void, state="done", taken=void.units, payment_id=None))
    report = audited(world)
    assert (report.differences, report.pending) == ((), ())


def test_sweep_by_another_key_copy_explains_the_address_loss() -> None:
    world = World()
    order = world.keep(world.deposit(world.order(U2X), 5 * USDC))
    world.sweep(order)
    world.sweeps[0] = replace(world.sweeps[0], payment_id=None)
    world.payments.clear()
    world.nonce = 0
    assert kinds(audited(world)) == set()


# --- refunds and chunks -----------------------------------------------------------------------


def test_refund_to_a_since_replaced_address_is_accepted_once() -> None:
    world = World()
    order = world.give_back(world.deposit(world.order(X2U), XMR), "4first")
    world.keep(replace(order, refund_address="4second", replaced=1))
    assert kinds(audited(world)) == set()
    world.orders[0] = replace(order, refund_address="4second", replaced=0)
    assert kinds(audited(world)) == {"destination"}


@pytest.mark.parametrize(("agreed", "found"), [("4home", set()), ("4other", {"destination"})])
def test_a_refund_goes_to_the_agreed_address_only(agreed: str, found: set[str]) -> None:
    world = World()
    order = world.give_back(world.deposit(world.order(X2U), XMR), "4home")
    world.keep(replace(order, agreed_refund_address=agreed))
    assert kinds(audited(world)) == found


def chunked(output: int, leftover: int = 0) -> World:
    """An order of 2 XMR, of which one chunk of 1.5 XMR was swapped."""
    world = World()
    order = world.deposit(world.order(X2U), 2 * XMR)
    fill = FillEntry(3 * XMR // 2, output, 0, RATE)
    paid = world.pay_out(order)
    transfer = replace(paid.transfers[0], units=output)
    world.payments[-1] = replace(world.payments[-1], units=output)
    world.moves[-1] = replace(world.moves[-1], units=output)
    world.keep(replace(paid, transfers=(transfer,), fills=(fill,), leftover=leftover))
    return world


def test_chunked_payout_is_their_sum_and_the_rest_is_left_over() -> None:
    gross = 3 * RATE // 2
    output = gross - (gross * 50 + 9_999) // 10_000 - 1_000 * 3 // 4
    assert kinds(audited(chunked(output, XMR // 2))) == set()
    assert kinds(audited(chunked(output + 1, XMR // 2))) == {"payout"}
    assert kinds(audited(chunked(output, XMR // 2 - 1))) == {"leftover"}


# --- nodes that did not answer ----------------------------------------------------------------


def test_hot_wallet_without_opening_is_noted_and_not_compared() -> None:
    world = World()
    world.top_up(USDC)
    evm = replace(world.evm(), opening=None)
    report = check(world.books(), world.monero(), [evm])
    assert report.differences == ()
    assert len(report.notes) == 1


def test_a_wallet_that_can_not_be_listed_is_compared_with_a_note() -> None:
    world = World()
    world.top_up(XMR)
    for more in (0, 1):
        found = world.monero()
        facts = replace(found, is_complete=False, balance=found.balance - more)
        report = check(world.books(), facts, [world.evm()])
        assert kinds(report) == ({"wallet"} if more else set())
        (note,) = report.notes
        assert "more outputs than one answer can list" in note


def test_a_network_without_a_node_is_noted() -> None:
    world = World()
    world.keep(world.pay_out(world.deposit(world.order(X2U), XMR)))
    report = check(world.books(), world.monero(), [])
    assert report.differences == ()
    (note,) = report.notes
    assert note.startswith(f"{ARBITRUM} has orders, and was not compared")


def test_failed_transaction_of_a_failed_transfer_is_expected() -> None:
    world = World()
    order = world.pay_out(world.deposit(world.order(X2U), XMR), TransferState.PUBLISHED)
    failed = replace(order.transfers[0], state=TransferState.FAILED)
    free = replace(order.deposits[0], transfer_id=None)
    world.keep(replace(order, status="refunding", deposits=(free,), transfers=(failed,)))
    assert failed.txid is not None
    world.mined.add(failed.txid)
    assert kinds(audited(world)) == set()


def test_deposits_that_belong_to_two_orders_are_found() -> None:
    world = World()
    order: OrderEntry = world.keep(world.order(X2U))
    world.keep(replace(order, order_id="ord_other"))
    assert kinds(audited(world)) == {"deposit_address"}


def test_payment_from_the_journal_needs_no_order() -> None:
    world = World()
    world.pay_out(world.deposit(world.order(X2U), XMR))
    known = frozenset(world.payments[0].txids)
    books = replace(world.books(), from_journal=known)
    found = check(books, world.monero(), [world.evm()])
    assert "payment_without_order" not in kinds(found)
    assert any("the payment journal knows it" in note for note in found.notes)


def test_withdrawal_that_only_the_journal_knows_is_a_note() -> None:
    world = World()
    made = world.withdraw(MONERO, 7)
    world.withdrawals.clear()
    books = replace(world.books(), from_journal=frozenset({str(made.txid)}))
    found = check(books, world.monero(), [world.evm()])
    assert "payment_without_order" not in kinds(found)
    assert any("a withdrawal that the copy lacks" in note for note in found.notes)
