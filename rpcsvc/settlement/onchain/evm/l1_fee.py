"""What an OP-stack chain takes for putting a transaction's bytes on L1: its oracle is asked.

It comes on top of gas times price, out of the sender's ether, when the transaction is mined; no
field of a transaction bounds it, so that it is estimated with a margin. Amounts are wei. What does
not live here: gas and its price (gas.py, fees.py), which chains have an oracle (the table
of chains).
Source: the OP Stack specification, "L1 data fee" and the predeploy GasPriceOracle; EIP-1559 and
EIP-2718 for the unsigned transaction that it takes. It adds what a signature takes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.evm import usdc
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.fees import with_l1_margin
from rpcsvc.settlement.onchain.evm.keys import TransactionPlan
from rpcsvc.settlement.onchain.evm.node_types import EvmCall
from rpcsvc.settlement.onchain.evm.payment_ledger import PaymentOrder

log = structlog.get_logger(__name__)

GET_L1_FEE: Final = usdc.selector("getL1Fee(bytes)")
_WORD_BYTES: Final = 32
# What is not known before signing is taken at its widest: each byte of it is paid for.
_NONCE: Final = 2**24 - 1
_FEE: Final = 2**40 - 1
_EIP_1559: Final = b"\x02"
_SHORT: Final = 55
_STRING: Final = 0x80
_LIST: Final = 0xC0


class L1Fee:
    """The L1 part of what transactions of one network cost; 0 on a network without an oracle."""

    def __init__(self, connection: EvmConnection) -> None:
        self._connection = connection
        self._network = connection.network

    async def of(self, order: PaymentOrder) -> int:
        """Wei that a call may cost for its bytes, with margin. Raises RpcFailure.

        Raises Unavailable when the oracle gives no fee: it is never taken to be 0.
        """
        oracle = self._network.l1_fee_oracle
        if oracle is None:
            return 0
        plan = TransactionPlan(
            chain_id=self._network.chain_id, nonce=_NONCE, to=order.contract, gas=order.gas,
            max_fee=_FEE, tip=_FEE, data=order.data,
        )  # fmt: skip
        try:
            answer = await self._connection.client.call(
                EvmCall(oracle, l1_fee_call(unsigned(plan)))
            )
            return with_l1_margin(usdc.read_uint(answer))
        except (NodeError, ValueError) as error:
            log.warning("evm_l1_fee_not_told", network=self._network.name, reason=str(error))
            raise Unavailable(
                f"What {self._network.name} takes for data on L1 is not known right now: its"
                f" oracle {oracle} gives no fee."
            ) from error


def l1_fee_call(transaction: bytes) -> bytes:
    """The oracle's call for an unsigned transaction (ABI: one dynamic ``bytes``)."""
    padding = bytes(-len(transaction) % _WORD_BYTES)
    head = usdc.uint_word(_WORD_BYTES) + usdc.uint_word(len(transaction))
    return GET_L1_FEE + head + transaction + padding


def unsigned(plan: TransactionPlan) -> bytes:
    """The transaction as it is before it is signed (EIP-1559), without an access list."""
    numbers = (plan.chain_id, plan.nonce, plan.tip, plan.max_fee, plan.gas)
    fields = [*map(_number, numbers), _string(bytes.fromhex(plan.to[2:])), _number(plan.value)]
    return _EIP_1559 + _list([*fields, _string(plan.data), _list([])])


# --- RLP (Ethereum yellow paper, appendix B) -------------------------------------------------


def _number(value: int) -> bytes:
    return _string(_digits(value))


def _string(value: bytes) -> bytes:
    if len(value) == 1 and value[0] < _STRING:
        return value
    return _with_length(_STRING, value)


def _list(items: Sequence[bytes]) -> bytes:
    """A list of items that are encoded already."""
    return _with_length(_LIST, b"".join(items))


def _with_length(kind: int, payload: bytes) -> bytes:
    if len(payload) <= _SHORT:
        return bytes([kind + len(payload)]) + payload
    size = _digits(len(payload))
    return bytes([kind + _SHORT + len(size)]) + size + payload


def _digits(value: int) -> bytes:
    """Big-endian without leading zeros; nothing for 0."""
    return value.to_bytes((value.bit_length() + 7) // 8, "big")
