"""A malformed transaction key is not sent to the wallet daemon, which would crash on it."""

from __future__ import annotations

from typing import Any

import pytest

from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, NodeError
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import WalletCode

ORDER = 2**252 + 27742317777372353535851937790883648493


def scalar(value: int) -> str:
    return value.to_bytes(32, "little").hex()


class DaemonCalled(Exception):
    """The daemon was called."""


@pytest.fixture
def wallet(monkeypatch: pytest.MonkeyPatch) -> WalletClient:
    made = WalletClient(DaemonEndpoint("wallet", "http://127.0.0.1:1", serial=True))

    async def ask(*_: Any) -> None:
        raise DaemonCalled

    monkeypatch.setattr(made.rpc, "read", ask)
    return made


@pytest.mark.parametrize(
    "key",
    ["", "00", "zz" * 32, "11" * 32, scalar(ORDER), scalar(0), scalar(1) + "ff" * 32, " " * 64,
     scalar(1)[:-1] + "\u0661"],
)  # fmt: skip
async def test_what_can_not_be_a_key_is_not_asked_about(wallet: WalletClient, key: str) -> None:
    with pytest.raises(NodeError) as refused:
        await wallet.check_key("ab" * 32, key, "4x")
    assert refused.value.code == WalletCode.WRONG_TX_KEY


@pytest.mark.parametrize("key", [scalar(ORDER - 1), scalar(1).upper(), scalar(1) + scalar(0)])
async def test_what_may_be_a_key_is(wallet: WalletClient, key: str) -> None:
    with pytest.raises(DaemonCalled):
        await wallet.check_key("ab" * 32, key, "4x")
