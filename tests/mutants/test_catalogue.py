"""Passages of mutants stand in the code once, and the changed modules are still Python."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.mutants.planting import module_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_can_be_planted(mutant: Mutant) -> None:
    text = module_of(mutant).read_text(encoding="utf-8")
    changed = text.replace(mutant.old, mutant.new)
    assert changed != text
    ast.parse(changed)


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
