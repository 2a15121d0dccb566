"""The catalogue of the pages' texts: every text is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rpcsvc
from rpcsvc.domain.order import OrderReason, reasons_in
from rpcsvc.http.pages.rendering import Catalogues

PACKAGE = Path(rpcsvc.__file__).parent


def unused(keys: set[str], sources: str) -> set[str]:
    """The keys that no source names.

    A key is named in full, or by the beginning of a composed name such as
    ``f"checkout.step_{label}"``, if a source has the rest of it as a word.
    """
    literals = set(re.findall(r"""["']([\w.]+)["']""", sources))
    beginnings = set(re.findall(r"""["'](\w+\.\w+_)(?:["']|{)""", sources))

    def is_named(key: str) -> bool:
        return key in literals or any(
            key.startswith(start) and key.removeprefix(start) in literals for start in beginnings
        )

    return {key for key in keys if not is_named(key)}


def test_every_text_of_the_catalogue_is_used() -> None:
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("templates/*.html")]
    sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert unused(set(Catalogues().choose("en").entries), sources) == set()


@pytest.mark.parametrize("reason", OrderReason)
def test_every_reason_has_a_text_in_the_catalogue(reason: OrderReason) -> None:
    """In English it equals the text of JSON answers; also with the fee's reason appended."""
    assert Catalogues().choose("en").say(f"checkout.reason_{reason.value}") == reason.text
    assert reasons_in(reason.text) == [reason]
    if reason is not OrderReason.DUST:
        first, last = sorted((reason, OrderReason.DUST), key=list(OrderReason).index)
        assert reasons_in(f"{first.text} {last.text}") == [first, last]
        assert reasons_in(f"{first.text} {last.text} And more.") == []


def test_rules_give_no_reason_without_a_code() -> None:
    """Events that end an order have a reason code; only an upstream's report has free text."""
    sources = "".join(path.read_text() for path in (PACKAGE / "domain").glob("*.py"))
    given = set(re.findall(r"error_message=([^,)\n]+)", sources))
    assert {each for each in given if not each.startswith("OrderReason.")} == {
        "None", "reason.text", "reasons", "event.report.error",
    }  # fmt: skip


def test_text_that_no_source_names_is_found() -> None:
    sources = """say("home.open") say(f"checkout.step_{label}") ("pay", "done")"""
    keys = {"home.open", "home.shut", "checkout.step_pay", "checkout.step_is_now"}
    assert unused(keys, sources) == {"home.shut", "checkout.step_is_now"}
