"""Mutates the rules of the domain, and says which mutants no test kills.

``python -m tests.mutation [MODULE ...]`` takes the modules named; ``--base COMMIT`` those that
changed since that commit; without either, all. Ends with status 1 when more mutants of a module
survive than ``tests/mutation/survivors.toml`` allows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from tests.mutation.mutating import RuleMutant, mutants_of
from tests.mutation.running import Runner

_ROOT: Final = Path(__file__).parents[2]
_DOMAIN: Final = Path("rpcsvc", "domain")
_ORDERS: Final = (
    "agreed_refunds", "deposit_rules", "exact_output", "failed_refunds", "order_steps",
    "price_lock", "refund_shares", "stepping_back", "transition", "twap", "twap_chunks",
)  # fmt: skip
# The modules of the domain, each with the unit tests that have to kill its mutants.
_TESTS: Final = {
    "addresses": ("addresses",),
    "authorizations": ("authorizations",),
    "bridge": ("bridge_rules",),
    "chains": ("chains",),
    "clients": ("known_clients",),
    "deposit_rules": _ORDERS,
    "events": _ORDERS,
    "finality": ("finality",),
    "integrators": ("integrators",),
    "machine": _ORDERS,
    "money": ("money",),
    "order": (*_ORDERS, "order_values"),
    "payment_check": ("payment_check",),
    "pricing": ("pricing",),
    "refunds": _ORDERS,
    "reservations": ("reserved_units", "unfunded"),
    "settle_times": ("settle_times",),
    "twap": _ORDERS,
    "usdc": ("usdc_calls", "usdc_encoding"),
    "webhooks": ("webhook_rules",),
    "withdrawals": ("withdrawals",),
}
# It takes as long as all others together.
_LEFT_OUT: Final = "not the_books_balance_whatever_happens"


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", help=", ".join(_TESTS))
    parser.add_argument("--base", help="take the modules that changed since this commit")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run at once")
    given = parser.parse_args()
    known = {path.stem for path in (_ROOT / _DOMAIN).glob("[a-z]*.py")}
    if known != set(_TESTS):
        parser.error(f"_TESTS has to list {', '.join(sorted(known ^ set(_TESTS)))}, or not to")
    modules = given.modules or (_changed_since(given.base) if given.base else list(_TESTS))
    if unknown := set(modules) - set(_TESTS):
        parser.error(f"there is no module {', '.join(sorted(unknown))}")
    if not modules:
        print("no module of the domain has changed")
        return 0
    allowed = tomllib.loads((Path(__file__).parent / "survivors.toml").read_text("utf-8"))
    made = [
        mutant
        for name in modules
        for mutant in mutants_of(_ROOT / _DOMAIN / f"{name}.py", f"rpcsvc.domain.{name}")
    ]
    listed = [each for each in allowed["equivalent"] if each["place"].split(".")[0] in modules]
    for each in listed:
        if not any(_is_listed(mutant, each) for mutant in made):
            parser.error(f"no mutant of {each['place']} has {each['new']}: mend survivors.toml")
    mutants = [mutant for mutant in made if not any(_is_listed(mutant, each) for each in listed)]
    runner = Runner(mutants, given.jobs, _tell)
    files = sorted({f"tests/unit/test_{test}.py" for name in modules for test in _TESTS[name]})
    options = ["-q", "--hypothesis-profile=mutants", "-p", "no:xdist", "-p", "no:cacheprovider"]
    if status := pytest.main([*options, "-k", _LEFT_OUT, *files], plugins=[runner]):
        return int(status)
    return _judge(mutants, runner.survived, allowed["survivors"])


def _changed_since(commit: str) -> list[str]:
    command = ["git", "diff", "--name-only", commit, "--", str(_DOMAIN)]
    changed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=_ROOT).stdout
    return sorted({Path(line).stem for line in changed.splitlines()} & set(_TESTS))


def _is_listed(mutant: RuleMutant, equivalent: dict[str, Any]) -> bool:
    return bool(mutant.place == equivalent["place"] and equivalent["new"] in mutant.new)


def _tell(mutant: RuleMutant) -> None:
    print(f"{mutant.place}, line {mutant.line}: {mutant.old}  ->  {mutant.new}", flush=True)


def _judge(mutants: list[RuleMutant], survived: list[RuleMutant], most: dict[str, int]) -> int:
    """Print the score of each module, and return the status."""
    made = Counter(mutant.name for mutant in mutants)
    left = Counter(mutant.name for mutant in survived)
    for name, count in made.items():
        print(f"{name}: {1 - left[name] / count:.1%}, {left[name]} of {count} survive")
    print(f"all: {1 - len(survived) / len(mutants):.1%} of {len(mutants)}")
    worse = [name for name in made if left[name] > most.get(name, 0)]
    if worse:
        print(f"more survive than survivors.toml allows: {', '.join(worse)}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
