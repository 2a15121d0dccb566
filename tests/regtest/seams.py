"""The points inside the engine onchain at which the service is killed: between steps of a payment.

tests/e2e/crashing.py wraps them from outside; the product knows nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.engine import OnchainEngine
from rpcsvc.settlement.onchain.evm.authorizations import EvmAuthorizations
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.payment_ledger import AttemptEntry, EvmEntry, EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.payments import EvmPayments
from rpcsvc.settlement.onchain.evm.records import EvmNetwork, EvmPurpose
from rpcsvc.settlement.onchain.journal.files import GroupEntry
from rpcsvc.settlement.onchain.journal.writer import PaymentJournal
from rpcsvc.settlement.onchain.monero.ledger import MoneroEntry, MoneroLedger
from rpcsvc.settlement.onchain.monero.payments import MoneroPayments
from rpcsvc.settlement.onchain.monero.records import MoneroPaymentState, MoneroPurpose
from rpcsvc.settlement.onchain.monero.wallet import WalletClient

Counts = Callable[[tuple[Any, ...]], bool]


def _something(args: tuple[Any, ...]) -> bool:
    """The first argument after ``self`` is not empty."""
    return bool(args[1])


def _raised(args: tuple[Any, ...]) -> bool:
    return len(args[1][0].attempts) > 1


def _journaled_raise(args: tuple[Any, ...]) -> bool:
    return isinstance(args[1], AttemptEntry)


def _upkeep(args: tuple[Any, ...]) -> bool:
    return args[1].purpose is MoneroPurpose.UPKEEP


def _journaled_upkeep(args: tuple[Any, ...]) -> bool:
    return isinstance(args[1], MoneroEntry) and args[1].payment.purpose is MoneroPurpose.UPKEEP


def _evm(purpose: EvmPurpose) -> Counts:
    return lambda args: args[1].order.purpose is purpose


def _handed(purpose: EvmPurpose) -> Counts:
    """The payments that are handed over together are of one purpose."""
    return lambda args: args[1][0].order.purpose is purpose


def _mined(args: tuple[Any, ...]) -> bool:
    payment = args[1]
    return payment.order.purpose is EvmPurpose.TRANSFER and payment.inclusion is not None


def _monero(args: tuple[Any, ...]) -> bool:
    return args[1].purpose is MoneroPurpose.TRANSFER


def _journaled(purpose: EvmPurpose) -> Counts:
    return lambda args: any(
        isinstance(entry, EvmEntry) and entry.payment.order.purpose is purpose
        for entry in (args[1].entries if isinstance(args[1], GroupEntry) else (args[1],))
    )


def _journaled_monero(args: tuple[Any, ...]) -> bool:
    return isinstance(args[1], MoneroEntry) and args[1].payment.purpose is MoneroPurpose.TRANSFER


def _monero_in(state: MoneroPaymentState) -> Counts:
    return lambda args: _monero(args) and args[1].state is state


# Name: the method's owner, its name, and which calls count.
SEAMS: Final[dict[str, tuple[type, str, Counts]]] = {
    "engine prepare": (OnchainEngine, "prepare", _something),
    "engine publish": (OnchainEngine, "publish", _something),
    "engine acknowledge": (OnchainEngine, "acknowledge", _something),
    "evm deposit": (EvmDepositLedger, "put_deposits", _something),
    "evm acknowledge": (EvmDepositLedger, "acknowledge", _something),
    # Before: nothing is signed.
    "evm prepare": (EvmPayments, "prepare", _something),
    # Before: signed, not in the journal. After: committed, not published.
    "evm record": (EvmPaymentLedger, "add_payouts", _something),
    # After: in the journal, not committed.
    "evm journal": (PaymentJournal, "_append", _journaled(EvmPurpose.TRANSFER)),
    # After: recorded as published, and not handed to the node.
    "evm mark": (EvmPayments, "_mark_published", _handed(EvmPurpose.TRANSFER)),
    # After: published, and not recorded as such.
    "evm publish": (EvmPayments, "hand_over", _handed(EvmPurpose.TRANSFER)),
    "evm note": (EvmPaymentLedger, "put_payment", _mined),
    # A payment is replaced at a higher fee: needs ``hasten``.
    "raise record": (EvmPaymentLedger, "add_attempt", _something),
    "raise journal": (PaymentJournal, "_append", _journaled_raise),
    "raise publish": (EvmPayments, "hand_over", _raised),
    "sweep record": (EvmPaymentLedger, "add_payment", _evm(EvmPurpose.SWEEP)),
    "sweep journal": (PaymentJournal, "_append", _journaled(EvmPurpose.SWEEP)),
    "sweep publish": (EvmPayments, "hand_over", _handed(EvmPurpose.SWEEP)),
    # After: the node has answered, and its answer is not recorded.
    "authorization look": (EvmAuthorizations, "carry_out", _something),
    "authorization record": (
        EvmPaymentLedger,
        "add_payment",
        _evm(EvmPurpose.AUTHORIZATION),
    ),
    "authorization journal": (PaymentJournal, "_append", _journaled(EvmPurpose.AUTHORIZATION)),
    "authorization publish": (EvmPayments, "hand_over", _handed(EvmPurpose.AUTHORIZATION)),
    "monero deposit": (MoneroLedger, "put_deposits", _something),
    "monero acknowledge": (MoneroLedger, "acknowledge", _something),
    # Before: nothing is signed.
    "monero prepare": (MoneroPayments, "prepare", _something),
    "monero record": (MoneroLedger, "add_payment", _monero),
    "monero journal": (PaymentJournal, "_append", _journaled_monero),
    # After: recorded as RELAYING, and not handed to the wallet.
    "monero mark": (MoneroLedger, "put_payment", _monero_in(MoneroPaymentState.RELAYING)),
    # After: relayed, and the wallet has not stored it.
    "monero relay": (WalletClient, "relay", _something),
    "monero relayed": (MoneroPayments, "_relay", _monero),
    "upkeep record": (MoneroLedger, "add_payment", _upkeep),
    "upkeep journal": (PaymentJournal, "_append", _journaled_upkeep),
    "upkeep relayed": (MoneroPayments, "_relay", _upkeep),
    "monero note": (MoneroLedger, "put_payment", _monero_in(MoneroPaymentState.PUBLISHED)),
    "monero settle": (MoneroLedger, "put_payment", _monero_in(MoneroPaymentState.SETTLED)),
}


def hasten() -> None:
    """Have EVM payments replaced after six seconds instead of a minute, in the killed process."""
    vars(wiring)["EvmNetwork"] = partial(EvmNetwork, bump_after_ms=6_000)
