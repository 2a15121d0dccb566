"""Integrators: their form in the settings, and finding one by its key."""

from __future__ import annotations

import hashlib

import pytest

from rpcsvc.domain.integrators import Integrators, parse_integrator, parse_integrators

HASH = hashlib.sha256(b"key").hexdigest()


@pytest.mark.parametrize(
    ("percent", "bps"), [("0", 0), ("0.5", 50), ("0.05", 5), ("1.25", 125), ("10", 1000)]
)
def test_a_percent_is_read_to_the_hundredth(percent: str, bps: int) -> None:
    found = parse_integrator(f"acme:{percent}:{HASH}")
    assert (found.id, found.fee_bps) == ("acme", bps)
    assert parse_integrator(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        "", "acme", f"acme:0.5:{HASH[:-1]}", f"acme:0.5:{HASH.upper()}", f"Acme:0.5:{HASH}",
        f"public:0.5:{HASH}", f"rpc:0.5:{HASH}", f"acme:10.01:{HASH}", f"acme:-1:{HASH}",
        f"acme:0.555:{HASH}", f"acme:.5:{HASH}", f"acme:0.5:{HASH}:", f" acme:0.5:{HASH}",
    ],
)  # fmt: skip
def test_malformed_integrator_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="<percent>"):
        parse_integrator(text)


def test_an_id_and_a_key_belong_to_one() -> None:
    other = hashlib.sha256(b"other").hexdigest()
    for texts in ([f"a:1:{HASH}", f"a:2:{other}"], [f"a:1:{HASH}", f"b:1:{HASH}"]):
        with pytest.raises(ValueError, match="each id and each key once"):
            parse_integrators(texts)


def test_a_key_finds_its_integrator_and_no_other_does() -> None:
    integrators = Integrators(parse_integrators([f"acme:1:{HASH}"]))
    found = integrators.find("key")
    assert found is not None
    assert found.id == "acme"
    assert integrators.find("Key") is None
    assert integrators.find("\udcff") is None
