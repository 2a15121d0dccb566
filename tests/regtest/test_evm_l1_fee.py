"""The L1 data fee of an OP-stack chain: Anvil with a contract where such a chain has its oracle."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.onchain.evm.adapter import RESTING_MS
from rpcsvc.settlement.onchain.evm.gas import price_of as price_at
from rpcsvc.settlement.onchain.evm.gas import with_l1_margin
from rpcsvc.settlement.onchain.evm.node import EvmClient
from tests.regtest.daemons import Anvil
from tests.regtest.evm_payer import (
    COIN_PRICE,
    ETHER,
    GWEI,
    HOT,
    MINUTE_MS,
    NETWORK,
    USDC,
    USER,
    EvmPayer,
    adapter_on,
    evm_payer,
    network_of,
)
from tests.regtest.token import Token

pytestmark = pytest.mark.slow  # the quick tests must stay quick

ORACLE: Final = "0x420000000000000000000000000000000000000F"
SOURCE: Final = Path(__file__).parent / "contracts" / "GasPriceOracle.vy"
SLOT: Final = "0x1"
# Approximate bytes of a signed transfer of USDC.
LEAST_BYTES, MOST_BYTES = 160, 200


@pytest.fixture(scope="module")
def oracle_code() -> str:
    """The code that is put at the oracle's address."""
    command = [sys.executable, "-m", "vyper", "-f", "bytecode_runtime", str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Oracle:
    """The contract at the oracle's address."""

    def __init__(self, client: EvmClient, code: str) -> None:
        self._rpc = client.rpc
        self._code = code

    async def put(self, wei_per_byte: int) -> None:
        await self._rpc.act("anvil_setCode", [ORACLE, self._code])
        await self.price(wei_per_byte)

    async def price(self, wei_per_byte: int) -> None:
        """Set the fee per byte; with 0 the oracle reverts."""
        word = "0x" + usdc.uint_word(wei_per_byte).hex()
        await self._rpc.act("anvil_setStorageAt", [ORACLE, SLOT, word])

    async def remove(self) -> None:
        await self._rpc.act("anvil_setCode", [ORACLE, "0x"])


@pytest.fixture
def oracle(token: Token, oracle_code: str) -> Oracle:
    return Oracle(token.client, oracle_code)


@pytest.fixture
async def own(anvil: Anvil, token: Token, tmp_path: Path) -> AsyncIterator[EvmPayer]:
    """A hot wallet with 1 ether and 1,000 USDC, on a chain configured to have an oracle."""
    await token.controls.set_ether(HOT, ETHER)
    await token.mint(HOT, 1000 * USDC)
    network = replace(network_of(token), l1_fee_oracle=ORACLE, highest_fee=ETHER // 10)
    async with evm_payer(anvil, token, tmp_path, network) as made:
        yield made


async def l1_part(own: EvmPayer) -> int:
    """The part of a payout's cost that is the oracle's fee."""
    await own.refresh()
    return own.payments.gas.payout_cost() - own.payments.gas._gas * price_of(own)


def price_of(own: EvmPayer) -> int:
    moment = own.payments.gas._moment
    assert moment is not None
    return price_at(moment).max_fee


# --- the cost of a payout -----------------------------------------------------------------------


async def test_the_cost_of_a_payout_has_the_oracles_fee_in_it(
    own: EvmPayer, oracle: Oracle
) -> None:
    await oracle.put(GWEI)
    low, high = (with_l1_margin(size * GWEI) for size in (LEAST_BYTES, MOST_BYTES))
    part = await l1_part(own)
    assert low < part < high
    await oracle.price(3 * GWEI)
    await own.controls.mine()
    assert await l1_part(own) == 3 * part


async def test_estimate_covers_the_fee_of_the_signed_transaction(
    own: EvmPayer, oracle: Oracle
) -> None:
    await oracle.put(GWEI)
    part = await l1_part(own)
    ready = await own.paid(own.transfer(USER, 999 * USDC))
    assert (await own.settle(ready)).outcome is Outcome.SETTLED
    assert len((await own.payment(ready)).attempts[0].raw) // 2 * GWEI < part


async def test_on_a_chain_without_an_oracle_nothing_changes(own: EvmPayer, oracle: Oracle) -> None:
    async with own.again(lambda network: replace(network, l1_fee_oracle=None)) as plain:
        assert await l1_part(plain) == 0
        await oracle.put(GWEI)
        assert await l1_part(plain) == 0
        ready = await plain.paid(plain.transfer(USER))
        assert (await plain.settle(ready)).outcome is Outcome.SETTLED


# --- an oracle that gives no fee ----------------------------------------------------------------


@pytest.mark.parametrize("fault", ["no contract", "it reverts"])
async def test_nothing_is_signed_until_the_oracle_gives_the_fee(
    own: EvmPayer, oracle: Oracle, fault: str
) -> None:
    if fault == "it reverts":
        await oracle.put(0)
    await own.refresh()
    assert ORACLE in (own.payments.gas.problem or "")
    with pytest.raises(Unavailable, match="not known"):
        own.payments.gas.payout_cost()
    transfer = own.transfer(USER)
    with pytest.raises(Unavailable, match="gives no fee"):
        await own.sign(transfer)
    assert await own.live() == []
    await oracle.put(GWEI)
    ready = await own.paid(transfer)
    assert (await own.settle(ready)).outcome is Outcome.SETTLED
    await own.refresh()
    assert own.payments.gas.problem is None
    assert await own.token.balance(USER) == USDC


async def test_stuck_payout_is_not_raised_without_the_l1_fee(own: EvmPayer, oracle: Oracle) -> None:
    await oracle.put(GWEI)
    await own.controls.automine(enabled=False)
    transfers = []
    for _ in range(2):
        transfers.append(await own.prepared(own.transfer(USER)))
        await own.pay(transfers[-1])
    await own.controls.drop(transfers[1].txid or "")
    await oracle.remove()
    own.clock.now += MINUTE_MS
    await own.follow()
    (reported,) = [each.text for each in await own.payments.conditions()]
    assert (transfers[0].transfer_id in reported, "gives no fee" in reported) == (True, True)
    assert len((await own.payment(transfers[0])).attempts) == 1
    # The second payout was rebroadcast, which needs no fee.
    assert await own.token.client.transaction(transfers[1].txid or "") is not None
    await oracle.put(GWEI)
    await own.follow()
    assert len((await own.payment(transfers[0])).attempts) == 1
    own.clock.now += MINUTE_MS
    await own.follow()
    assert len((await own.payment(transfers[0])).attempts) == 2
    await own.controls.mine(3)
    for item in transfers:
        assert (await own.payments.look_up(item)).outcome is Outcome.SETTLED
    await own.follow()
    assert await own.payments.conditions() == []
    assert await own.token.balance(USER) == 2 * USDC


# --- ether and the highest fee ------------------------------------------------------------------


async def test_ether_for_the_gas_alone_is_too_little(own: EvmPayer, oracle: Oracle) -> None:
    await oracle.put(1000 * GWEI)
    await own.refresh()
    cost, part = own.payments.gas.payout_cost(), await l1_part(own)
    assert part > cost - part
    await own.controls.set_ether(HOT, 2 * (cost - part))
    with pytest.raises(Unavailable, match="lacks ether"):
        await own.sign(own.transfer(USER))
    await own.controls.set_ether(HOT, 2 * cost)
    ready = await own.paid(own.transfer(USER))
    assert (await own.settle(ready)).outcome is Outcome.SETTLED


async def test_a_spike_on_l1_alone_stops_new_payouts(own: EvmPayer, oracle: Oracle) -> None:
    await oracle.put(GWEI)
    per_byte = own.network.highest_fee // LEAST_BYTES
    await oracle.price(per_byte)
    with pytest.raises(Unavailable, match="too dear"):
        await own.sign(own.transfer(USER))
    await oracle.price(GWEI)
    await own.sign(own.transfer(USER))


# --- quotes -------------------------------------------------------------------------------------


async def test_quoted_fee_includes_the_l1_part_or_is_refused(own: EvmPayer, oracle: Oracle) -> None:
    per_byte = 1000 * GWEI
    await oracle.put(per_byte)
    async with adapter_on(own, replace(own.network, l1_fee_oracle=None)) as plain:
        without = plain.networks[NETWORK].fee()
    async with adapter_on(own, own.network) as adapter:
        part = adapter.networks[NETWORK].fee() - without
        low, high = (with_l1_margin(n * per_byte) for n in (LEAST_BYTES, MOST_BYTES))
        assert low * COIN_PRICE // ETHER <= part <= high * COIN_PRICE // ETHER
        assert Health.of(await adapter.conditions()).ok
        await oracle.price(0)
        own.clock.now += RESTING_MS
        await adapter.networks[NETWORK].maintain()
        with pytest.raises(Unavailable, match="can't be sent right now"):
            adapter.networks[NETWORK].fee()
        health = Health.of(await adapter.conditions())
        assert (health.ok, ORACLE in (health.detail or "")) == (False, True)
        assert adapter.networks[NETWORK].holdings().free == 1000 * USDC
        await oracle.price(per_byte)
        own.clock.now += 1000
        await adapter.networks[NETWORK].maintain()
        assert adapter.networks[NETWORK].fee() > 2 * without
        assert Health.of(await adapter.conditions()).ok
