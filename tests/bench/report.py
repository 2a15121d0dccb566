"""The benchmark's report: rows with their targets and verdicts, the table, the JSON file.

Verdicts never decide the exit status; failed requests do (__main__.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import stdev
from typing import Any

from tests.bench.driver import Measurement

RAW, NAIVE = "raw", "naive"
_SIGNIFICANT_DRIFT = 0.10
_BUSY_DRIVER = 0.90
_FEWEST_ROUNDS = 4


@dataclass(frozen=True)
class Ratio:
    """At least ``at_least`` times the throughput of another scenario at as many connections.

    None: there is no target; the ratio is shown in the notes. ``by_cpu``: of the throughput per
    second of the servers' CPU.
    """

    against: str
    at_least: float | None = None
    by_cpu: bool = False

    def __str__(self) -> str:
        name = f"{self.against} by CPU" if self.by_cpu else self.against
        return f"x {name}" if self.at_least is None else f">= {self.at_least:.2f} x {name}"


@dataclass(frozen=True)
class Tail:
    """p99 under ``under`` times p50, at ``connections``."""

    under: float
    connections: int

    def __str__(self) -> str:
        return f"p99 < {self.under:g} x p50"


@dataclass(frozen=True)
class Scenario:
    """One row of the load table: the requests, the server and the target.

    ``requests`` makes the endless stream of requests from the store's sample of order ids;
    ``operation`` is the name that a sampled envelope must have, None for the yardsticks.
    ``unique_orders``: every sampled answer must be of another order.
    """

    name: str
    title: str
    server: str
    requests: Callable[[list[str]], Iterator[bytes]]
    targets: tuple[Ratio | Tail, ...] = ()
    operation: str | None = None
    unique_orders: bool = False


@dataclass(frozen=True)
class Reading:
    """A single figure with an upper limit: start time, memory."""

    name: str
    title: str
    unit: str
    values: tuple[float, ...]
    under: float

    @property
    def median(self) -> float:
        """The middle value."""
        return sorted(self.values)[len(self.values) // 2]


Key = tuple[str, int]  # scenario name, connections


@dataclass
class Report:
    """All results of a run."""

    environment: Mapping[str, Any]
    scenarios: dict[str, Scenario] = field(default_factory=dict)
    measured: dict[Key, Measurement] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, scenario: Scenario, connections: int, period: Measurement) -> None:
        """Take in one period."""
        self.scenarios[scenario.name] = scenario
        self.measured.setdefault((scenario.name, connections), Measurement()).add(period)

    def conclude(self) -> None:
        """Check the sampled answers; wrong ones are added to ``problems``."""
        for (name, connections), measurement in self.measured.items():
            where = f"{name}, {connections} connections"
            if measurement.failures:
                shown = "\n    ".join(measurement.failure_samples)
                self.problems.append(
                    f"{where}: {measurement.failures} failed, such as\n    {shown}"
                )
            if not measurement.requests:
                self.problems.append(f"{where}: no answer within the measured time")
            self.problems += [
                f"{where}: {wrong}" for wrong in _wrong(self.scenarios[name], measurement)
            ]

    def ratio(self, name: str, against: str, connections: int) -> float | None:
        """Throughput of one scenario over another's; None when either was not measured."""
        own = self.measured.get((name, connections))
        other = self.measured.get((against, connections))
        if own is None or other is None or not other.rate or name == against:
            return None
        return own.rate / other.rate

    def cpu_ratio(self, name: str, against: str, connections: int) -> float | None:
        """CPU per request of another scenario over one's own; None when it was not measured.

        The load of the machine changes it less than it changes throughput.
        """
        own = self.measured.get((name, connections))
        other = self.measured.get((against, connections))
        if own is None or other is None or name == against:
            return None
        return own.cpu_rate / other.cpu_rate if own.cpu_rate and other.cpu_rate else None

    def compared(self, target: Ratio, name: str, connections: int) -> float | None:
        """The ratio that a target is about; None when it was not measured."""
        ratio = self.cpu_ratio if target.by_cpu else self.ratio
        return ratio(name, target.against, connections)

    def standard_error(self, target: Ratio, name: str, connections: int) -> float | None:
        """The standard error of the ratio, from the ratios of the rounds; None: too few rounds.

        A round of one is compared with the round of the other that was measured next to it.
        """
        own = self.measured.get((name, connections), Measurement())
        other = self.measured.get((target.against, connections), Measurement())
        rounds = zip(
            own.cpu_rates if target.by_cpu else own.rates,
            other.cpu_rates if target.by_cpu else other.rates,
            strict=False,
        )
        ratios = [mine / theirs for mine, theirs in rounds if theirs]
        if len(ratios) < _FEWEST_ROUNDS or name == target.against:
            return None
        return stdev(ratios) / math.sqrt(len(ratios))

    def verdict(self, target: Ratio | Tail, name: str, connections: int) -> bool | None:
        """Whether a target is met; None if it does not apply or was not measured."""
        if isinstance(target, Ratio):
            ratio = self.compared(target, name, connections)
            if ratio is None or target.at_least is None:
                return None
            return ratio >= target.at_least
        if connections != target.connections:
            return None
        measurement = self.measured[name, connections]
        return measurement.percentile(0.99) < target.under * measurement.percentile(0.5)


def _wrong(scenario: Scenario, measurement: Measurement) -> Iterator[str]:
    """The problems of the sampled answers."""
    if scenario.operation is None:
        return
    envelopes = [json.loads(body)["result"] for body in measurement.samples]
    others = {e.get("operation") for e in envelopes} - {scenario.operation}
    if others:
        yield f"answers of operation {sorted(map(str, others))}, not {scenario.operation}"
    if scenario.unique_orders:
        ids = [envelope["data"]["order"]["orderId"] for envelope in envelopes]
        if len(set(ids)) < len(ids):
            yield "two creates were answered with the same order"


def table(report: Report) -> str:
    """The report as text: load table, readings, notes, problems."""
    parts = [_aligned(_HEAD, list(_load_rows(report)))] if report.measured else []
    if report.readings:
        parts.append(_aligned(_READING_HEAD, [_reading_row(r) for r in report.readings]))
    parts += ["\n".join(f"- {note}" for note in notes(report))]
    if report.problems:
        parts.append("FAILED\n" + "\n".join(f"- {problem}" for problem in report.problems))
    return "\n\n".join(part for part in parts if part)


_HEAD = [
    "work",
    "conns",
    "req/s",
    "p50 ms",
    "p99 ms",
    "max ms",
    "x raw",
    "x raw by CPU",
    "x naive",
    "server CPU",
    "driver CPU",
    "target",
    "met",
]
_READING_HEAD = ["reading", "median", "lowest", "highest", "target", "met"]


def _load_rows(report: Report) -> Iterator[list[str]]:
    for (name, connections), measurement in sorted(
        report.measured.items(),
        key=lambda item: (item[0][1], list(report.scenarios).index(item[0][0])),
    ):
        scenario = report.scenarios[name]
        verdicts = [(t, report.verdict(t, name, connections)) for t in scenario.targets]
        judged = [(t, met) for t, met in verdicts if met is not None]
        yield [
            scenario.title,
            str(connections),
            f"{measurement.rate:,.0f}",
            *(f"{measurement.percentile(p) * 1000:.2f}" for p in (0.5, 0.99, 1.0)),
            _times(report.ratio(name, RAW, connections)),
            _times(report.cpu_ratio(name, RAW, connections)),
            _times(report.ratio(name, NAIVE, connections) if scenario.unique_orders else None),
            _share(measurement.server_cpu_seconds, measurement.seconds),
            _share(measurement.driver_cpu_seconds, measurement.seconds),
            "; ".join(str(target) for target, _ in judged) or "-",
            "; ".join(_yes(met) for _, met in judged) or "-",
        ]


def _reading_row(reading: Reading) -> list[str]:
    figures = (reading.median, min(reading.values), max(reading.values))
    return [
        reading.title,
        *(f"{figure:.3g} {reading.unit}" for figure in figures),
        f"< {reading.under:g} {reading.unit}",
        _yes(reading.median < reading.under),
    ]


def notes(report: Report) -> Iterator[str]:
    """Notes on how far the figures can be trusted."""
    for (name, connections), measurement in report.measured.items():
        if name == RAW and len(measurement.rates) > 1:
            low, high = min(measurement.rates), max(measurement.rates)
            drift = (high - low) / high if high else 0.0
            noisy = " - the machine was busy, run it again" if drift > _SIGNIFICANT_DRIFT else ""
            shown = f"{low:,.0f} to {high:,.0f}"
            yield f"raw at {connections} connections by round: {shown} ({drift:.0%} apart{noisy})"
        if measurement.driver_cpu_seconds > _BUSY_DRIVER * measurement.seconds:
            yield f"{name} at {connections} connections is limited by the driver, not by the server"
    yield from _standard_errors(report)
    yield from report.remarks
    yield from (f"{name}: {value}" for name, value in report.environment.items())


def _standard_errors(report: Report) -> Iterator[str]:
    for name, connections in report.measured:
        for target in report.scenarios[name].targets:
            if not isinstance(target, Ratio):
                continue
            ratio = report.compared(target, name, connections)
            error = report.standard_error(target, name, connections)
            if ratio is not None and error is not None:
                wall = report.ratio(name, target.against, connections) if target.by_cpu else None
                yield (
                    f"{name} at {connections} connections: {ratio:.3f} +- {error:.3f}"
                    f" {replace(target, at_least=None)} (standard error over the rounds)"
                    + (f"; {wall:.3f} x by wall time" if wall is not None else "")
                )


def write_json(report: Report, path: Path) -> None:
    """Write all figures to ``path``; latencies in milliseconds."""
    document = {
        "environment": dict(report.environment),
        "rows": [_row_document(report, key, m) for key, m in report.measured.items()],
        "readings": [_reading_document(reading) for reading in report.readings],
        "remarks": report.remarks,
        "problems": report.problems,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def _row_document(report: Report, key: Key, measurement: Measurement) -> dict[str, Any]:
    name, connections = key
    targets = report.scenarios[name].targets
    cpu = measurement.server_cpu_seconds
    return {
        "name": name,
        "title": report.scenarios[name].title,
        "connections": connections,
        "requests": measurement.requests,
        "failures": measurement.failures,
        "seconds": measurement.seconds,
        "requestsPerSecond": measurement.rate,
        "requestsPerSecondByRound": measurement.rates,
        "requestsPerServerCpuSecond": measurement.requests / cpu if cpu else None,
        "p50Ms": measurement.percentile(0.5) * 1000,
        "p99Ms": measurement.percentile(0.99) * 1000,
        "maxMs": measurement.percentile(1.0) * 1000,
        "serverCpu": cpu / measurement.seconds if measurement.seconds else None,
        "driverCpu": measurement.driver_cpu_seconds / measurement.seconds
        if measurement.seconds
        else None,
        "ratioToRaw": report.ratio(name, RAW, connections),
        "cpuRatioToRaw": report.cpu_ratio(name, RAW, connections),
        "targets": [
            {
                "target": str(target),
                "met": report.verdict(target, name, connections),
                "standardError": report.standard_error(target, name, connections)
                if isinstance(target, Ratio)
                else None,
            }
            for target in targets
        ],
    }


def _reading_document(reading: Reading) -> dict[str, Any]:
    return {
        "name": reading.name,
        "title": reading.title,
        "unit": reading.unit,
        "values": list(reading.values),
        "median": reading.median,
        "under": reading.under,
        "met": reading.median < reading.under,
    }


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| "
        + " | ".join(_cell(c, w, i) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in (head, rule, *rows)
    )


def _cell(text: str, width: int, column: int) -> str:
    figure = column > 0 and text[:1].isdigit()
    return text.rjust(width) if figure else text.ljust(width)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _yes(met: bool | None) -> str:
    return "-" if met is None else "yes" if met else "NO"
