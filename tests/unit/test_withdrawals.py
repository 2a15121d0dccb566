"""The states of a withdrawal: transitions and invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from rpcsvc.domain.money import USDC
from rpcsvc.domain.order import FINAL_TRANSFERS, TransferKind, TransferState
from rpcsvc.domain.withdrawals import (
    SIGN_WITHIN_MS,
    ImpossibleStep,
    Withdrawal,
    is_withdrawal,
    is_withdrawal_id,
    signed,
    stepped,
)

NOW = 1_763_678_000_000
PLANNED = Withdrawal("wd_test", "arbitrum", USDC, "0x" + "0b" * 20, 5, 1, NOW, NOW)
CHANGES = {"state", "txid", "raw", "reason", "receipt", "changed_at"}


def kept(item: Withdrawal) -> dict[str, object]:
    return {name: value for name, value in asdict(item).items() if name not in CHANGES}


@given(st.lists(st.sampled_from(TransferState), max_size=12))
def test_withdrawal_keeps_its_terms_and_bytes_whatever_comes(asked: list[TransferState]) -> None:
    item, seen = PLANNED, [PLANNED]
    for at, state in enumerate(asked, 1):
        try:
            if state is TransferState.PREPARED:
                item = signed(item, f"tx{at}", f"{at:02x}", NOW + at)
            else:
                item = stepped(item, state, NOW + at)
        except ImpossibleStep:
            continue
        seen.append(item)
    assert all(kept(each) == kept(PLANNED) for each in seen)
    assert len({each.txid for each in seen} - {None}) <= 1
    states = [each.state for each in seen]
    assert not FINAL_TRANSFERS.intersection(states[:-1])
    # A signed withdrawal is never cancelled, and only a planned one is signed.
    if TransferState.PREPARED in states:
        assert states.index(TransferState.PREPARED) == 1
        assert TransferState.CANCELLED not in states
    assert (item.txid is None) == (TransferState.PREPARED not in states)


@pytest.mark.parametrize("end", sorted(FINAL_TRANSFERS))
@pytest.mark.parametrize("state", TransferState)
def test_ended_withdrawal_does_not_change(end: TransferState, state: TransferState) -> None:
    with pytest.raises(ImpossibleStep, match="wd_test is"):
        stepped(replace(PLANNED, state=end), state, NOW)


def test_step_tells_when_and_why() -> None:
    prepared = signed(PLANNED, "tx", "00", NOW + 1)
    assert (prepared.changed_at, prepared.created_at) == (NOW + 1, NOW)
    unknown = stepped(prepared, TransferState.UNKNOWN, NOW + 2, reason="no answer")
    assert unknown == replace(
        prepared, state=TransferState.UNKNOWN, changed_at=NOW + 2, reason="no answer"
    )
    published = stepped(unknown, TransferState.PUBLISHED, NOW + 3)
    assert (published.reason, published.changed_at) == (None, NOW + 3)
    settled = stepped(published, TransferState.SETTLED, NOW + 4, receipt="proof")
    assert (settled.receipt, settled.reason, settled.raw) == ("proof", None, "00")


def test_withdrawal_expires_unsigned_only() -> None:
    last = NOW + SIGN_WITHIN_MS
    assert not PLANNED.is_expired(last - 1)
    assert PLANNED.is_expired(last)
    assert not signed(PLANNED, "tx", "00", NOW).is_expired(last)


def test_withdrawal_is_paid_as_a_transfer_of_no_order() -> None:
    item = signed(PLANNED, "tx", "00", NOW)
    paid = item.transfer
    assert (paid.transfer_id, paid.kind) == ("wd_test", TransferKind.PAYOUT)
    assert (paid.network, paid.address, paid.units) == item.terms
    assert (paid.txid, paid.raw, paid.state) == ("tx", "00", TransferState.PREPARED)
    assert (paid.fee, paid.asset, paid.reason, paid.receipt) == (1, USDC, None, None)
    ended = stepped(item, TransferState.SETTLED, NOW, reason="why", receipt="proof").transfer
    assert (ended.reason, ended.receipt) == ("why", "proof")
    assert is_withdrawal(paid.transfer_id)
    assert not is_withdrawal("ord_1/payout/1")


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("wd_2026-11-24_a", True), ("wd_abcd", True), ("wd_abc", False), ("ord_abcd", False),
        ("wd_" + "a" * 60, True), ("wd_" + "a" * 61, False), ("wd_ab/d", False),
        ("wd_abcd\n", False), ("wd_äbcd", False), ("", False),
    ],
)  # fmt: skip
def test_withdrawal_id_has_one_form(text: str, is_good: bool) -> None:
    assert is_withdrawal_id(text) is is_good
