"""Books and chains that agree, built one order at a time, for tests of the auditor's rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from msgspec.structs import replace

from rpcsvc.audit.records import (
    MONERO,
    Annotation,
    Arrival,
    Books,
    Departure,
    DepositEntry,
    Ether,
    EvmFacts,
    MoneroFacts,
    OpeningEntry,
    OrderEntry,
    PaymentEntry,
    Sighting,
    SweepEntry,
    TokenTransfer,
    TransferEntry,
    Watched,
)
from rpcsvc.domain.order import DepositState, TransferKind, TransferState
from rpcsvc.domain.pricing import Direction, Price

ARBITRUM: Final = "arbitrum"
HOT: Final = "0x" + "ab" * 20
OPERATOR: Final = "0x" + "cd" * 20
OPENING: Final = 10**9
WEI: Final = 10**19
FIRST_NONCE: Final = 3
TOP: Final = 1000
SINCE: Final = 100
DEPTH: Final = 10
DEEP: Final = 500
RATE: Final = 165_000_000

X2U, U2X = Direction.XMR_TO_USDC, Direction.USDC_TO_XMR


def evm_address(number: int) -> str:
    return "0x" + f"{number:040x}"


@dataclass
class World:
    """The records of both the books and the chains."""

    orders: list[OrderEntry] = field(default_factory=list)
    payments: list[PaymentEntry] = field(default_factory=list)
    sweeps: list[SweepEntry] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
    moves: list[TokenTransfer] = field(default_factory=list)
    proven: dict[str, Sighting] = field(default_factory=dict)
    mined: set[str] = field(default_factory=set)
    deposit_addresses: set[str] = field(default_factory=set)
    withdrawals: list[TransferEntry] = field(default_factory=list)
    annotations: list[Annotation] = field(default_factory=list)
    annotated: dict[str, int | None] = field(default_factory=dict)
    spent: dict[str, int] = field(default_factory=dict)
    came: dict[str, int] = field(default_factory=dict)
    nonce: int = FIRST_NONCE
    numbers: count[int] = field(default_factory=lambda: count(1))

    # --- books and chain facts -----------------------------------------------------------------

    def books(self) -> Books:
        return Books(
            orders=tuple(self.orders),
            payments=tuple(self.payments),
            sweeps=tuple(self.sweeps),
            withdrawals=tuple(self.withdrawals),
            watched={MONERO: Watched(SINCE, TOP, "top"), ARBITRUM: Watched(SINCE, TOP, "top")},
            evm_hot=HOT,
            evm_addresses=frozenset(self.deposit_addresses),
            monero_primary="primary",
            annotations=tuple(self.annotations),
            openings={ARBITRUM: OpeningEntry(SINCE - 1, "opening", FIRST_NONCE, WEI)},
        )

    def monero(self) -> MoneroFacts:
        recorded = {p.txids[0]: p for p in self.payments if p.network == MONERO}
        balance = sum(a.units for a in self.arrivals if a.block is not None)
        for item in self.departures:
            upkeep = item.txid in recorded and not recorded[item.txid].is_transfer
            balance -= item.fee + (0 if upkeep else item.units)
        return MoneroFacts(
            TOP, DEPTH, tuple(self.arrivals), tuple(self.departures), dict(self.proven), balance
        )

    def evm(self) -> EvmFacts:
        sums: Counter[str] = Counter({HOT: OPENING})
        for move in self.moves:
            sums[move.recipient] += move.units
            sums[move.source] -= move.units
        balances = {a: sums[a] for a in (HOT, *self.deposit_addresses)}
        return EvmFacts(
            ARBITRUM, TOP, DEPTH, tuple(self.moves), balances, OPENING, self.nonce,
            mined=frozenset(self.mined), annotated=self.annotated, ether=self.ether(),
        )  # fmt: skip

    def ether(self) -> Ether:
        """The hot wallet's ether on the chain, annotated transactions included."""
        reported = sum(item.wei for item in self.annotations)
        held = WEI - sum(self.spent.values()) + sum(self.came.values()) + reported
        done = frozenset(item.txid for item in self.annotations)
        return Ether(held, dict(self.spent), dict(self.came), done)

    # --- order histories ---------------------------------------------------------------------

    def order(self, direction: Direction, spread: int = 50, integrator: int = 0) -> OrderEntry:
        number = next(self.numbers)
        deposit, payout = (MONERO, ARBITRUM) if direction is X2U else (ARBITRUM, MONERO)
        address = f"sub{number}" if direction is X2U else evm_address(number)
        to = evm_address(10**6 + number) if direction is X2U else f"4user{number}"
        if direction is U2X:
            self.deposit_addresses.add(address)
        return OrderEntry(
            order_id=f"ord_{number}",
            direction=direction,
            deposit_network=deposit,
            payout_network=payout,
            deposit_address=address,
            to_address=to,
            price=Price(RATE, spread, 1_000, 9_900, integrator),
            refund_fee=700,
            status="awaiting_deposit",
            deposit_amount=10**12,
        )

    def txid(self, kind: str = "tx") -> str:
        return f"{kind}{next(self.numbers)}"

    def deposit(
        self,
        order: OrderEntry,
        units: int,
        block: int | None = DEEP,
        state: DepositState = DepositState.CONFIRMED,
        rate: int | None = None,
    ) -> OrderEntry:
        """A deposit on the chain and on the order."""
        txid, sender = self.txid(), None
        if order.direction is X2U:
            self.arrivals.append(Arrival(txid, order.deposit_address, units, block))
        else:
            sender = evm_address(2 * 10**6 + next(self.numbers))
            self.moves.append(
                TokenTransfer(txid, sender, order.deposit_address, units, block or TOP)
            )
        entry = DepositEntry(order.deposit_network, txid, units, sender, state, None, False, rate)
        return replace(order, deposits=(*order.deposits, entry))

    def pay_out(
        self,
        order: OrderEntry,
        state: TransferState = TransferState.SETTLED,
        rate: int = RATE,
        units: int | None = None,
    ) -> OrderEntry:
        """Pay out all confirmed deposits, at one rate or with ``units``."""
        price = order.price.at(rate)
        spent = sum(d.units for d in order.deposits if d.state is DepositState.CONFIRMED)
        output = price.output(order.direction, spent) if units is None else units
        transfer = TransferEntry(
            f"{order.order_id}/payout/1", TransferKind.PAYOUT, order.payout_network,
            order.to_address, output, price.payout_fee,
            price.integrator_fee(order.direction, spent), state, None,
        )  # fmt: skip
        return self._send(replace(order, status="completed"), transfer)

    def give_back(
        self, order: OrderEntry, to: str | None, state: TransferState = TransferState.SETTLED
    ) -> OrderEntry:
        """Refund all confirmed deposits, to the named address or to the first sender."""
        recipient = to or order.deposits[0].sender or ""
        spent = sum(d.units for d in order.deposits if d.state is DepositState.CONFIRMED)
        transfer = TransferEntry(
            f"{order.order_id}/refund/1", TransferKind.REFUND, order.deposit_network, recipient,
            spent - order.refund_fee, order.refund_fee, 0, state, None,
        )  # fmt: skip
        return self._send(replace(order, status="refunded", refund_address=to), transfer)

    def withdraw(
        self, network: str, units: int, state: TransferState = TransferState.SETTLED
    ) -> TransferEntry:
        """Add a withdrawal by the operator."""
        to = evm_address(next(self.numbers)) if network == ARBITRUM else "4cold"
        txid = None if state is TransferState.PLANNED else self.txid()
        made = TransferEntry(
            f"wd_{len(self.withdrawals):04}", TransferKind.PAYOUT, network, to, units, 1, 0, state,
            txid,
        )  # fmt: skip
        if txid is not None:
            self._sign(made, txid)
        self.withdrawals.append(made)
        return made

    def keep(self, order: OrderEntry) -> OrderEntry:
        """Add the order to the books as it is now."""
        self.orders.append(order)
        return order

    def sweep(self, order: OrderEntry) -> None:
        """Sweep an order's deposit address to the hot wallet."""
        units = sum(d.units for d in order.deposits)
        name, txid = f"sweep-{order.order_id}", self.txid()
        self._use_nonce(PaymentEntry(name, ARBITRUM, "sweep", HOT, units, "settled", (txid,)))
        self.moves.append(TokenTransfer(txid, order.deposit_address, HOT, units, DEEP))
        self.sweeps.append(SweepEntry(ARBITRUM, order.deposit_address, units, units, "done", name))

    def authorize(self, order: OrderEntry) -> None:
        """Record that the order's deposit was an authorization sent by the hot wallet."""
        deposit = order.deposits[-1]
        name = f"authorization-{order.order_id}"
        self._use_nonce(
            PaymentEntry(
                name, ARBITRUM, "authorization", order.deposit_address, deposit.units, "settled",
                (deposit.txid,),
            )
        )  # fmt: skip

    def revert_authorization(self, order: OrderEntry) -> None:
        """Add a reverted authorization, which another account had sent first."""
        txid, units = self.txid(), order.deposits[-1].units
        name = f"authorization-{order.order_id}"
        self._use_nonce(
            PaymentEntry(
                name, ARBITRUM, "authorization", order.deposit_address, units, "failed", (txid,)
            )
        )
        self.mined.add(txid)

    def fill(self) -> None:
        """Use a nonce for a transaction without effect."""
        txid = self.txid()
        self._use_nonce(PaymentEntry(f"fill-{txid}", ARBITRUM, "fill", HOT, 0, "settled", (txid,)))
        self.mined.add(txid)

    def upkeep(self, units: int, fee: int) -> None:
        """Add a payment of the XMR wallet to itself."""
        txid = self.txid("upkeep")
        self.payments.append(
            PaymentEntry(
                txid, MONERO, "upkeep", "primary", units, "settled", (txid,), fee=fee,
                tx_key="key",
            )
        )  # fmt: skip
        self.departures.append(Departure(txid, units, fee, DEEP))
        self.proven[txid] = Sighting(txid, DEEP, 0, fee)

    def top_up(self, units: int) -> None:
        """Add money from the operator, and spending from before the service's start."""
        self.arrivals.append(Arrival(self.txid(), "primary", units, SINCE - 50))
        self.departures.append(Departure(self.txid(), units // 2, 5, SINCE - 20))
        self.moves.append(TokenTransfer(self.txid(), OPERATOR, HOT, units, SINCE))

    def ether_by_hand(self, spent: int, came: int, inside: int) -> None:
        """Add annotated ether transfers of the operator, out and in, a part of it by a contract."""
        self.annotations.append(Annotation(ARBITRUM, taken := self.txid(), "to the cold wallet"))
        self.annotated[taken] = self.nonce
        self.spent[taken] = spent
        self.nonce += 1
        self.annotations.append(Annotation(ARBITRUM, given := self.txid(), "for gas", inside))
        self.annotated[given] = None
        self.came[given] = came

    # --- parts ---------------------------------------------------------------------------------

    def _send(self, order: OrderEntry, transfer: TransferEntry) -> OrderEntry:
        txid = None if transfer.state is TransferState.PLANNED else self.txid()
        transfer = replace(transfer, txid=txid)
        if txid is not None:
            self._sign(transfer, txid)
        deposits = tuple(
            replace(d, transfer_id=transfer.transfer_id) if d.state is DepositState.CONFIRMED else d
            for d in order.deposits
        )
        return replace(order, deposits=deposits, transfers=(*order.transfers, transfer))

    def _sign(self, transfer: TransferEntry, txid: str) -> None:
        mined = transfer.state is TransferState.SETTLED
        made = PaymentEntry(
            transfer.transfer_id, transfer.network, "transfer", transfer.address, transfer.units,
            "settled" if mined else "prepared", (txid,),
        )  # fmt: skip
        if transfer.network == MONERO:
            self.payments.append(replace(made, fee=31, tx_key="key"))
            if mined:
                self.departures.append(Departure(txid, transfer.units, 31, DEEP))
                self.proven[made.payment_id] = Sighting(txid, DEEP, transfer.units, 31)
        elif mined:
            self._use_nonce(made)
            self.moves.append(TokenTransfer(txid, HOT, transfer.address, transfer.units, DEEP))
        else:
            self.payments.append(made)

    def _use_nonce(self, payment: PaymentEntry) -> None:
        self.payments.append(replace(payment, nonce=self.nonce))
        self.spent[payment.txids[0]] = 10**14 + self.nonce
        self.nonce += 1
