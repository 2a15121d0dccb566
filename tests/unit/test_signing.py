"""The signing keys on disk, and their signatures, verified by independent libraries."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jwt
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st
from joserfc import jws
from joserfc.errors import BadSignatureError
from joserfc.jwk import KeySet, OKPKey
from jwt import PyJWKClient, PyJWKClientError, api_jwk, jwk_set_cache, jwks_client
from msgspec.structs import replace

from rpcsvc import verify
from rpcsvc.domain.chains import load_chains
from rpcsvc.domain.pricing import Direction
from rpcsvc.operations.service import attested_terms
from rpcsvc.signing import HANDOVER_SECONDS, KeyRing, ResponseSigner, SigningKey, SigningKeyError
from rpcsvc.verify import Exchange, Expected, OrderTerms, verify_attestation, verify_response
from tests.unit.orders import terms as terms_of_an_order

Json = dict[str, Any]
START = 1_767_323_045_678  # 2026-01-02T03:04:05.678Z
ROOT = Path(__file__).parent.parent.parent
DOC = ROOT / "docs" / "use" / "signing.md"
CHAINS = load_chains((ROOT / "config" / "chains.toml").read_text(encoding="utf-8"))
TARGET = "/api/v1/agent/swap/status/ord_0?verify=0x"


class SetClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.ms = START

    def now_ms(self) -> int:
        return self.ms


class Counter:
    """Predictable randomness: for each key the next byte, 32 times."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, size: int) -> bytes:
        self.calls += 1
        return bytes([self.calls]) * size


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "data" / "keys"


@pytest.fixture
def ring(keys: Path, clock: SetClock) -> KeyRing:
    return KeyRing.load_or_create(keys, clock, Counter())


def reread(keys: Path) -> KeyRing:
    """The ring as read by another process."""
    return KeyRing.load(keys, SetClock(), os.urandom)


def order_terms(**changes: Any) -> OrderTerms:
    values: Json = {
        "order_id": "ord_00000000000000000000000000",
        "direction": "x2u",
        "chain_id": 42161,
        "token": "0xaf88d065e77c8cC2239327C5EDb3A432268e5831",
        "deposit_address": "8" * 95,
        "deposit_amount": 800_000_000_000,
        "to_address": "0x52908400098527886E0F7030069857D2E4169EE7",
        "expected_output": 129_350_000,
        "min_received": 128_056_500,
        "expires_at": "2026-01-02T04:04:05.678Z",
        "issued_at": "2026-01-02T03:04:05.678Z",
        "network": "sandbox",
        "issuer": "https://swap.example",
        "refund_control": "address",
        "refund_address": "8" * 95,
        "session_sha256": "0" * 64,
    }
    return OrderTerms(**(values | changes))


EXPECTED = Expected(
    direction="x2u",
    chain_id=42161,
    amount="0.8",
    to="0x52908400098527886E0F7030069857D2E4169EE7",
    issuer="https://swap.example",
    refund_to="8" * 95,
)


# --- signatures ------------------------------------------------------------------------------


def unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def check_as_another_language_would(
    jwks: Json, request: tuple[str, str, bytes], status: int, headers: Json, body: bytes
) -> None:
    """docs/use/signing.md, step by step, without a line of the service. Raises InvalidSignature."""
    method, target, request_body = request
    kid = headers["x-service-signing-kid"]
    (key,) = [key for key in jwks["keys"] if key["kid"] == kid]
    text = (
        f"service-response-signature\n1\ned25519\n{kid}\n{headers['x-service-signed-at']}\n"
        f"{method}\n{target}\n{status}\n{hashlib.sha256(request_body).hexdigest()}\n"
        f"{hashlib.sha256(body).hexdigest()}"
    )
    public = Ed25519PublicKey.from_public_bytes(unb64(key["x"]))
    public.verify(unb64(headers["x-service-signature"]), text.encode())


def test_a_signed_response_verifies_with_another_implementation(
    ring: KeyRing, clock: SetClock
) -> None:
    headers = ResponseSigner(ring, clock).headers("POST", TARGET, 409, b"q", b"answer")
    assert sorted(headers) == sorted(verify.signature_headers())
    assert headers["x-service-signed-at"] == "2026-01-02T03:04:05Z"
    jwks = ring.jwks()
    check_as_another_language_would(jwks, ("POST", TARGET, b"q"), 409, headers, b"answer")
    with pytest.raises(InvalidSignature):
        check_as_another_language_would(jwks, ("POST", TARGET, b"p"), 409, headers, b"answer")


@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "OPTIONS"]),
    path=st.binary(max_size=40),
    status=st.integers(100, 599),
    request=st.binary(max_size=40),
    body=st.binary(max_size=40),
)
@settings(deadline=None)
def test_answer_to_any_request_can_be_signed_and_verified(
    tmp_path_factory: pytest.TempPathFactory,
    method: str,
    path: bytes,
    status: int,
    request: bytes,
    body: bytes,
) -> None:
    clock = SetClock()
    ring = KeyRing.load_or_create(tmp_path_factory.mktemp("d") / "keys", clock, os.urandom)
    target = "/" + path.translate(None, bytes(range(33)) + b"\x7f").decode(
        "utf-8", "surrogateescape"
    )
    headers = ResponseSigner(ring, clock).headers(method, target, status, request, body)
    exchange = Exchange(
        method=method,
        target=target,
        request_body=request,
        status=status,
        headers=headers,
        body=body,
    )
    assert verify_response(exchange, ring.jwks()).kid == ring.current.kid


def test_a_branded_signer_uses_its_own_header_names(ring: KeyRing, clock: SetClock) -> None:
    headers = ResponseSigner(ring, clock, slug="acme").headers("GET", "/", 200, b"", b"")
    assert sorted(headers) == sorted(verify.signature_headers("acme"))


def test_signed_at_follows_the_clock_by_the_second(ring: KeyRing, clock: SetClock) -> None:
    signer = ResponseSigner(ring, clock)

    def signed_at(ms: int) -> str:
        clock.ms = ms
        return signer.headers("GET", "/", 200, b"", b"")["x-service-signed-at"]

    assert signed_at(START + 321) == "2026-01-02T03:04:05Z"
    assert signed_at(START + 322) == "2026-01-02T03:04:06Z"
    assert signed_at(START - 1000) == "2026-01-02T03:04:04Z"


@pytest.mark.filterwarnings("ignore:EdDSA is deprecated")
def test_an_attestation_verifies_with_a_jose_library(ring: KeyRing, clock: SetClock) -> None:
    token = ResponseSigner(ring, clock).attest(order_terms().canonical())
    found = jws.deserialize_compact(
        token, KeySet.import_key_set(cast("Any", ring.jwks())), algorithms=["EdDSA"]
    )
    assert json.loads(found.payload or b"") == order_terms().as_json()
    assert found.protected == {
        "alg": "EdDSA",
        "kid": ring.current.kid,
        "typ": "service-order-attestation",
    }
    ring.rotate(revoke=True)
    other = OKPKey.import_key(ring.jwks()["keys"][0])
    with pytest.raises(BadSignatureError):
        jws.deserialize_compact(token, other, algorithms=["EdDSA"])


def test_a_jose_library_computes_the_same_kid(ring: KeyRing) -> None:
    key = OKPKey.import_key(ring.jwks()["keys"][0])
    assert key.thumbprint() == ring.current.kid


def test_an_attestation_verifies_with_the_public_module(ring: KeyRing, clock: SetClock) -> None:
    token = ResponseSigner(ring, clock).attest(order_terms().canonical())
    assert verify_attestation(token, ring.jwks(), EXPECTED).terms == order_terms()


@given(
    direction=st.sampled_from(Direction),
    amounts=st.tuples(*[st.integers(0, 10**24)] * 3),
    times=st.tuples(*[st.integers(0, 4 * 10**12)] * 3),
    has_lock=st.booleans(),
    refund_to=st.none() | st.just(EXPECTED.to),
    session=st.uuids().map(str),
)
def test_attested_terms_are_canonical(
    direction: Direction,
    amounts: tuple[int, int, int],
    times: tuple[int, int, int],
    has_lock: bool,
    refund_to: str | None,
    session: str,
) -> None:
    """The service signs exactly the bytes that the public module reads and writes."""
    sent, expected, least = amounts
    made, expires, lock_end = times
    terms = replace(
        terms_of_an_order(direction),
        session_id=session,
        deposit_address="8" * 95,
        to_address=EXPECTED.to,
        deposit_amount=sent,
        expected_output=expected,
        min_received=least,
        created_at=made,
        expires_at=expires,
        price_locked_until=lock_end if has_lock else None,
        refund_address=refund_to,
    )
    written = attested_terms(terms, CHAINS, network="sandbox", issuer="https://swap.example")
    read = OrderTerms.from_json(json.loads(written))
    assert read.canonical() == written
    assert read.deposit_amount == sent
    assert read.session_sha256 == hashlib.sha256(session.encode()).hexdigest()


# --- keys on disk ----------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_first_start_makes_private_files(keys: Path, clock: SetClock) -> None:
    before = os.umask(0)
    try:
        ring = KeyRing.load_or_create(keys, clock, Counter())
    finally:
        os.umask(before)
    assert mode(keys) == 0o700
    assert mode(keys.parent) == 0o700
    assert {path.name: mode(path) for path in keys.iterdir()} == {"ring.json": 0o600}
    assert ring.current.created_at == "2026-01-02T03:04:05Z"
    assert "secret" not in repr(ring.current)


def test_next_start_signs_with_the_key_on_disk(ring: KeyRing, keys: Path, clock: SetClock) -> None:
    again = KeyRing.load_or_create(keys, clock, Counter())
    assert (again.current, again.retired) == (ring.current, ())


def test_the_jwks_holds_no_private_part(ring: KeyRing) -> None:
    ring.rotate()
    ring.prepare()
    public = {"kty", "crv", "x", "kid", "use", "alg", "whpk", "retiredAt", "signsFrom"}
    for key in ring.jwks()["keys"]:
        assert key.keys() <= public


@pytest.mark.parametrize("bits", [0o040, 0o010, 0o020, 0o004, 0o002, 0o001])
@pytest.mark.parametrize("name", [".", "ring.json"])
@pytest.mark.usefixtures("ring")
def test_wider_permissions_are_refused_with_what_to_do(
    keys: Path, clock: SetClock, name: str, bits: int
) -> None:
    path = keys / name
    path.chmod(mode(path) | bits)
    with pytest.raises(SigningKeyError, match=r"chmod (700|600) /.*--revoke"):
        KeyRing.load_or_create(keys, clock, Counter())


@pytest.mark.usefixtures("ring")
def test_files_of_another_user_are_refused(
    keys: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an operator rotates as root: a file owned by root would stop the service."""
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(SigningKeyError, match="belongs to user"):
        KeyRing.load_or_create(keys, clock, Counter())


@pytest.mark.parametrize("name", ["notes.txt", "ring.json.bak", ".hidden"])
def test_unknown_files_are_refused_by_name(ring: KeyRing, keys: Path, name: str) -> None:
    (keys / name).touch()
    with pytest.raises(SigningKeyError, match=re.escape(name)):
        reread(keys)
    with pytest.raises(SigningKeyError, match=re.escape(name)):
        ring.rotate()


def test_key_ring_refuses_a_directory_with_other_files(keys: Path, clock: SetClock) -> None:
    keys.mkdir(parents=True, mode=0o700)
    (keys / "photo.jpg").touch()
    with pytest.raises(SigningKeyError, match=r"photo\.jpg"):
        KeyRing.load_or_create(keys, clock, Counter())
    assert [path.name for path in keys.iterdir()] == ["photo.jpg"]


def _change(change: Callable[[Json], object]) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:50]),
        lambda path: path.write_bytes(b"\x00" * 300),
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.write_bytes(b"[" * 100_000),
        lambda path: path.write_text("{}"),
        lambda path: path.write_text("[]"),
        _change(lambda ring: ring.update(format=2)),
        _change(lambda ring: ring["keys"].clear()),
        _change(lambda ring: ring["keys"].reverse()),
        _change(lambda ring: ring["keys"][0].update(x="A" * 43)),
        _change(lambda ring: ring["keys"][0].update(d="A" * 42)),
        _change(lambda ring: ring["keys"][0].update(d=5)),
        _change(lambda ring: ring["keys"][0].update(createdAt=5)),
        _change(lambda ring: ring["keys"][1].update(x="")),
        _change(lambda ring: ring["keys"][1].update(retiredAt="soon")),
        _change(lambda ring: ring["keys"][1].pop("retiredAt")),
        _change(lambda ring: ring["next"].update(signsFrom="soon")),
        _change(lambda ring: ring["next"].update(d="A" * 43)),
        _change(lambda ring: ring["next"].pop("signsFrom")),
        _change(lambda ring: ring.update(next=None)),
    ],
)
def test_a_damaged_ring_is_refused_and_left_as_it_is(
    ring: KeyRing, keys: Path, damage: Callable[[Path], object]
) -> None:
    ring.rotate()
    ring.prepare()
    damage(keys / "ring.json")
    before = (keys / "ring.json").read_bytes()
    with pytest.raises(SigningKeyError, match="backup"):
        KeyRing.load_or_create(keys, SetClock(), Counter())
    with pytest.raises(SigningKeyError, match="backup"):
        ring.rotate()
    assert (keys / "ring.json").read_bytes() == before


def test_key_ring_refuses_a_link_or_a_pipe(keys: Path, clock: SetClock, tmp_path: Path) -> None:
    KeyRing.load_or_create(keys, clock, Counter())
    ring_file = keys / "ring.json"
    ring_file.rename(tmp_path / "elsewhere")
    makers: tuple[Callable[[], None], ...] = (
        lambda: ring_file.symlink_to(tmp_path / "elsewhere"),
        lambda: os.mkfifo(ring_file, 0o600),
    )
    for make in makers:
        make()
        with pytest.raises(SigningKeyError):
            reread(keys)
        ring_file.unlink()


def test_keys_that_are_not_there_are_not_made_by_looking(keys: Path) -> None:
    with pytest.raises(SigningKeyError, match="rpcsvc serve"):
        reread(keys)
    assert not keys.exists()


def test_a_directory_that_can_not_be_made_is_explained(tmp_path: Path, clock: SetClock) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SigningKeyError, match="own that directory"):
        KeyRing.load_or_create(tmp_path / "file" / "keys", clock, Counter())


def test_randomness_that_comes_short_makes_no_key(keys: Path, clock: SetClock) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        KeyRing.load_or_create(keys, clock, lambda _size: b"short")
    assert not (keys / "ring.json").exists()


# --- rotation --------------------------------------------------------------------------------


def test_rotation_keeps_the_old_public_key_with_its_end(
    ring: KeyRing, keys: Path, clock: SetClock
) -> None:
    old = ring.current
    clock.ms += 60_000
    fresh = ring.rotate()
    assert fresh == ring.current == reread(keys).current
    assert fresh.kid != old.kid
    (gone,) = ring.retired
    assert (gone.kid, gone.x, gone.created_at) == (old.kid, old.x, old.created_at)
    assert gone.retired_at == "2026-01-02T03:05:15Z"
    assert HANDOVER_SECONDS == 10
    assert [key["kid"] for key in ring.jwks()["keys"]] == [fresh.kid, old.kid]
    second = ring.rotate()
    assert [key["kid"] for key in ring.jwks()["keys"]] == [second.kid, fresh.kid, old.kid]


def test_old_key_signatures_stay_valid_and_later_ones_fail(
    ring: KeyRing, clock: SetClock, keys: Path
) -> None:
    signer = ResponseSigner(ring, clock)
    token = signer.attest(order_terms().canonical())
    thief = ResponseSigner(reread_secretly(keys), clock)
    ring.rotate()
    clock.ms += 3_600_000
    assert verify_attestation(token, ring.jwks(), EXPECTED).key_retired_at is not None
    late = order_terms(issued_at="2026-01-02T04:04:05Z", expires_at="2026-01-02T05:04:05Z")
    with pytest.raises(verify.RetiredKey):
        verify_attestation(thief.attest(late.canonical()), ring.jwks(), EXPECTED)
    exchange = Exchange(
        method="GET",
        target="/",
        request_body=b"",
        status=200,
        headers=thief.headers("GET", "/", 200, b"", b""),
        body=b"",
    )
    with pytest.raises(verify.RetiredKey):
        verify_response(exchange, ring.jwks())


def reread_secretly(keys: Path) -> KeyRing:
    """A ring that never rereads its keys, as a thief's copy."""
    copy = keys.parent / "stolen"
    copy.mkdir(mode=0o700)
    (copy / "ring.json").write_bytes((keys / "ring.json").read_bytes())
    (copy / "ring.json").chmod(0o600)
    return reread(copy)


def test_a_revoked_key_leaves_the_jwks_and_those_before_it_stay(ring: KeyRing) -> None:
    first = ring.current.kid
    second = ring.rotate().kid
    third = ring.rotate(revoke=True).kid
    kids = [key["kid"] for key in ring.jwks()["keys"]]
    assert kids == [third, first]
    assert second not in kids


def test_the_old_private_key_is_destroyed_on_disk(ring: KeyRing, keys: Path) -> None:
    with (keys / "ring.json").open("rb") as old:
        seed = json.loads(old.read())["keys"][0]["d"]
        ring.rotate()
        old.seek(0)
        assert set(old.read()) == {0}
    assert seed not in (keys / "ring.json").read_text()


def test_a_running_server_takes_over_a_rotation_within_a_second(
    ring: KeyRing, keys: Path, clock: SetClock
) -> None:
    signer = ResponseSigner(ring, clock)

    def kid() -> str:
        return signer.headers("GET", "/", 200, b"", b"")["x-service-signing-kid"]

    before = kid()
    fresh = reread(keys).rotate().kid
    assert kid() == before
    clock.ms += 1000
    assert kid() == fresh
    assert [key["kid"] for key in signer.jwks()["keys"]] == [fresh, before]


def test_jwks_of_a_running_server_holds_its_signing_key(
    ring: KeyRing, keys: Path, clock: SetClock
) -> None:
    signer = ResponseSigner(ring, clock)
    reread(keys).rotate()
    clock.ms += 1000
    jwks = signer.jwks()
    headers = signer.headers("GET", "/.well-known/jwks.json", 200, b"", b"")
    assert jwks["keys"][0]["kid"] == headers["x-service-signing-kid"]


def test_a_server_signs_on_with_its_key_while_the_disk_is_wrong(
    ring: KeyRing, keys: Path, clock: SetClock
) -> None:
    signer = ResponseSigner(ring, clock)
    kid = ring.current.kid
    raw = (keys / "ring.json").read_bytes()
    (keys / "ring.json").chmod(0o644)
    for _ in range(2):
        clock.ms += 1000
        headers = signer.headers("GET", "/", 200, b"", b"")
        assert headers["x-service-signing-kid"] == kid
        assert "chmod 600" in str(signer.problem)
    (keys / "ring.json").unlink()
    clock.ms += 1000
    assert signer.jwks()["keys"][0]["kid"] == kid
    assert "No such file" in str(signer.problem)
    (keys / "ring.json").write_bytes(raw)
    (keys / "ring.json").chmod(0o600)
    clock.ms += 1000
    signer.jwks()
    assert signer.problem is None


def test_refresh_reports_a_change_and_never_waits(
    ring: KeyRing, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ring.refresh() is False
    other = reread(keys)
    old, replace = ring.current, os.replace

    def replace_while_somebody_looks(*paths: Any, **options: Any) -> None:
        replace(*paths, **options)
        assert ring.refresh() is False  # the other one holds the lock
        assert ring.current == old

    monkeypatch.setattr(os, "replace", replace_while_somebody_looks)
    fresh = other.rotate()
    assert ring.refresh() is True
    assert ring.current == fresh
    assert ring.refresh() is False


def test_refresh_costs_one_stat_of_the_file(ring: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> int:
        raise AssertionError("opened a file")

    monkeypatch.setattr(os, "open", forbidden)
    assert ring.refresh() is False


def test_two_rotations_by_two_processes_lose_no_key(ring: KeyRing, keys: Path) -> None:
    other = reread(keys)
    first, second, third = ring.current.kid, ring.rotate().kid, other.rotate().kid
    assert [key["kid"] for key in reread(keys).jwks()["keys"]] == [third, second, first]


# --- the next key ----------------------------------------------------------------------------


def test_next_key_is_published_before_it_signs(ring: KeyRing, keys: Path, clock: SetClock) -> None:
    signer, old = ResponseSigner(ring, clock), ring.current.kid
    prepared = reread(keys).prepare()
    clock.ms += 1000
    assert [key["kid"] for key in signer.jwks()["keys"]] == [old, prepared.key.kid]
    assert signer.jwks()["keys"][1]["signsFrom"] == "2026-01-02T03:19:15Z"
    served_for = prepared.signs_from - clock.ms // 1000
    assert served_for >= 10 * 60
    clock.ms += (served_for - 1) * 1000
    assert (signer.webhook_key, signer.kid) == (f"{signer.jwks()['keys'][0]['whpk']}", old)
    clock.ms += 1000
    current, retired = signer.jwks()["keys"]
    assert (current["kid"], signer.kid) == (prepared.key.kid, prepared.key.kid)
    assert "signsFrom" not in current
    assert (retired["kid"], retired["retiredAt"]) == (old, "2026-01-02T03:19:25Z")


def test_next_key_takes_over_in_copies_and_after_restarts(
    ring: KeyRing, keys: Path, clock: SetClock, tmp_path: Path
) -> None:
    prepared, old = ring.prepare(10), ring.current.kid
    replica = KeyRing.load(copied(keys, tmp_path / "replica"), clock, os.urandom)
    stopped = copied(keys, tmp_path / "stopped")
    clock.ms += 10 * 60_000
    assert replica.refresh() is ring.refresh() is False
    clock.ms += 10_000
    assert replica.refresh() is ring.refresh() is True
    clock.ms += 3_600_000
    restarted = KeyRing.load_or_create(stopped, clock, os.urandom)
    for each in (ring, replica, restarted):
        assert each.current.kid == prepared.key.kid
        assert [key.kid for key in each.retired] == [old]
        assert each.next is None
    assert ring.jwks() == replica.jwks() == restarted.jwks()


def copied(keys: Path, place: Path) -> Path:
    """The directory of keys that an operator copies to another machine."""
    return Path(shutil.copytree(keys, place))


def test_replicas_with_differing_clocks_sign_validly(
    ring: KeyRing, keys: Path, clock: SetClock, tmp_path: Path
) -> None:
    prepared = ring.prepare()
    slow = SetClock()
    behind = ResponseSigner(
        KeyRing.load(copied(keys, tmp_path / "replica"), slow, os.urandom), slow
    )
    clock.ms = (prepared.signs_from + 9) * 1000
    slow.ms = clock.ms - 10_000
    ring.refresh()
    headers = behind.headers("GET", "/", 200, b"", b"")
    assert headers["x-service-signing-kid"] != ring.current.kid
    answer = Exchange(
        method="GET", target="/", request_body=b"", status=200, headers=headers, body=b""
    )
    assert verify_response(answer, ring.jwks()).key_retired_at is not None


def test_old_private_key_is_destroyed_once_the_next_signs(
    ring: KeyRing, keys: Path, clock: SetClock
) -> None:
    prepared = ring.prepare()
    with (keys / "ring.json").open("rb") as old:
        seed = json.loads(old.read())["keys"][0]["d"]
        clock.ms = (prepared.signs_from + HANDOVER_SECONDS) * 1000 - 1
        ring.refresh()
        assert seed in (keys / "ring.json").read_text()
        clock.ms += 1
        ring.refresh()
        old.seek(0)
        assert set(old.read()) == {0}
    assert seed not in (keys / "ring.json").read_text()
    assert reread(keys).current == prepared.key


def test_next_key_takes_over_while_the_disk_is_wrong(
    ring: KeyRing, keys: Path, clock: SetClock
) -> None:
    signer, prepared = ResponseSigner(ring, clock), ring.prepare()
    (keys / "ring.json").unlink()
    clock.ms = prepared.signs_from * 1000
    headers = signer.headers("GET", "/", 200, b"", b"")
    assert headers["x-service-signing-kid"] == prepared.key.kid
    assert signer.problem is not None


def test_rotation_now_drops_the_next_key(ring: KeyRing, clock: SetClock) -> None:
    prepared, old = ring.prepare(), ring.current.kid
    fresh = ring.rotate()
    assert [key["kid"] for key in ring.jwks()["keys"]] == [fresh.kid, old]
    clock.ms = (prepared.signs_from + 60) * 1000
    ring.refresh()
    assert ring.current == fresh


def test_next_key_can_be_prepared_after_the_last_took_over(ring: KeyRing, clock: SetClock) -> None:
    first, second = ring.current.kid, ring.prepare()
    clock.ms = second.signs_from * 1000
    third = ring.prepare()
    kids = [key["kid"] for key in ring.jwks()["keys"]]
    assert kids == [second.key.kid, third.key.kid, first]


class PausingClient(PyJWKClient):
    """PyJWT's client of a key set, on the test's clock.

    It keeps a set for ``lifespan``, and fetches none within 30 seconds of the last one. So does
    jose, whose lifespan is ten minutes.
    """

    def __init__(
        self, fetch: Callable[[], Json], now: Callable[[], float], lifespan: float
    ) -> None:
        super().__init__("https://swap.example/.well-known/jwks.json", lifespan=lifespan)
        self.fetch, self.now = fetch, now

    def fetch_data(self) -> Any:
        found = self.fetch()
        if self.jwk_set_cache is not None:
            self.jwk_set_cache.put(found)
        self._last_successful_fetch = self.now()
        return found


@pytest.mark.parametrize("lifespan", [300, 600])
def test_rotation_has_no_attestation_refused_by_caching_clients(
    ring: KeyRing, clock: SetClock, lifespan: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def now() -> float:
        return clock.ms / 1000

    for module in (api_jwk, jwks_client, jwk_set_cache):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now))
    signer, old = ResponseSigner(ring, clock), ring.current.kid
    clients = []
    for _ in range(8):
        clients.append(PausingClient(signer.jwks, now, lifespan))
        clients[-1].get_signing_key(old)
        clock.ms += 5000
    prepared = ring.prepare(10)
    while clock.ms // 1000 < prepared.signs_from + 60:
        token = signer.attest(order_terms().canonical())
        for client in clients:
            jws_of(token, client)
        clock.ms += 2000
    assert signer.kid == prepared.key.kid
    fresh = PausingClient(signer.jwks, now, lifespan)
    fresh.get_signing_key(signer.kid)
    ring.rotate()
    clock.ms += 1000
    with pytest.raises(PyJWKClientError):  # what a rotation at once costs
        jws_of(signer.attest(order_terms().canonical()), fresh)


def jws_of(token: str, client: PyJWKClient) -> bytes:
    """The payload of a token that the client has the key of."""
    key = client.get_signing_key(jwt.get_unverified_header(token)["kid"])
    return bytes(jwt.PyJWS().decode(token, key, algorithms=["EdDSA"]))


# --- crashes ---------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is killed here: no handler runs."""


class Failing:
    """Counts the calls that change the disk, and fails the one that is due."""

    CALLS = ("open", "fdopen", "fsync", "replace", "unlink", "pwrite", "mkdir", "close")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.due = 0, -1
        self.failure: type[BaseException] = Crash
        self.done: list[str] = []
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            self.done.append(name)
            if self.count == self.due and name != "close":
                raise self.failure(5, f"at step {self.count}, {name}")
            return real(*arguments, **options)

        return call

    def run(self, due: int, failure: type[BaseException], act: Callable[[], object]) -> bool:
        """Whether ``act`` was stopped at step ``due``."""
        self.count, self.due, self.failure, self.done = 0, due, failure, []
        try:
            act()
        except (Crash, SigningKeyError):
            return True
        finally:
            self.due = -1
        return False


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    yield Failing(monkeypatch)


FAILURES = pytest.mark.parametrize("failure", [Crash, OSError])


def stopped_at_each_step(
    folder: Path,
    failing: Failing,
    failure: type[BaseException],
    act: Callable[[KeyRing], object],
    clock: SetClock,
) -> Iterator[tuple[Path, KeyRing, SigningKey, KeyRing]]:
    """Stop the change of a new ring at its first step, at its second, and so on to its end.

    Yields the folder, the ring, its first key, and the ring that the next process reads.
    """
    for step in range(1, 100):
        keys = folder / str(step) / "keys"
        ring = KeyRing.load_or_create(keys, clock, Counter())
        old = ring.current
        failing.run(step, failure, partial(act, ring))
        reached = failing.count >= step
        yield keys, ring, old, KeyRing.load_or_create(keys, clock, os.urandom)
        if not reached:
            break
    assert step > 8


@FAILURES
def test_rotation_stopped_at_any_step_leaves_a_usable_ring(
    tmp_path: Path, failing: Failing, failure: type[BaseException]
) -> None:
    clock, outcomes = SetClock(), []
    steps = stopped_at_each_step(tmp_path, failing, failure, KeyRing.rotate, clock)
    for keys, ring, old, found in steps:
        rotated = found.current.kid != old.kid
        outcomes.append(rotated)
        assert ([key.kid for key in found.retired] == [old.kid]) is rotated
        assert ResponseSigner(ring, clock).jwks() == found.jwks()
        assert found.rotate().kid not in {old.kid, ring.current.kid}
        assert [path.name for path in keys.iterdir()] == ["ring.json"]
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert outcomes == sorted(outcomes)


@FAILURES
def test_preparing_stopped_at_any_step_leaves_a_usable_ring(
    tmp_path: Path, failing: Failing, failure: type[BaseException]
) -> None:
    clock, outcomes = SetClock(), []
    steps = stopped_at_each_step(tmp_path, failing, failure, KeyRing.prepare, clock)
    for _, ring, _, found in steps:
        outcomes.append(found.next is not None)
        assert found.current == ring.current
        assert ResponseSigner(ring, clock).jwks() == found.jwks()
    assert outcomes == sorted(outcomes)
    assert outcomes[0] is not outcomes[-1]


@FAILURES
def test_handover_stopped_at_any_step_loses_no_key(
    tmp_path: Path, failing: Failing, failure: type[BaseException]
) -> None:
    for step in range(1, 100):
        clock, keys = SetClock(), tmp_path / str(step) / "keys"
        ring = KeyRing.load_or_create(keys, clock, Counter())
        old, prepared = ring.current, ring.prepare()
        clock.ms = (prepared.signs_from + HANDOVER_SECONDS) * 1000
        failing.run(step, failure, ring.refresh)
        reached = failing.count >= step
        for found in (ring, KeyRing.load_or_create(keys, clock, os.urandom)):
            found.refresh()
            assert found.current == prepared.key
            assert [key.kid for key in found.retired] == [old.kid]
        assert [path.name for path in keys.iterdir()] == ["ring.json"]
        if not reached:
            break
    assert step > 8


@FAILURES
def test_first_start_stopped_at_any_step_can_be_repeated(
    tmp_path: Path, failing: Failing, failure: type[BaseException]
) -> None:
    clock = SetClock()
    for step in range(1, 100):
        keys = tmp_path / str(step) / "keys"

        def start(keys: Path = keys) -> KeyRing:
            return KeyRing.load_or_create(keys, clock, os.urandom)

        failing.run(step, failure, start)
        reached = failing.count >= step
        committed = (keys / "ring.json").exists()
        first = reread(keys).current if committed else None
        assert start().current == (first or reread(keys).current)
        if not reached:
            break
    assert step > 8


def test_the_new_key_is_on_disk_before_the_old_one_is_destroyed(
    ring: KeyRing, failing: Failing
) -> None:
    failing.run(-1, Crash, ring.rotate)
    steps = [name for name in failing.done if name in ("fsync", "replace", "pwrite")]
    assert steps == ["fsync", "replace", "fsync", "pwrite", "fsync"]


# --- the worked example of the documentation -------------------------------------------------


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)\n```$", DOC.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def example() -> Json:
    (found,) = [json.loads(text) for text in blocks("json") if '"seed"' in text]
    return dict(found)


def test_signer_makes_the_worked_example_of_the_docs(example: Json, tmp_path: Path) -> None:
    clock = SetClock()
    ring = KeyRing.load_or_create(
        tmp_path / "keys", clock, lambda _: bytes.fromhex(example["seed"])
    )
    signer = ResponseSigner(ring, clock)
    request = example["request"]
    headers = signer.headers(
        request["method"],
        request["target"],
        example["response"]["status"],
        request["body"].encode(),
        example["response"]["body"].encode(),
    )
    assert headers == example["response"]["headers"]
    assert ring.jwks() == example["jwks"]
    terms = OrderTerms.from_json(example["terms"])
    assert signer.attest(terms.canonical()) == example["attestation"]


def test_the_worked_example_verifies_with_another_implementation(example: Json) -> None:
    request, response = example["request"], example["response"]
    check_as_another_language_would(
        example["jwks"],
        (request["method"], request["target"], request["body"].encode()),
        response["status"],
        response["headers"],
        response["body"].encode(),
    )


def test_signed_text_in_the_docs_is_the_one_of_the_example(example: Json) -> None:
    request, response = example["request"], example["response"]
    exchange = Exchange(
        method=request["method"],
        target=request["target"],
        request_body=request["body"].encode(),
        status=response["status"],
        headers=response["headers"],
        body=response["body"].encode(),
    )
    kid = response["headers"]["x-service-signing-kid"]
    text = exchange.signed_text(kid, response["headers"]["x-service-signed-at"]).decode()
    assert text in blocks("text")
    assert verify_response(exchange, example["jwks"]).kid == kid


def test_the_expectations_in_the_documentation_meet_the_example(example: Json) -> None:
    expected = Expected(**example["expected"])
    assert verify_attestation(example["attestation"], example["jwks"], expected)
