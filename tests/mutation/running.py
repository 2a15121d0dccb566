"""Runs the domain's tests against each mutant, in a fork of a process that has them collected.

First all tests run once under coverage, which says which of them reach which line, and how long
each takes. A mutant is killed by the first test that fails, or that takes many times as long.
"""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Final

import coverage
import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.mutating import RuleMutant, plant

# Most CPU of the tests of one mutant: the fastest are run, since a mutant that survives runs all.
_MOST_SECONDS: Final = 2.5


class Runner:
    """A plugin of pytest that runs the collected tests once, and then for each mutant.

    ``survived`` has the mutants that no test has killed.
    """

    def __init__(
        self, mutants: Iterable[RuleMutant], jobs: int, tell: Callable[[RuleMutant], None]
    ) -> None:
        self.survived: list[RuleMutant] = []
        self._mutants = tuple(mutants)
        self._jobs = jobs
        self._tell = tell
        self._running: dict[int, RuleMutant] = {}
        self._took: dict[pytest.Item, float] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run everything."""
        reached = self._reached(session.items)
        print(flush=True)  # ends pytest's line of dots
        for mutant in self._mutants:
            tests = self._tests_of(mutant, reached)
            if not tests:
                self._survives(mutant)
                continue
            if len(self._running) >= self._jobs:
                self._wait()
            self._start(mutant, tests)
        while self._running:
            self._wait()
        return True

    def _reached(self, items: list[pytest.Item]) -> Mapping[str, Mapping[int, set[pytest.Item]]]:
        """The tests that reach each line, by module. Raises pytest.UsageError if one fails."""
        names = {mutant.module for mutant in self._mutants}
        files = {name: str(Path(*name.split(".")).with_suffix(".py").absolute()) for name in names}
        measured = coverage.Coverage(
            data_file=None, config_file=False, include=sorted(files.values())
        )
        measured.start()
        for number, item in enumerate(items):
            measured.switch_context(str(number))
            began = time.process_time()
            passes = _passes(item, log=True)
            self._took[item] = time.process_time() - began
            if not passes:
                raise pytest.UsageError(f"without a mutant {item.nodeid} does not pass")
        measured.stop()
        data, found = measured.get_data(), {}
        for name, path in files.items():
            lines: dict[int, set[pytest.Item]] = defaultdict(set)
            for line, contexts in data.contexts_by_lineno(path).items():
                lines[line] = {items[int(each)] for each in contexts if each}
            found[name] = lines
        return found

    def _tests_of(
        self, mutant: RuleMutant, reached: Mapping[str, Mapping[int, set[pytest.Item]]]
    ) -> list[pytest.Item]:
        """Return the tests that reach the line, or else the function, fastest first."""
        lines = reached[mutant.module]
        found = lines.get(mutant.line) or set()
        if not found or mutant.line == mutant.lines.start:
            found = set().union(*(lines.get(line, ()) for line in mutant.lines))
        if not found:  # it ran when its module was imported
            found = set(self._took)
        fastest = sorted(found, key=lambda item: (self._took[item], item.nodeid))
        spent = accumulate(self._took[item] for item in fastest)
        return [
            item
            for item, seconds in zip(fastest, spent, strict=True)
            if seconds - self._took[item] <= _MOST_SECONDS
        ]

    def _start(self, mutant: RuleMutant, tests: list[pytest.Item]) -> None:
        process = os.fork()
        if process:
            self._running[process] = mutant
            return
        status = 1
        try:
            most = int(2 * sum(self._took[item] for item in tests)) + 2
            resource.setrlimit(resource.RLIMIT_CPU, (most, most))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            plant(mutant)
            status = 0 if all(map(_passes, tests)) else 1
        finally:
            os._exit(status)

    def _wait(self) -> None:
        process, status = os.wait()
        mutant = self._running.pop(process)
        if status == 0:
            self._survives(mutant)

    def _survives(self, mutant: RuleMutant) -> None:
        self.survived.append(mutant)
        self._tell(mutant)


def _passes(item: pytest.Item, *, log: bool = False) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=log, nextitem=None))
