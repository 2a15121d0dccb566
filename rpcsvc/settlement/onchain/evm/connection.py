"""One EVM network: its options, its node, and the conditions that its operator should know.

A node is asked nothing for an order before it is on the right chain with the right token. A failed
call discards that, so that a node which comes back as another one is caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import structlog
from msgspec import Struct

from rpcsvc.domain import usdc
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.adapter import ChainUnusable
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, RpcFailure, StallDetector
from rpcsvc.settlement.onchain.evm.node import (
    Block,
    BlockRef,
    EvmCall,
    EvmClient,
    Reverted,
    Tag,
)
from rpcsvc.settlement.onchain.evm.records import BlockPoint

log = structlog.get_logger(__name__)

HOT_WALLET_INDEX: Final = 0
_GWEI: Final = 10**9


class EvmNetwork(Struct, frozen=True):
    """One chain. Units are USDC units, fees wei. Raises ValueError for what can't be meant.

    ``name`` is the network's name in orders; ``token`` the USDC contract (EIP-55).
    ``confirmations`` make a deposit final; None: those blocks that the node calls finalized.
    ``settled_after`` and ``failed_after`` are confirmations: of a payout, and of what took its
    nonce. ``tracked_blocks``: how long a confirmed deposit or settled payout is still compared
    with the chain. ``start_block`` is where the first scan begins; None: the newest
    block then. A payment not mined for ``bump_after_ms`` is replaced by one with a fee higher by
    ``bump_percent``, as long as it costs no more than ``highest_fee`` in all. ``gas_reserve`` is
    what the hot wallet should always hold. Deposits of ``sweep_units`` and more are swept, at
    most ``sweep_batch`` at a time. ``l1_fee_oracle`` tells what the chain takes for data on L1
    (EIP-55, OP stack); None on a chain that takes nothing for that.
    """

    name: str
    chain_id: int
    token: str
    confirmations: int | None = 20
    settled_after: int = 20
    failed_after: int = 60
    tracked_blocks: int = 2000
    block_seconds: float = 12.0
    start_block: int | None = None
    bump_after_ms: int = 60_000
    bump_percent: int = 25
    highest_fee: int = 5_000_000 * _GWEI
    gas_reserve: int = 2_000_000 * _GWEI
    sweep_units: int = 1_000_000
    sweep_batch: int = 20
    l1_fee_oracle: str | None = None

    def __post_init__(self) -> None:
        least = {"chain_id": 1, "settled_after": 1, "failed_after": 1, "tracked_blocks": 1,
                 "bump_after_ms": 1, "bump_percent": 10, "highest_fee": 1, "sweep_units": 1,
                 "sweep_batch": 1}  # fmt: skip
        for field, bound in least.items():
            if getattr(self, field) < bound:
                raise ValueError(f"{self.name}: {field} must be at least {bound}")
        if self.confirmations is not None and self.confirmations < 1:
            raise ValueError(f"{self.name}: confirmations must be at least 1")
        if self.block_seconds <= 0:
            raise ValueError(f"{self.name}: block_seconds must be above 0")


class EvmOptions(Struct, frozen=True):
    """Options that all chains share. Addresses are the same on each.

    ``pool_target`` addresses are made ahead, again when fewer than ``pool_low`` are left.
    ``authorization_gas``: USDC units that gas for signed authorizations may cost in 24 hours.
    ``test_networks``: the chains' test networks are served instead of them.
    """

    pool_target: int = 256
    pool_low: int = 128
    authorization_gas: int = 25_000_000
    test_networks: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.pool_low <= self.pool_target:
            raise ValueError("pool_low must be above 0 and not above pool_target")


class Conditions:
    """Conditions that the operator should know, in words; a new one is logged."""

    def __init__(self, network: str) -> None:
        self._network = network
        self._texts: dict[str, str] = {}

    def set(self, key: str, text: str | None) -> None:
        """Keep a condition, or drop it (None)."""
        if text is None:
            self._texts.pop(key, None)
            return
        if self._texts.get(key) != text:
            log.error("evm_condition_reported", network=self._network, condition=text)
        self._texts[key] = text

    def texts(self) -> list[str]:
        """The texts of all present conditions."""
        return list(self._texts.values())


_DECIMALS: Final = 6
_LEAST_GAP_MS: Final = 10 * 60_000
_LONGEST_GAP_BLOCKS: Final = 100

T = TypeVar("T")


class EvmConnection:
    """One node, checked. ``problem`` says what is wrong, for the operator; None: nothing.

    ``domain`` is the token's EIP-712 domain, found to be the contract's own. ``paused``: the
    token moves nothing for anyone just now.
    """

    def __init__(self, client: EvmClient, network: EvmNetwork) -> None:
        self.client = client
        self.network = network
        self.problem: str | None = "not started"
        self.paused = False
        self._stall_detector = StallDetector(
            max(_LEAST_GAP_MS, round(_LONGEST_GAP_BLOCKS * network.block_seconds * 1000))
        )
        self._domain: usdc.Domain | None = None
        self._failures = 0

    @property
    def domain(self) -> usdc.Domain:
        """The token's domain. Raises errors.Unavailable before the first check."""
        if self._domain is None:
            raise self._unavailable()
        return self._domain

    @property
    def failures(self) -> int:
        """The number of failed calls: once it has changed, the node may be another one."""
        return self._failures

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn failures of the node into errors.Unavailable, and remember the reason."""
        try:
            yield
        except RpcFailure as failure:
            verb = "refuses" if isinstance(failure, NodeError) else "is down"
            self._note(f"the node of {self.network.name} {verb}: {failure}")
            raise self._unavailable() from failure
        except ChainUnusable as found:
            self._note(str(found))
            raise self._unavailable() from found

    async def check(self) -> Block:
        """The newest block, of a node that was found right. Raises RpcFailure and ChainUnusable.

        Raises errors.Unavailable when another call failed meanwhile: the node that answers now
        may not be the one that was checked.
        """
        failures = self._failures
        if self.problem is not None:
            await self._check_network()
            self._domain = await self._checked_domain()
        block = await self.client.block()
        if block is None:
            raise ChainUnusable(f"the node of {self.network.name} has no block")
        self._stall_detector.saw(block.number)
        self.paused = await self._ask(usdc.PAUSED, usdc.read_bool)
        if self._failures != failures:
            raise self._unavailable()
        if self.problem is not None:
            log.info("evm_connected", network=self.network.name, block=block.number)
        self.problem = None
        return block

    def block_age(self) -> int | None:
        """Time (ms) since the node showed a new block; None before the first."""
        return self._stall_detector.age_ms()

    def height(self) -> int | None:
        """The number of the node's newest block at the last look; None before the first."""
        return self._stall_detector.height

    def stall(self) -> str | None:
        """A message for the operator when the chain has stalled; else None."""
        return self._stall_detector.problem(f"the node of {self.network.name}")

    async def has(self, point: BlockPoint) -> bool:
        """Whether this block is on the node's chain now. Raises RpcFailure."""
        block = await self.client.block(point.number)
        return block is not None and block.hash == point.hash

    async def is_blacklisted(self, account: str) -> bool:
        """Whether the token refuses this account, as sender and as recipient."""
        return await self._ask(usdc.is_blacklisted(account), usdc.read_bool)

    async def balance(self, account: str, at: BlockRef = Tag.LATEST) -> int:
        """The account's USDC units in a block."""
        return await self._ask(usdc.balance_of(account), usdc.read_uint, at)

    async def _check_network(self) -> None:
        found = await self.client.chain_id()
        if found != self.network.chain_id:
            raise ChainUnusable(
                f"wrong network: the node of {self.network.name} is on chain {found}, not on"
                f" {self.network.chain_id}"
            )

    async def _checked_domain(self) -> usdc.Domain:
        """The domain as the contract has it; its name differs between chains."""
        token = self.network.token
        if not await self.client.code(token):
            raise ChainUnusable(f"there is no contract at {token} on {self.network.name}")
        decimals = await self._ask(usdc.DECIMALS, usdc.read_uint)
        if decimals != _DECIMALS:
            raise ChainUnusable(
                f"the token on {self.network.name} has {decimals} decimals, USDC has 6"
            )
        name = await self._ask(usdc.NAME, usdc.read_string)
        version = await self._ask(usdc.VERSION, usdc.read_string)
        domain = usdc.Domain(name, version, self.network.chain_id, token)
        if domain.separator() != await self._ask(usdc.DOMAIN_SEPARATOR, usdc.read_bytes32):
            raise ChainUnusable(
                f"the token on {self.network.name} signs in another domain than its name, version,"
                " chain and address say: it is not the USDC that is meant"
            )
        return domain

    async def _ask(self, data: bytes, read: Callable[[bytes], T], at: BlockRef = Tag.LATEST) -> T:
        """A call of the token. Raises RpcFailure; ChainUnusable when it has no such function."""
        try:
            return read(await self.client.call(EvmCall(self.network.token, data), at))
        except Reverted as error:
            raise ChainUnusable(
                f"the token on {self.network.name} refuses a call of USDC"
            ) from error
        except ValueError as error:
            raise ChainUnusable(
                f"the token on {self.network.name} answers unlike USDC, or lacks a function of it"
            ) from error

    def _unavailable(self) -> Unavailable:
        return Unavailable(
            f"USDC on {self.network.name} can't be settled right now. Try again later."
        )

    def _note(self, reason: str) -> None:
        self._failures += 1
        if reason != self.problem:
            log.warning("evm_disconnected", network=self.network.name, reason=reason)
        self.problem = reason
