"""A rule that decides over what is accepted stands in one module."""

from __future__ import annotations

from pathlib import Path

import pytest

import rpcsvc
from rpcsvc.domain.money import decimal_pattern
from rpcsvc.ids import REQUEST_ID_PATTERN
from rpcsvc.urls import is_loopback

PRODUCT = Path(rpcsvc.__file__).parent
# The client's verify.py is one file that others copy, and imports no other module.
RULES = {
    REQUEST_ID_PATTERN: {"ids.py"},
    "2**63 - 1": {"domain/money.py"},
    '== "localhost"': {"urls.py", "verify.py"},
    r"(0|[1-9][0-9]*)(\.[0-9]+)?": set(),
    r"(?:\.([0-9]+))?": set(),
}


@pytest.mark.parametrize("text", RULES)
def test_rule_stands_in_one_module(text: str) -> None:
    found = [path for path in PRODUCT.rglob("*.py") if text in path.read_text(encoding="utf-8")]

    assert {str(path.relative_to(PRODUCT)) for path in found} == RULES[text]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("192.0.2.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_loopback_is_a_name_or_address_of_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("digits", "places", "pattern"),
    [
        (None, None, r"(0|[1-9][0-9]*)(\.[0-9]+)?"),
        (19, 6, r"(0|[1-9][0-9]{0,18})(\.[0-9]{1,6})?"),
    ],
)
def test_decimal_pattern_limits_digits_and_places(
    digits: int | None, places: int | None, pattern: str
) -> None:
    assert decimal_pattern(digits, places) == pattern
