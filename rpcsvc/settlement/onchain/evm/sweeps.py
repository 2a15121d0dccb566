"""Sweeps confirmed deposits from their addresses to the hot wallet of one network.

A deposit address never holds ether: its key signs an authorization (EIP-3009), which the hot wallet
sends as a payment. A token that always refuses those is swept by permit and transferFrom
(EIP-2612). The payment shows what a sweep took; if it failed, the authorization's state and the
balance do. An address that can't be swept is reported and retried after an hour. Payouts go first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.clock import Clock
from rpcsvc.domain import usdc
from rpcsvc.errors import Unavailable
from rpcsvc.health import Condition, Severity
from rpcsvc.settlement.onchain.backoff import Backoff
from rpcsvc.settlement.onchain.evm.keys import EvmSigner, HdKeys
from rpcsvc.settlement.onchain.evm.node import Conditions, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, BlockRef, EvmCall, Reverted, Tag
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.payments import EvmPayments
from rpcsvc.settlement.onchain.evm.records import (
    BlockPoint,
    EvmPayment,
    EvmPaymentOrder,
    EvmPaymentState,
    EvmPurpose,
    Sweep,
    SweepMethod,
    SweepState,
    UnsweptAddress,
)

log = structlog.get_logger(__name__)

_RARELY_MS: Final = 60 * 60 * 1000
# After a sweep that the hot wallet could not pay for: a try asks the node ten times.
_FIRST_PAUSE_MS: Final = 4_000
_LONGEST_PAUSE_MS: Final = 5 * 60 * 1000
_ALLOWANCE: Final = usdc.selector("allowance(address,address)")
# The hot wallet alone can use these signatures, so that they need not run out.
_NEVER: Final = usdc.LARGEST_WORD
_ALL: Final = "all addresses"
_GAS: Final = "gas"


class _Postponed(Exception):
    """An address can't be swept for now. The text is for the operator."""


class _SweepStep(Struct, frozen=True):
    """A call of the token that brings an address's deposits nearer."""

    method: SweepMethod
    units: int
    data: bytes
    gas: int
    authorization: str | None = None


class EvmSweeps:
    """Sweeps one network. All may raise RpcFailure and ChainUnusable."""

    def __init__(
        self,
        connection: EvmConnection,
        payments: EvmPayments,
        ledger: EvmPaymentLedger,
        keys: HdKeys,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._network = connection.network
        self._payments = payments
        self._ledger = ledger
        self._keys = keys
        self._clock = clock
        self._conditions = Conditions(connection.network.name, Severity.NOTE)
        self._not_before: dict[str, int] = {}
        self._backoff = Backoff(clock.now_ms, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        # Since the start: sent, done, void.
        self.counts: Counter[str] = Counter()

    def conditions(self) -> list[Condition]:
        """Return the obstacles to sweeping deposits, for the operator."""
        return self._conditions.present()

    async def maintain(self, head: Block) -> None:
        """Record the sweeps that have ended by the newest block, ``head``; begin those due."""
        under_way = await self._ledger.sweeps_under_way(self._network.name)
        ended = [await self._end(sweep, head.number) for sweep in under_way]
        await self._begin(self._network.sweep_batch - ended.count(False))

    async def are_due(self) -> bool:
        """Whether a sweep may begin or end now, as far as is known. Raises Unavailable."""
        if await self._ledger.sweeps_under_way(self._network.name):
            return True
        if self._connection.paused or self._payments.gas.is_blacklisted:
            return False
        if self._gas_problem() is not None or not self._backoff.is_due(_GAS):
            return False
        return bool(self._due_now(await self._unswept()))

    async def _can_move(self) -> bool:
        """Whether the token moves anything to the hot wallet just now."""
        problem = None
        if self._connection.paused:
            problem = f"USDC on {self._network.name} is paused by its issuer: nothing is swept"
        elif await self._connection.is_blacklisted(self._payments.hot_wallet):
            problem = f"the hot wallet is on the blacklist of USDC on {self._network.name}"
        self._conditions.set(_ALL, problem)
        return problem is None

    async def _begin(self, room: int) -> None:
        unswept = await self._unswept()
        self._forget_all_but({due.address for due in unswept})
        due_now = self._due_now(unswept)
        if not due_now:
            self._conditions.set(_ALL, None)
            return
        if not self._can_pay() or not await self._can_move():
            return
        for due in due_now:
            if room <= 0 or await self._payments.payouts_first():
                return
            try:
                step = await self._step(due)
            except _Postponed as reason:
                self._postpone(due.address, str(reason))
                continue
            if step is None:
                continue
            if not await self._send(due, step):
                return
            room -= 1

    async def _unswept(self) -> list[UnsweptAddress]:
        return await self._ledger.unswept(self._network.name, self._network.sweep_units)

    def _due_now(self, unswept: Sequence[UnsweptAddress]) -> list[UnsweptAddress]:
        """Return the addresses whose sweep is not postponed."""
        now = self._clock.now_ms()
        return [item for item in unswept if self._not_before.get(item.address, 0) <= now]

    def _can_pay(self) -> bool:
        """Whether the hot wallet may be able to pay for a sweep now. Asks nobody."""
        problem = self._gas_problem()
        if problem is not None:
            self._report_gas(problem)
        return problem is None and self._backoff.is_due(_GAS)

    def _gas_problem(self) -> str | None:
        """Return why no sweep can be paid for, as of the last refresh; None if nothing is known."""
        gas, network = self._payments.gas, self._network
        if gas.is_too_dear():
            return f"gas on {network.name} is too dear for a payment right now"
        if gas.hot is not None and gas.hot.ether < network.gas_reserve:
            return f"the hot wallet on {network.name} lacks ether for gas"
        return None

    def _report_gas(self, problem: str) -> None:
        self._conditions.set(_GAS, f"nothing is swept on {self._network.name}: {problem}")

    async def _send(self, due: UnsweptAddress, step: _SweepStep) -> bool:
        """Commit and publish; False when the hot wallet can't pay the gas now."""
        name = f"sweep-{self._network.name}-{due.address_index}-{due.serial}"
        order = EvmPaymentOrder(
            name, EvmPurpose.SWEEP, self._payments.hot_wallet, step.units, self._network.token,
            step.data, step.gas,
        )  # fmt: skip
        sweep = Sweep(
            self._network.name, due.address_index, due.serial, due.address, step.method,
            step.units, step.authorization, name,
        )  # fmt: skip
        try:
            verdict = await self._payments.send(order, sweep)
        except Unavailable as error:
            self._backoff.note(_GAS)
            self._report_gas(error.message)
            return False
        self._backoff.forget(_GAS)
        self._conditions.set(_GAS, None)
        self._forget(due.address)
        self.counts["sent"] += 1
        log.info("evm_sweep_sent", payment_id=name, method=step.method.value, units=step.units,
                 outcome=verdict.outcome.value)  # fmt: skip
        return True

    # --- steps ---------------------------------------------------------------------------------

    async def _step(self, due: UnsweptAddress) -> _SweepStep | None:
        """The next call for an address; None when there is none to make. Raises _Postponed."""
        signer = self._keys.signer(due.address_index)
        if signer.address != due.address:
            raise _Postponed(f"{due.address} is not of this mnemonic: it can't be swept")
        if await self._connection.is_blacklisted(due.address):
            raise _Postponed(f"{due.address} is on the token's blacklist: not swept")
        held = await self._connection.balance(due.address)
        units = min(due.units, held)
        if units >= self._network.sweep_units:
            return await self._receive(due, units, signer)
        if await self._redo_void_sweeps(due):
            return None
        if not await self._is_used(due.address, self._authorization_nonce(due)):
            raise _Postponed(
                f"{due.address} holds {held} USDC units where {due.units} were deposited and not"
                " swept: something else takes from it"
            )
        await self._already(due)
        return None

    async def _receive(
        self, due: UnsweptAddress, units: int, signer: EvmSigner
    ) -> _SweepStep | None:
        nonce = self._authorization_nonce(due)
        authorization = usdc.Authorization(
            due.address, self._payments.hot_wallet, units, 0, _NEVER, nonce
        )
        signature = signer.sign_digest(usdc.receive_digest(self._connection.domain, authorization))
        data = usdc.receive_with_authorization(authorization, signature)
        try:
            gas = await self._payments.gas.estimate(data)
        except Reverted as refusal:
            if await self._is_used(due.address, nonce):
                await self._already(due)
                return None
            log.info("evm_sweep_refused", address=due.address, reason=str(refusal))
            return await self._second_choice(due, units, signer)
        return _SweepStep(SweepMethod.RECEIVE, units, data, gas, nonce.hex())

    async def _second_choice(
        self, due: UnsweptAddress, units: int, signer: EvmSigner
    ) -> _SweepStep | None:
        """Return the step by permit and take: the token refuses the first choice for no known
        reason.
        """
        await self._connection.check()  # it may have been paused since the last look
        if not await self._can_move():
            return None
        method = SweepMethod.TAKE
        data = usdc.transfer_from(due.address, self._payments.hot_wallet, units)
        if await self._allowance(due.address) < units:
            method, data = SweepMethod.PERMIT, await self._permit(due, units, signer)
        try:
            gas = await self._payments.gas.estimate(data)
        except Reverted as refusal:
            raise _Postponed(
                f"the token lets {due.address} be swept neither way: {refusal.text}"
            ) from refusal
        return _SweepStep(method, units, data, gas)

    async def _permit(self, due: UnsweptAddress, units: int, signer: EvmSigner) -> bytes:
        nonce = usdc.read_uint(await self._ask(usdc.nonces(due.address)))
        permit = usdc.Permit(due.address, self._payments.hot_wallet, units, nonce, _NEVER)
        signature = signer.sign_digest(usdc.permit_digest(self._connection.domain, permit))
        return usdc.permit_call(permit, signature)

    async def _allowance(self, owner: str) -> int:
        words = usdc.address_word(owner) + usdc.address_word(self._payments.hot_wallet)
        return usdc.read_uint(await self._ask(_ALLOWANCE + words))

    async def _is_used(self, address: str, nonce: bytes, at: BlockRef = Tag.LATEST) -> bool:
        return usdc.read_bool(await self._ask(usdc.authorization_state(address, nonce), at))

    async def _ask(self, data: bytes, at: BlockRef = Tag.LATEST) -> bytes:
        return await self._connection.client.call(EvmCall(self._network.token, data), at)

    def _authorization_nonce(self, due: UnsweptAddress) -> bytes:
        """Return the nonce of a sweep's authorization, which follows from the sweep: a database
        from a backup finds it used.
        """
        return usdc.keccak256(
            b"sweep"
            + usdc.uint_word(self._network.chain_id)
            + usdc.address_word(self._network.token)
            + usdc.address_word(due.address)
            + usdc.uint_word(due.serial)
        )

    # --- how it ended --------------------------------------------------------------------------

    async def _redo_void_sweeps(self, due: UnsweptAddress) -> bool:
        """Record void sweeps whose authorization is used; return whether there is one.

        A reorganisation has replaced the block in which the payment failed, and it was mined again.
        """
        found = False
        for sweep in await self._ledger.void_sweeps(self._network.name, due.address_index):
            if await self._is_used(due.address, bytes.fromhex(sweep.authorization or "")):
                log.warning("evm_void_sweep_mined", payment_id=sweep.payment_id)
                done = replace(sweep, state=SweepState.DONE, taken=sweep.units)
                await self._ledger.put_sweep(done)
                found = True
        return found

    async def _already(self, due: UnsweptAddress) -> None:
        """Record what a payment that is not on record took with the authorization.

        The balance tells, in a block in which the authorization is used: an earlier balance has
        what was taken still. So after a restored backup, or when the same keys are used elsewhere.
        """
        at = (await self._connection.check()).number
        if not await self._is_used(due.address, self._authorization_nonce(due), at):
            return  # the node that answers now lags: the next round looks again
        held = usdc.read_uint(await self._ask(usdc.balance_of(due.address), at))
        taken = max(due.units - held, 0)
        log.warning("evm_sweep_found_completed", address=due.address, units=taken)
        await self._ledger.add_sweep(
            Sweep(
                self._network.name, due.address_index, due.serial, due.address,
                SweepMethod.RECEIVE, due.units, self._authorization_nonce(due).hex(), None,
                SweepState.DONE, taken,
            )
        )  # fmt: skip

    async def _end(self, sweep: Sweep, top: int) -> bool:
        """Record how a sweep ended, by the state of block ``top``; return False while it has not.

        Of several nodes behind one address some lag: the newest state of one of those may be from
        before the sweep.
        """
        payment = await self._ledger.payment(sweep.payment_id or "")
        if payment is None or payment.state not in (
            EvmPaymentState.SETTLED,
            EvmPaymentState.FAILED,
        ):
            return False
        block = _ended_in(payment)
        if block is None or block.number > top:
            return False
        settled = payment.state is EvmPaymentState.SETTLED
        taken = await (self._taken(sweep, top) if settled else self._taken_anyway(sweep, top))
        is_done = taken > 0 or (settled and sweep.method is SweepMethod.PERMIT)
        state = SweepState.DONE if is_done else SweepState.VOID
        await self._ledger.put_sweep(replace(sweep, state=state, taken=taken))
        self.counts[state.value] += 1
        if not is_done:
            # Trying again at once would cost gas each time.
            self._postpone(sweep.address, f"the sweep {sweep.payment_id} of {sweep.address} failed")
        return True

    async def _taken(self, sweep: Sweep, at: int) -> int:
        """The units that a sweep took, given that its payment is settled."""
        if sweep.method is SweepMethod.PERMIT:
            return 0
        if sweep.authorization is None:
            return sweep.units
        is_used = await self._is_used(sweep.address, bytes.fromhex(sweep.authorization), at)
        return sweep.units if is_used else 0

    async def _taken_anyway(self, sweep: Sweep, at: int) -> int:
        """The units that left the address although the payment failed: keys were used elsewhere."""
        if sweep.authorization is not None:
            nonce = bytes.fromhex(sweep.authorization)
            if not await self._is_used(sweep.address, nonce, at):
                return 0
        left = await self._ledger.unswept_of(self._network.name, sweep.address_index)
        held = usdc.read_uint(await self._ask(usdc.balance_of(sweep.address), at))
        return min(max(left - held, 0), sweep.units)

    # --- conditions -----------------------------------------------------------------------------

    def _postpone(self, address: str, text: str) -> None:
        self._not_before[address] = self._clock.now_ms() + _RARELY_MS
        self._conditions.set(address, f"{self._network.name}: {text}")

    def _forget(self, address: str) -> None:
        self._not_before.pop(address, None)
        self._conditions.set(address, None)

    def _forget_all_but(self, unswept: set[str]) -> None:
        """Drop the conditions of addresses that have nothing to sweep any more."""
        for address in set(self._not_before) - unswept:
            self._forget(address)


def _ended_in(payment: EvmPayment) -> BlockPoint | None:
    """Return the block in which the payment was mined, or its nonce spent by another.

    None when a reorganisation took it: it is published again, and may yet take the deposits.
    """
    return payment.inclusion.block if payment.inclusion is not None else payment.conflict
