"""Records and options of the XMR adapter.

Units are piconero, heights count from 0, times are ms since the epoch unless said otherwise.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

from rpcsvc.domain.chains import MONERO_NETWORK
from rpcsvc.domain.order import DepositState
from rpcsvc.redacted import Redacted
from rpcsvc.settlement.onchain.monero.wallet import MOST_ADDRESSES_PER_CALL
from rpcsvc.settlement.onchain.thresholds import Thresholds, blocks, rise

NETWORK: Final = MONERO_NETWORK
_XMR: Final = 10**12
# By nettype, where the daemons call a regtest chain fakechain.
_NETWORK_NAMES: Final = {
    "mainnet": NETWORK,
    "stagenet": "monero-stagenet",
    "testnet": "monero-testnet",
    "fakechain": "monero-regtest",
}


class MoneroOptions(Redacted, frozen=True):
    """Options of the XMR adapter. Raises ValueError for impossible values.

    ``nettype``: mainnet, stagenet, testnet, or fakechain (regtest). ``wallet_file`` is opened when
    the wallet daemon has none open; without it, that is a reported condition. ``thresholds`` rise;
    all that an address received counts as one deposit. ``settled_after`` and ``failed_after`` are
    confirmations: of a payout, and of what took a payout's inputs. ``tracked_blocks``: how long a
    confirmed deposit or settled payout is still compared with the chain.
    ``pool_target`` addresses are made ahead, again when fewer than ``pool_low`` are left;
    ``reserve`` of them at a time may be handed out, and are skipped after a crash.
    ``typical_weight`` is in bytes; a payment that would cost more than ``highest_fee`` for each
    transfer is not made. Outputs of at least ``output_units`` count towards ``outputs_target`` (0:
    the wallet is left as it is); more than ``dusty_outputs`` smaller ones are put together.
    """

    HIDDEN = frozenset({"wallet_password"})

    nettype: str
    wallet_file: str | None
    wallet_password: str
    thresholds: Thresholds
    settled_after: int
    failed_after: int
    pool_target: int
    pool_low: int
    reserve: int
    outputs_target: int
    output_units: int
    tracked_blocks: int = 100
    typical_weight: int = 2400
    fee_margin_percent: int = 50
    highest_fee: int = _XMR // 50
    dusty_outputs: int = 40

    def __post_init__(self) -> None:
        if self.nettype not in _NETWORK_NAMES:
            allowed = ", ".join(_NETWORK_NAMES)
            raise ValueError(f"nettype must be one of {allowed}, not {self.nettype}")
        if not rise(self.thresholds) or len(blocks(self.thresholds)) < len(self.thresholds):
            raise ValueError("thresholds must be numbers of blocks that rise, from 0 units")
        least = {"settled_after": 1, "failed_after": 1, "tracked_blocks": 1, "reserve": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}")
        if not 0 < self.pool_low <= self.pool_target:
            raise ValueError("pool_low must be above 0 and not above pool_target")

    @property
    def address_nettype(self) -> str:
        """The wallet's name for the address type of this network: regtest uses mainnet's."""
        return "mainnet" if self.nettype == "fakechain" else self.nettype

    @property
    def mines_on_demand(self) -> bool:
        """Whether blocks come when a test asks for them: their age says nothing then."""
        return self.nettype == "fakechain"

    @property
    def network_name(self) -> str:
        """The network's name for those who pay and are paid."""
        return _NETWORK_NAMES[self.nettype]

    def required_confirmations(self, units: int) -> int:
        """The confirmations that a deposit of ``units`` needs."""
        return blocks(tuple(item for item in self.thresholds if item.units <= units))[-1]

    @property
    def final_confirmations(self) -> int:
        """The confirmations that make a deposit final."""
        return blocks(self.thresholds)[-1]

    @property
    def addresses_per_call(self) -> int:
        """The number of addresses that the wallet makes in one call."""
        return MOST_ADDRESSES_PER_CALL


# --- records ---------------------------------------------------------------------------------


class WalletRecord(Struct, frozen=True):
    """The wallet that the service started with; addresses up to ``reserved_to`` may be in use."""

    nettype: str
    primary_address: str
    reserved_to: int


class Cursor(Struct, frozen=True):
    """A block up to which every deposit is committed."""

    height: int
    hash: str


class DepositRecord(Struct, frozen=True):
    """A transaction's payment to one subaddress (``minor``), summed over its outputs.

    ``acknowledged``: the state that the order layer committed last; None while another one is
    shown and not acknowledged. ``watched``: the chain may still change what it says.
    ``unlock_time`` as the transaction has it: a height or seconds.
    """

    txid: str
    minor: int
    address: str
    units: int
    unlock_time: int
    first_seen_at: int
    height: int | None
    acknowledged: DepositState | None
    watched: bool = True


class MoneroPaymentState(StrEnum):
    """The progress of a payment.

    PREPARED: signed and committed, nothing published. RELAYING: handed to the wallet, or may have
    been. PUBLISHED: the network had it once. SETTLED: deep enough. FAILED: can never be made.
    """

    PREPARED = "prepared"
    RELAYING = "relaying"
    PUBLISHED = "published"
    SETTLED = "settled"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether its bytes must not be published."""
        return self is MoneroPaymentState.FAILED


# Signed, and not known to be on the network.
UNPUBLISHED: Final = (MoneroPaymentState.PREPARED, MoneroPaymentState.RELAYING)


class MoneroPurpose(StrEnum):
    """The purpose of a payment. TRANSFER: of an order. UPKEEP: from the wallet to itself."""

    TRANSFER = "transfer"
    UPKEEP = "upkeep"


class Payee(Struct, frozen=True):
    """The part of a payment that is for one transfer."""

    transfer_id: str
    address: str
    units: int


class MoneroPayment(Redacted, frozen=True):
    """A signed payment. ``units`` is what the recipients get, ``fee`` what the network takes.

    ``height`` is its block, ``conflict`` a block by which an input was spent by something else.
    ``payment_id`` is the id of the transfer that it pays. One that pays several names them in
    ``batch``: it then has a name of its own, as upkeep has, and ``address`` is the first one's.
    """

    HIDDEN = frozenset({"raw", "metadata", "tx_key"})

    payment_id: str
    purpose: MoneroPurpose
    address: str
    units: int
    fee: int
    txid: str
    raw: str
    metadata: str
    tx_key: str
    key_images: tuple[str, ...]
    prepared_at: int
    state: MoneroPaymentState = MoneroPaymentState.PREPARED
    relayed_at: int | None = None
    height: int | None = None
    conflict: Cursor | None = None
    batch: tuple[Payee, ...] = ()

    @property
    def payees(self) -> tuple[Payee, ...]:
        """The transfers that it pays, or itself."""
        alone = Payee(self.payment_id, self.address, self.units)
        return self.batch or (alone,)

    def payee(self, transfer_id: str) -> Payee:
        """Return the payee for a transfer. Raises LookupError when it does not pay that
        transfer.
        """
        for item in self.payees:
            if item.transfer_id == transfer_id:
                return item
        raise LookupError(f"the payment {self.payment_id} does not pay {transfer_id}")


class MoneroPaymentOrder(Struct, frozen=True):
    """A payment to be made. ``from_indices``: spend only outputs of these subaddresses.

    ``parts`` splits ``units`` into equal outputs. With ``batch`` it is for several transfers.
    """

    payment_id: str
    purpose: MoneroPurpose
    address: str
    units: int
    parts: int = 1
    from_indices: tuple[int, ...] = ()
    batch: tuple[Payee, ...] = ()
