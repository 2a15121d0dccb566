"""Tells systemd that the service is ready, alive or stopping: the protocol of sd_notify(3).

Without ``NOTIFY_SOCKET`` in the environment nothing is sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog

from rpcsvc.health import Health

log = structlog.get_logger(__name__)

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"
# sd_watchdog_enabled(3) recommends half of the time; a third leaves room for a busy machine.
PINGS_PER_PERIOD: Final = 3

Pause = Callable[[float], Awaitable[None]]


class ServiceManager:
    """The socket of the service manager, and how often it expects a ping."""

    def __init__(
        self, address: str | None, watchdog_seconds: float | None, pause: Pause = asyncio.sleep
    ) -> None:
        self._address = address
        self._watchdog_seconds = watchdog_seconds
        self._pause = pause

    def notify(self, *states: str) -> None:
        """Send states, such as ``READY``. A message that can't be sent is logged."""
        if not self._address:
            return
        # A leading @ stands for the NUL of an abstract address (unix(7)).
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(states).encode(), address)
        except OSError as error:
            log.warning("service_manager_unreachable", reason=error.strerror or str(error))

    async def ping(self, health: Callable[[], Health]) -> None:
        """Ping as often as the watchdog expects, while ``health`` is ok; returns without one."""
        if self._watchdog_seconds is None:
            return
        was_ok = True
        while True:
            found = health()
            if found.ok:
                self.notify(ALIVE)
            elif was_ok:
                log.error("watchdog_ping_withheld", reason=found.detail)
            was_ok = found.ok
            await self._pause(self._watchdog_seconds / PINGS_PER_PERIOD)


def service_manager(environ: Mapping[str, str]) -> ServiceManager:
    """The manager that the environment names. Raises ValueError for a malformed watchdog time."""
    microseconds = int(environ.get("WATCHDOG_USEC", "0"))
    is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    seconds = microseconds / 1_000_000 if microseconds and is_ours else None
    return ServiceManager(environ.get("NOTIFY_SOCKET"), seconds)
