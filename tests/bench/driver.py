"""The load driver: server processes pinned to one core, and the load put on them from another.

Closed loop, HTTP/1.1, no pipelining: every connection sends its next request when the answer to
the last one is complete. Requests are bytes made beforehand, and answers are parsed no further than
their success needs, so that the driver stays faster than the server; its own CPU share is part of
every measurement, because a driver near 100 % measures itself.

What is sent (seeding.py), in which order (__main__.py) and what the figures mean (report.py) does
not live here.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.e2e.processes import free_port

HOST = "127.0.0.1"
DRAIN_SECONDS = 15.0  # how long the answers in flight may take once the period is over
STOP_SECONDS = 20.0  # a server's grace after SIGTERM
POLL_SECONDS = 0.002
MAX_FAILURES = 50  # a run with so many is broken; going on would only measure the errors
_KEPT_FAILURES = 3
_KEPT_SAMPLES = 512
_SAMPLE_EVERY = 32
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]{1,9})\r\n", re.IGNORECASE)
_OK_FALSE = re.compile(rb'"ok": ?false')


@dataclass
class Measurement:
    """The results of one period, or of several of the same kind. Times in seconds.

    ``rates`` and ``cpu_rates``: requests per second, and per second of the server's CPU, by period.
    """

    seconds: float = 0.0
    driver_cpu_seconds: float = 0.0
    server_cpu_seconds: float = 0.0
    latencies: array[float] = field(default_factory=lambda: array("d"))
    rates: list[float] = field(default_factory=list)
    cpu_rates: list[float] = field(default_factory=list)
    failures: int = 0
    failure_samples: list[str] = field(default_factory=list)
    samples: list[bytes] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """How many answers came within the measured time."""
        return len(self.latencies)

    @property
    def rate(self) -> float:
        """Requests per second over all periods."""
        return self.requests / self.seconds if self.seconds else 0.0

    @property
    def cpu_rate(self) -> float:
        """Requests per second of the server's CPU over all periods; 0.0: not measured."""
        used = self.server_cpu_seconds
        return self.requests / used if used else 0.0

    def percentile(self, share: float) -> float:
        """The latency, in seconds, that ``share`` (0 to 1) of the requests did not exceed."""
        if not self.latencies:
            return 0.0
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def add(self, other: Measurement) -> None:
        """Take in another period of the same work at the same number of connections."""
        self.seconds += other.seconds
        self.driver_cpu_seconds += other.driver_cpu_seconds
        self.server_cpu_seconds += other.server_cpu_seconds
        self.latencies.extend(other.latencies)
        self.rates.append(other.rate)
        self.cpu_rates.append(other.cpu_rate)
        self.failures += other.failures
        self.failure_samples = (self.failure_samples + other.failure_samples)[:_KEPT_FAILURES]
        self.samples = (self.samples + other.samples)[:_KEPT_SAMPLES]


class _Run:
    """The state that the connections of one period share."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self.next_request = requests.__next__
        self.latencies: array[float] = array("d")
        self.samples: list[bytes] = []
        self.failures = 0
        self.failure_samples: list[str] = []
        self.recording = False
        self.stopping = False
        self.broken = asyncio.Event()

    def fail(self, what: str) -> None:
        self.failures += 1
        if len(self.failure_samples) < _KEPT_FAILURES:
            self.failure_samples.append(what[:600])
        if self.failures >= MAX_FAILURES:
            self.broken.set()

    def record(self, latency: float, body: bytes) -> None:
        self.latencies.append(latency)
        if len(self.latencies) % _SAMPLE_EVERY == 0 and len(self.samples) < _KEPT_SAMPLES:
            self.samples.append(body)


class _Connection(asyncio.Protocol):
    """One keep-alive connection in a closed loop."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._buffer = b""
        self._sent_at = 0.0
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.get_running_loop().create_future()
        self.idle = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; sending starts with start()."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def start(self) -> None:
        """Send the first request."""
        self._send()

    def close(self) -> None:
        """Hang up; an answer still in flight counts as a failure."""
        if not self.idle.is_set():
            self._run.fail(f"no answer within {DRAIN_SECONDS:.0f} s of the end")
            self.idle.set()
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Put an answer together, judge it, and send the next request."""
        if self._buffer:
            data = self._buffer + data
        body_at = data.find(b"\r\n\r\n") + 4
        if body_at < 4:
            self._buffer = data
            return
        match = _CONTENT_LENGTH.search(data, 0, body_at)
        if match is None:
            self._give_up(f"answer without Content-Length: {data[:300]!r}")
        elif len(data) < body_at + int(match.group(1)):
            self._buffer = data
        elif len(data) > body_at + int(match.group(1)):
            self._give_up(f"more bytes than one answer: {data[:300]!r}")
        else:
            self._buffer = b""
            self._answered(data, body_at)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count a failure if the server closed the connection with an answer outstanding."""
        if not self.idle.is_set():
            self._run.fail(f"connection lost with a request in flight: {exc!r}")
            self.idle.set()
        if not self.closed.done():
            self.closed.set_result(None)

    def _answered(self, data: bytes, body_at: int) -> None:
        run = self._run
        latency = time.perf_counter() - self._sent_at
        body = data[body_at:]
        if not succeeded(data, body):
            run.fail(data.decode("utf-8", "replace"))
        elif run.recording:
            run.record(latency, body)
        self._send()

    def _send(self) -> None:
        run = self._run
        if run.stopping or run.broken.is_set() or self._transport is None:
            self.idle.set()
            return
        request = run.next_request()
        self._sent_at = time.perf_counter()
        self._transport.write(request)

    def _give_up(self, why: str) -> None:
        self._run.fail(why)
        self.idle.set()
        if self._transport is not None:
            self._transport.abort()


def succeeded(head: bytes, body: bytes) -> bool:
    """Whether an answer is HTTP 200 with a JSON-RPC result whose envelope is no error.

    ``head`` starts with the status line. The test is textual, for speed: an ``error`` member at
    any level fails, which suits an interface where only failures carry one.
    """
    return (
        head.startswith(b"HTTP/1.1 200 ")
        and b'"result"' in body
        and b'"error"' not in body
        and _OK_FALSE.search(body) is None
    )


async def drive(
    ports: Sequence[int],
    requests: Iterator[bytes],
    *,
    connections: int,
    seconds: float,
    warm_up: float,
    server_cpu: Callable[[], float],
) -> Measurement:
    """Load a server on the loopback for ``warm_up`` and then ``seconds`` measured seconds.

    ``ports``: one, or those of equal servers, which get as many ``connections`` each. ``requests``
    must not end; ``server_cpu`` gives the CPU seconds that all servers used so far.
    Raises OSError when the connections can't be made.
    """
    run = _Run(requests)
    clients = [await _connect(port, run) for port in ports for _ in range(connections)]
    for client in clients:
        client.start()
    await _until_broken(run, warm_up)
    measured = await _measure(run, seconds, server_cpu)
    run.stopping = True
    await _drain(clients)
    measured.failures, measured.failure_samples = run.failures, run.failure_samples
    measured.samples = run.samples
    return measured


async def _connect(port: int, run: _Run) -> _Connection:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(DRAIN_SECONDS):
        _, connection = await loop.create_connection(lambda: _Connection(run), HOST, port)
    return connection


async def _measure(run: _Run, seconds: float, server_cpu: Callable[[], float]) -> Measurement:
    driver_before, server_before = time.process_time(), server_cpu()
    started = time.perf_counter()
    run.recording = True
    await _until_broken(run, seconds)
    run.recording = False
    return Measurement(
        seconds=time.perf_counter() - started,
        driver_cpu_seconds=time.process_time() - driver_before,
        server_cpu_seconds=server_cpu() - server_before,
        latencies=run.latencies,
    )


async def _until_broken(run: _Run, seconds: float) -> None:
    """Let the load run for ``seconds``, or less if it fails too often."""
    try:
        async with asyncio.timeout(seconds):
            await run.broken.wait()
    except TimeoutError:
        return  # the normal end of a period


async def _drain(clients: list[_Connection]) -> None:
    waiting = [asyncio.ensure_future(client.idle.wait()) for client in clients]
    await asyncio.wait(waiting, timeout=DRAIN_SECONDS)
    for client in clients:
        client.close()
    await asyncio.gather(*waiting, *(client.closed for client in clients))


class ServerFailed(Exception):
    """A server under test did not start, or ended on its own; the message ends with its log."""


@dataclass(frozen=True)
class Cores:
    """Where servers and the driver run; None when the platform can't pin or has one core only."""

    server: int | None
    driver: int | None


@cache
def cores() -> Cores:
    """The first usable core for servers, the last for the driver, as it was before any pinning."""
    usable = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    return Cores(usable[0], usable[-1]) if len(usable) > 1 else Cores(None, None)


def pin(core: int | None) -> None:
    """Keep this process, and the children that it starts from now on, on one core."""
    if core is not None and sys.platform == "linux":
        os.sched_setaffinity(0, {core})


def python_of(checkout: Path | None) -> str:
    """The interpreter of a checkout that ``make install`` was run in; None: this one."""
    return sys.executable if checkout is None else str(checkout / ".venv" / "bin" / "python")


class Server:
    """A server process on the loopback, pinned to the server core from its first instruction."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        checkout: Path | None = None,
        under: Sequence[str] = (),
    ) -> None:
        """Start ``python -m <arguments> --port <a free port>``; output goes to ``log``.

        ``checkout``: the code and the environment of another checkout. ``under``: a command that
        runs it.
        """
        self.name = name
        self.port = free_port()
        self._log = log
        command = [*under, python_of(checkout), "-m", *arguments, "--port", str(self.port)]
        pin(cores().server)  # inherited by the child
        try:
            with log.open("ab") as output:
                self.started_at = time.perf_counter()
                self._process = subprocess.Popen(
                    command,
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=checkout,
                )
        finally:
            pin(cores().driver)

    def wait_for(self, path: str, seconds: float) -> float:
        """Poll until ``path`` answers 200; returns the seconds from process start to the answer.

        The probe hangs up after its answer, which every server must have seen once before it is
        measured: asyncio receives into 256 KiB buffers, and glibc maps and unmaps each of them
        until the first is freed at full size, as it is at the end of a connection. Until then a
        server is slower by a third.

        Raises ServerFailed when the process ends or ``seconds`` pass first.
        """
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            if _answers(self.port, path):
                return time.perf_counter() - self.started_at
            if self._process.poll() is not None:
                raise ServerFailed(self._report(f"ended with status {self._process.returncode}"))
            time.sleep(POLL_SECONDS)
        raise ServerFailed(self._report(f"did not answer 200 at {path} within {seconds:.0f} s"))

    @property
    def ports(self) -> list[int]:
        """Its port."""
        return [self.port]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far; 0.0 without /proc."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except FileNotFoundError:
            return 0.0
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Its resident memory (VmRSS); 0 without /proc."""
        try:
            text = Path(f"/proc/{self._process.pid}/status").read_text()
        except FileNotFoundError:
            return 0
        found = re.search(r"VmRSS:\s+([0-9]+) kB", text)
        return int(found.group(1)) * 1024 if found else 0

    def stop(self) -> None:
        """SIGTERM, then SIGKILL when the grace is over. Raises ServerFailed in the second case."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            what = self._report(f"did not stop within {STOP_SECONDS:.0f} s of SIGTERM")
            raise ServerFailed(what) from None

    def _report(self, what: str) -> str:
        tail = self._log.read_text(errors="replace")[-2000:]
        return f"{self.name} {what}. Its log ends with:\n{tail or '(nothing)'}"


class Replicas:
    """Equal servers, measured together."""

    def __init__(self, *servers: Server) -> None:
        self._servers = servers
        self.ports = [each.port for each in servers]

    def wait_for(self, path: str, seconds: float) -> float:
        """As Server says, for the last one that answers."""
        return max(each.wait_for(path, seconds) for each in self._servers)

    def cpu_seconds(self) -> float:
        """As Server says, of all."""
        return sum(each.cpu_seconds() for each in self._servers)

    def stop(self) -> None:
        """As Server says, all of them."""
        for each in self._servers:
            each.stop()


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # not listening yet, or closing again
    finally:
        connection.close()
