"""The settler is paused between each pair of steps of a payout, and a standby finishes it.

Then the old settler wakes up, in its own lease's time by its own clock: the lease was ended in the
database. It may repeat what is on record and writes nothing. Payouts are counted on the chains.

A replica is paused at a step of one currency while the payout before it is of the other one: so
each of them finishes one payout and is paused in the next.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import pytest

from tests.e2e.cluster import is_ready
from tests.e2e.processes import Crash, until
from tests.regtest.replicas import OnchainReplicas
from tests.regtest.trading import Trader

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

# (step of a payout in USDC, step of a payout in XMR): where the settler is paused, or killed.
CHAINS: Final[dict[str, list[tuple[str, str]]]] = {
    "signing": [
        # The deposit is confirmed, and nothing is signed.
        ("evm prepare stopped before", "monero prepare stopped before"),
        # Signed, and not in the journal.
        ("evm record stopped before", "monero record stopped before"),
        # In the journal, and not committed.
        ("evm journal stopped after", "monero journal stopped after"),
    ],
    "publishing": [
        # Committed, and the order does not know.
        ("evm record stopped after", "monero record stopped after"),
        # The order knows, and nothing is marked as published.
        ("evm mark stopped before", "monero mark stopped before"),
        # Marked, and not published.
        ("evm mark stopped after", "monero mark stopped after"),
        # Published, and the order does not know. The wallet has not stored it.
        ("evm publish stopped after", "monero relay stopped after"),
    ],
    "settling": [
        # Mined, and not noted. Stored by the wallet.
        ("evm note stopped before", "monero relayed stopped after"),
        # Noted as mined, or as published, and the order does not know.
        ("evm note stopped after", "monero note stopped after"),
        # Deep enough, and not noted; a payout in USDC has fewer steps.
        ("evm journal after", "monero settle stopped before"),
        # Noted as settled, and the order does not know.
        ("evm publish after", "monero settle stopped after"),
    ],
}


def points_of(chain: Sequence[tuple[str, str]]) -> Iterator[Crash]:
    """Alternately of USDC and of XMR."""
    for pair in chain:
        for step in pair:
            currency, name, *when = step.split()
            yield f"{currency} {name}", " ".join(when), 1


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
async def test_standby_finishes_a_payout_between_each_pair_of_steps(
    trader: Trader, replicas: OnchainReplicas, chain: Sequence[tuple[str, str]]
) -> None:
    points: list[Crash | None] = [*points_of(chain), None]
    names = replicas.in_turn()
    settler = await replicas.settling(replicas.start(next(names), points[0]))
    standby = await replicas.standing_by(next(names), points[1])
    for number, point in enumerate(points[:-1]):
        direction = ("x2u", "u2x")[number % 2]
        with noted(point):
            await until(partial(is_ready, standby))
            order = await trader.order_and_pay(standby, direction)
            await replicas.stopped(settler)
            await replicas.end_lease()
            await replicas.settling(standby)
            # It starts while the payout is confirmed.
            more = [replicas.start(next(names), crash) for crash in points[number + 2 :][:1]]
            await trader.finish(standby, order)
            if not settler.is_dead:
                os.kill(settler.pid, signal.SIGCONT)
                assert await settler.death() == 1, "its lease is lost"
            assert await trader.received(order) == [order.expected]
        settler, standby = standby, more[0] if more else standby
    await trader.stop(settler)
    # Not even the wallet has booked a payment twice: a settler that wakes up relays nothing.
    await trader.check()


@contextmanager
def noted(point: Crash | None) -> Iterator[None]:
    """Name the point in what it raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"paused at {point}")
        raise
