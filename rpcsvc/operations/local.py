"""Calling operations inside this process, without a network: for the CLI and the demo."""

from __future__ import annotations

import asyncio
from typing import Any

from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.inputs import bare_key
from rpcsvc.operations.operation import Operation
from rpcsvc.operations.service import Call
from rpcsvc.orders.ports.venue import Venue
from rpcsvc.orders.scheduler.worker import Worker

ROUNDS = 4


class LocalService:
    """A service that this process owns."""

    def __init__(self, dispatcher: Dispatcher, venue: Venue, worker: Worker) -> None:
        self._dispatcher = dispatcher
        self._venue = venue
        self._worker = worker

    async def call(
        self,
        operation: Operation,
        params: dict[str, Any],
        request_id: str,
        key: str | None,
        local_session: str | None = None,
    ) -> bytes:
        """The envelope of one call, with whatever was due before and after it carried out.

        The order that it is about is brought up to date before.
        """
        await self.catch_up()
        # Nobody else asks: the order would stay as it was made, and its user be sent to pay.
        await self._venue.refresh(str(params.get("orderId")))
        call = Call(request_id, idempotency_key=bare_key(key), local_session=local_session)
        reply = await self._dispatcher.run(operation, params, call)
        await self.catch_up()
        return reply.body

    async def catch_up(self) -> None:
        """Do what a server would have done by now: deposits, deadlines, effects."""
        for _ in range(ROUNDS):
            await self._worker.tick()
            await self._worker.drain()

    async def settle_for(self, seconds: float) -> None:
        """Run the worker's passes for a while."""
        deadline = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < deadline:
            await self.catch_up()
            await asyncio.sleep(0.1)
