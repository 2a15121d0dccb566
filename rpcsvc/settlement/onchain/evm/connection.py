"""Whether an EVM node is there, on the right network, and its token is the USDC that is meant.

Nothing is asked of a node, for an order, before this module has found it right; what it found is
thrown away at the first sign of trouble, so that a node which comes back as another is caught.
What does not live here: what the node is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import structlog

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, RpcFailure
from rpcsvc.settlement.onchain.evm import usdc
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import Block, EvmCall, Reverted
from rpcsvc.settlement.onchain.evm.options import EvmNetwork
from rpcsvc.settlement.onchain.evm.payment_ledger import BlockPoint
from rpcsvc.settlement.onchain.stall_detector import StallDetector
from rpcsvc.settlement.onchain.unusable import ChainUnusable

log = structlog.get_logger(__name__)

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
        """How often a call failed: another number, and the node may be another one."""
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
            log.info("evm_ready", network=self.network.name, block=block.number)
        self.problem = None
        return block

    def stall(self) -> str | None:
        """That the chain does not go on, for the operator."""
        return self._stall_detector.problem(f"the node of {self.network.name}")

    async def has(self, point: BlockPoint) -> bool:
        """Whether this block is on the node's chain now. Raises RpcFailure."""
        block = await self.client.block(point.number)
        return block is not None and block.hash == point.hash

    async def is_blacklisted(self, account: str) -> bool:
        """Whether the token refuses this account, as sender and as recipient."""
        return await self._ask(usdc.is_blacklisted(account), usdc.read_bool)

    async def balance(self, account: str) -> int:
        """The account's USDC units in the newest block."""
        return await self._ask(usdc.balance_of(account), usdc.read_uint)

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

    async def _ask(self, data: bytes, read: Callable[[bytes], T]) -> T:
        """A call of the token. Raises RpcFailure; ChainUnusable when it has no such function."""
        try:
            return read(await self.client.call(EvmCall(self.network.token, data)))
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
            log.warning("evm_not_ready", network=self.network.name, reason=reason)
        self.problem = reason
