"""Rebuilding the signed bytes of a transaction from a node's JSON."""

from __future__ import annotations

import pytest

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.evm.keys import TransactionPlan, rlp, signed_fields
from tests.unit.evm_chain import TOKEN, USER
from tests.unit.evm_raw import GWEI, HOT, signed


def test_the_bytes_are_those_that_were_signed() -> None:
    reported = signed()
    plan = TransactionPlan(
        chain_id=42161, nonce=4, to=TOKEN, gas=60_000, max_fee=5 * GWEI, tip=GWEI // 2,
        data=usdc.transfer(USER, 50),
    )  # fmt: skip
    assert signed_fields(reported).raw == HOT.sign(plan).raw
    by_v = {**reported, "v": reported["yParity"]}
    del by_v["yParity"]
    assert signed_fields(by_v).raw == HOT.sign(plan).raw


def test_the_bytes_of_an_old_transaction_are_put_together_too() -> None:
    fields = {"nonce": 1, "gasPrice": GWEI, "gas": 60_000, "to": TOKEN, "value": 0,
              "data": usdc.transfer(USER, 50), "chainId": 42161}  # fmt: skip
    made = HOT._account.sign_transaction(fields)
    reported = {
        "hash": "0x" + bytes(made.hash).hex(), "from": HOT.address, "to": TOKEN, "value": "0x0",
        "input": "0x" + usdc.transfer(USER, 50).hex(), "nonce": "0x1", "gasPrice": hex(GWEI),
        "gas": hex(60_000), "v": hex(made.v), "r": hex(made.r), "s": hex(made.s),
    }  # fmt: skip
    assert signed_fields(reported).raw == bytes(made.raw_transaction)


@pytest.mark.parametrize("name", ["nonce", "gas", "maxFeePerGas", "value", "input", "r", "to"])
def test_a_field_that_was_not_signed_so_is_noticed(name: str) -> None:
    reported = signed()
    last = reported[name][-1]
    with pytest.raises(ValueError, match="id"):
        signed_fields({**reported, name: reported[name][:-1] + ("1" if last != "1" else "2")})
    del reported[name]
    with pytest.raises(ValueError, match="missing"):
        signed_fields(reported)


@pytest.mark.parametrize("kind", ["0x1", "0x3", "0x7e"])
def test_types_that_the_service_does_not_sign_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="field"):
        signed_fields({**signed(), "type": kind})


def test_rlp_is_that_of_the_yellow_paper() -> None:
    assert rlp(b"dog").hex() == "83646f67"
    assert rlp([b"cat", b"dog"]).hex() == "c88363617483646f67"
    assert (rlp(b""), rlp([]), rlp(b"\x0f"), rlp(b"\x80")) == (
        b"\x80", b"\xc0", b"\x0f", b"\x81\x80",
    )  # fmt: skip
    assert rlp(b"x" * 56)[:2].hex() == "b838"
    assert rlp([b"x" * 56])[:2].hex() == "f83a"
