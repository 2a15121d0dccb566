"""``rpcsvc keys`` and ``rpcsvc verify``: their output and exit status."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rpcsvc import verify
from rpcsvc.cli.main import run
from rpcsvc.clock import SystemClock, iso8601_second
from rpcsvc.ids import system_random
from rpcsvc.operations.dispatch import LocalService
from rpcsvc.settings import Settings
from rpcsvc.signing import KeyRing, ResponseSigner
from rpcsvc.verify import OrderTerms, session_sha256

Json = dict[str, Any]
EVM = "0x52908400098527886E0F7030069857D2E4169EE7"
MONERO = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)
ISSUER = "https://swap.example"
ORDER = ["--direction", "x2u", "--chain-id", "42161", "--amount", "0.8", "--to", EVM]
HOME = ["--refund-to", MONERO]
SESSION = "0c7e9d52-6f3a-4b1e-8d2c-5a9f7b3e1d64"


class FixedClock:
    """A clock that stands still."""

    def __init__(self, ms: int) -> None:
        self.ms = ms

    def now_ms(self) -> int:
        return self.ms


class Cli:
    """The command line on a data directory, without a service."""

    def __init__(self, data_dir: Path, output: pytest.CaptureFixture[str]) -> None:
        self.data_dir = data_dir
        self.out, self.err = "", ""
        self._output = output

    def __call__(self, *arguments: str) -> int:
        environ = {"RPCSVC_DATA_DIR": str(self.data_dir)}
        try:
            return run(
                arguments, environ, serve=_not_served, local=_not_local, private=NotImplemented
            )
        except SystemExit as usage:
            assert isinstance(usage.code, int)
            return usage.code
        finally:
            captured = self._output.readouterr()
            self.out, self.err = captured.out, captured.err

    @property
    def answer(self) -> Json:
        answer: Json = json.loads(self.out)
        return answer

    @property
    def error(self) -> str:
        assert self.answer["verified"] is False
        return str(self.answer["error"]["code"])


async def _not_served(_settings: Settings, _load: Callable[[], Settings]) -> None:
    raise AssertionError("served")


def _not_local(_settings: Settings) -> AbstractAsyncContextManager[LocalService]:
    raise AssertionError("called in process")


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "data", capsys)


@pytest.fixture
def ring(cli: Cli) -> KeyRing:
    return KeyRing.load_or_create(cli.data_dir / "keys", SystemClock(), system_random)


# --- keys ------------------------------------------------------------------------------------


def test_keys_are_listed_with_the_current_one_first(cli: Cli, ring: KeyRing) -> None:
    old = ring.current
    fresh = ring.rotate()
    assert cli("keys", "list") == 0
    current, retired = cli.answer["keys"]
    assert current == {
        "kid": fresh.kid,
        "status": "current",
        "createdAt": fresh.created_at,
    }
    assert (retired["kid"], retired["status"]) == (old.kid, "retired")
    assert retired["retiredAt"] == ring.retired[0].retired_at


def test_rotate_prepares_the_key_that_signs_next(cli: Cli, ring: KeyRing) -> None:
    assert cli("keys", "rotate") == 0
    prepared = cli.answer
    assert ring.refresh() is True
    assert ring.next is not None
    signs_from = iso8601_second(ring.next.signs_from)
    assert (prepared["kid"], prepared["signsFrom"]) == (ring.next.key.kid, signs_from)
    assert prepared["retired"]["kid"] == ring.current.kid
    assert prepared["retired"]["retiredAt"] > signs_from > prepared["createdAt"]
    assert cli("keys", "list") == 0
    assert cli.answer["keys"][1] == {
        "kid": prepared["kid"],
        "status": "next",
        "createdAt": prepared["createdAt"],
        "signsFrom": signs_from,
    }


def test_rotate_refuses_a_second_next_key(cli: Cli, ring: KeyRing) -> None:
    assert cli("keys", "rotate", "--after", "60") == 0
    next_kid = cli.answer["kid"]
    assert cli("keys", "rotate") == 2
    assert next_kid in cli.err
    assert "--now" in cli.err


@pytest.mark.parametrize(
    "options",
    [
        ("--after", "9"), ("--after", "10081"), ("--after", "ten"), ("--after", "20", "--now"),
        ("--after", "20", "--revoke"),
    ],
)  # fmt: skip
def test_rotate_refuses_options_that_can_not_hold(
    cli: Cli, ring: KeyRing, options: tuple[str, ...]
) -> None:
    assert cli("keys", "rotate", *options) == 2
    assert ring.refresh() is False


def test_a_rotation_is_seen_by_the_ring_of_a_server(cli: Cli, ring: KeyRing) -> None:
    old = ring.current.kid
    assert cli("keys", "rotate", "--now") == 0
    assert ring.refresh() is True
    assert cli.answer["kid"] == ring.current.kid
    assert cli.answer["retired"] == {"kid": old, "retiredAt": ring.retired[0].retired_at}


def test_a_revoking_rotation_keeps_nothing_of_the_old_key(cli: Cli, ring: KeyRing) -> None:
    old = ring.current.kid
    assert cli("keys", "rotate", "--revoke") == 0
    assert cli.answer["retired"] is None
    assert cli("keys", "export-public") == 0
    assert old not in cli.out


def test_the_exported_keys_are_the_jwks(cli: Cli, ring: KeyRing) -> None:
    ring.rotate()
    assert cli("keys", "export-public") == 0
    assert cli.answer == ring.jwks()


def test_the_data_directory_can_be_named(cli: Cli, ring: KeyRing) -> None:
    elsewhere = Cli(cli.data_dir / "empty", cli._output)
    assert elsewhere("keys", "list", "--data-dir", str(cli.data_dir)) == 0
    assert elsewhere.answer["keys"][0]["kid"] == ring.current.kid


@pytest.mark.parametrize("action", ["list", "rotate", "export-public"])
def test_without_keys_nothing_is_made(cli: Cli, action: str) -> None:
    assert cli("keys", action) == 2
    assert cli.out == ""
    assert "rpcsvc serve" in cli.err
    assert not (cli.data_dir / "keys").exists()


@pytest.mark.parametrize("action", ["list", "rotate", "export-public"])
@pytest.mark.usefixtures("ring")
def test_keys_that_others_can_read_are_refused(cli: Cli, action: str) -> None:
    (cli.data_dir / "keys" / "ring.json").chmod(0o640)
    assert cli("keys", action) == 2
    assert "chmod 600" in cli.err


def test_no_command_prints_a_private_key(cli: Cli, ring: KeyRing) -> None:
    ring_file = cli.data_dir / "keys" / "ring.json"
    for command in ("list", "rotate", "export-public"):
        before = json.loads(ring_file.read_text())["keys"][0]["d"]
        assert cli("keys", command) == 0
        after = json.loads(ring_file.read_text())["keys"][0]["d"]
        assert before not in cli.out + cli.err
        assert after not in cli.out + cli.err


# --- verify response -------------------------------------------------------------------------


class Saved:
    """A signed exchange, saved as curl does it."""

    def __init__(self, directory: Path, ring: KeyRing, **signer: Any) -> None:
        clock = signer.pop("clock", SystemClock())
        self.request, self.headers = directory / "request.json", directory / "headers.txt"
        self.body, self.jwks = directory / "body.json", directory / "jwks.json"
        self.signed = ResponseSigner(ring, clock, **signer).headers(
            "POST", "/rpc", 200, b'{"id":1}', b'{"ok":true}'
        )
        self.request.write_bytes(b'{"id":1}')
        self.body.write_bytes(b'{"ok":true}')
        self.write_headers("HTTP/1.1 200 OK")
        self.jwks.write_text(json.dumps(ring.jwks()))

    def write_headers(self, *first: str) -> None:
        lines = [*first, "Content-Type: application/json", *map(": ".join, self.signed.items())]
        self.headers.write_bytes("".join(f"{line}\r\n" for line in [*lines, ""]).encode())

    def arguments(self, **changes: str) -> list[str]:
        options = {
            "method": "POST",
            "target": "/rpc",
            "request-body": str(self.request),
            "headers": str(self.headers),
            "body": str(self.body),
            "jwks": str(self.jwks),
        } | {name.replace("_", "-"): value for name, value in changes.items()}
        pairs = ((f"--{name}", value) for name, value in options.items())
        return ["verify", "response", *(part for pair in pairs for part in pair)]


@pytest.fixture
def saved(tmp_path: Path, ring: KeyRing) -> Saved:
    return Saved(tmp_path, ring)


def test_a_saved_response_is_verified(cli: Cli, saved: Saved, ring: KeyRing) -> None:
    assert cli(*saved.arguments(max_age="60")) == 0
    assert cli.answer == {
        "verified": True,
        "kind": "response",
        "kid": ring.current.kid,
        "keyRetiredAt": None,
        "signedAt": saved.signed["x-service-signed-at"],
    }


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"method": "GET"}, "bad_signature"),
        ({"target": "/rpc?x"}, "bad_signature"),
        ({"kid": "A" * 43}, "unpinned_key"),
        ({"slug": "acme"}, "missing_header"),
    ],
)
def test_another_request_is_not_verified(
    cli: Cli, saved: Saved, change: dict[str, str], code: str
) -> None:
    assert cli(*saved.arguments(**change)) == 1
    assert cli.error == code


def test_changed_files_are_not_verified(cli: Cli, saved: Saved) -> None:
    saved.body.write_bytes(b'{"ok":true}\n')
    assert cli(*saved.arguments()) == 1
    assert cli.error == "digest_mismatch"
    saved.body.write_bytes(b'{"ok":true}')
    saved.request.write_bytes(b"{}")
    assert cli(*saved.arguments()) == 1
    assert cli.error == "bad_signature"


def test_a_request_without_a_body_needs_no_file(cli: Cli, saved: Saved, ring: KeyRing) -> None:
    saved.signed = ResponseSigner(ring, SystemClock()).headers("GET", "/x", 204, b"", b"")
    saved.write_headers("HTTP/2 204 ")
    saved.body.write_bytes(b"")
    arguments = saved.arguments(method="GET", target="/x")
    at = arguments.index("--request-body")
    assert cli(*arguments[:at], *arguments[at + 2 :]) == 0


def test_the_last_response_that_curl_saw_counts(cli: Cli, saved: Saved) -> None:
    proxy = "HTTP/1.1 200 Connection established\r\nX-Service-Signature: no\r\n"
    saved.write_headers(proxy, "HTTP/1.1 100 Continue", "", "HTTP/1.1 200 OK")
    assert cli(*saved.arguments()) == 0


def test_the_status_is_that_of_the_status_line(cli: Cli, saved: Saved) -> None:
    saved.write_headers("HTTP/1.1 404 Not Found")
    assert cli(*saved.arguments()) == 1
    assert cli.error == "bad_signature"
    assert cli(*saved.arguments(status="200")) == 2
    assert "Leave one of them out" in cli.err
    saved.write_headers()
    assert cli(*saved.arguments()) == 2
    assert "--status" in cli.err
    assert cli(*saved.arguments(status="200")) == 0


def test_an_old_response_is_not_verified_when_age_counts(
    cli: Cli, ring: KeyRing, tmp_path: Path
) -> None:
    clock = FixedClock(SystemClock().now_ms() - 90_000)
    old = Saved(tmp_path, ring, clock=clock)
    assert cli(*old.arguments()) == 0
    assert cli(*old.arguments(max_age="120")) == 0
    assert cli(*old.arguments(max_age="60")) == 1
    assert cli.error == "too_old"


def test_a_header_line_that_is_none_is_a_usage_error(cli: Cli, saved: Saved) -> None:
    saved.write_headers("HTTP/1.1 200 OK", " folded")
    assert cli(*saved.arguments()) == 2
    assert "curl -D" in cli.err


@pytest.mark.parametrize("name", ["headers", "body", "request-body", "jwks"])
def test_a_file_that_is_not_there_is_a_usage_error(cli: Cli, saved: Saved, name: str) -> None:
    assert cli(*saved.arguments(**{name: "/nowhere/file"})) == 2
    assert cli.error == "bad_input"
    assert "/nowhere/file" in cli.err


def test_an_option_is_given_once(cli: Cli, saved: Saved) -> None:
    assert cli(*saved.arguments(), "--method", "GET") == 2
    assert "twice" in cli.err


@pytest.mark.parametrize("number", ["-1", "1.5", "", "9" * 40])
def test_verify_refuses_a_max_age_that_is_no_whole_number(
    cli: Cli, saved: Saved, number: str
) -> None:
    assert cli(*saved.arguments(), f"--max-age={number}") == 2


def test_a_target_that_is_an_address_is_a_usage_error(cli: Cli, saved: Saved) -> None:
    assert cli(*saved.arguments(target="https://swap.example/rpc")) == 2
    assert "path and query" in cli.err


# --- the key set -----------------------------------------------------------------------------


@pytest.fixture
def site(ring: KeyRing) -> Iterator[Callable[[int, bytes | None], str]]:
    """A web server on this machine; gives its address for a status and a body."""
    answer: list[Any] = [200, b""]
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(answer[0])
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(answer[1])))
            self.end_headers()
            self.wfile.write(answer[1])

        def log_message(self, *_: Any) -> None:
            """Write nothing: stderr belongs to the command."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def answering(status: int, body: bytes | None) -> str:
        answer[:] = [status, json.dumps(ring.jwks()).encode() if body is None else body]
        return f"http://127.0.0.1:{server.server_port}"

    yield answering
    assert "/elsewhere" not in paths
    server.shutdown()
    thread.join()
    server.server_close()


Site = Callable[[int, bytes | None], str]


def test_keys_are_fetched_from_an_address(cli: Cli, saved: Saved, site: Site) -> None:
    assert cli(*saved.arguments(jwks=site(200, None) + "/.well-known/jwks.json?x=1")) == 0


@pytest.mark.parametrize("status", [302, 404, 500])
def test_keys_that_can_not_be_had_end_in_3(cli: Cli, saved: Saved, site: Site, status: int) -> None:
    assert cli(*saved.arguments(jwks=site(status, None))) == 3
    assert cli.error == "unreachable"
    assert str(status) in cli.err


def test_too_many_bytes_are_no_key_set(cli: Cli, saved: Saved, site: Site) -> None:
    assert cli(*saved.arguments(jwks=site(200, b" " * (1024 * 1024 + 1)))) == 3


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"keys":[],"keys":[]}', b"\xff"])
def test_verify_refuses_a_document_that_is_no_key_set(
    cli: Cli, saved: Saved, site: Site, body: bytes
) -> None:
    assert cli(*saved.arguments(jwks=site(200, body))) == 1
    assert cli.error == "bad_jwks"


class Dripping:
    """A server that answers a byte at a time for 15 s, from the head or the body on."""

    def __init__(self, head: bytes) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.hung_up = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(head,))
        self.thread.start()

    def _serve(self, head: bytes) -> None:
        connection, _ = self.listener.accept()
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(head)
            connection.settimeout(0.02)
            for _ in range(750):
                connection.sendall(b"x")
                with suppress(TimeoutError):
                    if not connection.recv(1):
                        break
        self.hung_up.set()


@pytest.fixture(params=[b"HTTP/1.1 200 OK\r\nx-a: ", b"HTTP/1.0 200 OK\r\n\r\n"])
def dripping(request: pytest.FixtureRequest) -> Iterator[Dripping]:
    found = Dripping(request.param)
    yield found
    found.listener.close()
    found.thread.join()


def test_answer_that_drips_ends_with_the_time_for_all(
    cli: Cli, ring: KeyRing, dripping: Dripping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "TIMEOUT_SECONDS", 0.5)
    token = attested(ring, issuer=dripping.url)
    begun = time.monotonic()
    known = [token, *ORDER, *HOME, "--issuer", dripping.url]
    assert cli("verify", "attestation", *known) == 3
    assert time.monotonic() - begun < 10
    assert cli.error == "unreachable"
    assert dripping.hung_up.wait(10)


def test_time_for_the_keys_is_no_more_for_the_status(
    cli: Cli, ring: KeyRing, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = site(200, None)
    given: list[float] = []

    def ask_status(_issuer: str, _order: str, _request: str, seconds: float) -> NoReturn:
        given.append(seconds)
        raise verify.Unreachable("asked")

    monkeypatch.setattr(verify, "ask_status", ask_status)
    assert cli("verify", "attestation", attested(ring, issuer=issuer), *ORDER, *HOME,
               "--issuer", issuer) == 3  # fmt: skip
    assert 0 < given[0] < verify.TIMEOUT_SECONDS


def test_a_server_that_is_not_there_ends_in_3(cli: Cli, saved: Saved) -> None:
    assert cli(*saved.arguments(jwks="http://127.0.0.1:1/jwks.json")) == 3
    assert cli.error == "unreachable"
    assert "No key set" in cli.err


@pytest.mark.parametrize(
    "url",
    [
        "http://swap.example/jwks.json",
        "http://127.0.0.1.evil.example/",
        "http://localhost.evil.example/",
        "http://user@127.0.0.1/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1/a b",
        "https:///x",
        "http://[::1/",
    ],
)
def test_keys_come_over_tls_or_from_this_machine(cli: Cli, saved: Saved, url: str) -> None:
    assert cli(*saved.arguments(jwks=url)) == 2
    assert cli.error == "bad_input"
    assert "can't be fetched" in cli.err


# --- verify attestation ----------------------------------------------------------------------


def attested(
    ring: KeyRing,
    *,
    issuer: str = ISSUER,
    expires: str = "2999-01-01T00:00:00Z",
    refund_to: str | None = MONERO,
) -> str:
    terms = OrderTerms(
        order_id="ord_00000000000000000000000000",
        direction="x2u",
        chain_id=42161,
        token="0xaf88d065e77c8cC2239327C5EDb3A432268e5831",
        deposit_address=MONERO,
        deposit_amount=800_000_000_000,
        to_address=EVM,
        expected_output=129_350_000,
        min_received=128_056_500,
        expires_at=expires,
        issued_at="2026-01-02T03:04:05.000Z",
        network="sandbox",
        issuer=issuer,
        refund_control="session" if refund_to is None else "address",
        refund_address=refund_to,
        session_sha256=session_sha256(SESSION),
    )
    return ResponseSigner(ring, SystemClock()).attest(terms.canonical())


@pytest.fixture
def check(cli: Cli, ring: KeyRing, tmp_path: Path) -> Callable[..., int]:
    """Checks an attestation against the keys in a file, without asking its issuer."""
    jwks = tmp_path / "jwks.json"
    jwks.write_text(json.dumps(ring.jwks()))

    def call(token: str, *more: str) -> int:
        known = ["--issuer", ISSUER, "--jwks", str(jwks), "--offline"]
        return cli("verify", "attestation", token, *more, *known)

    return call


Check = Callable[..., int]


def test_an_attestation_is_verified(cli: Cli, ring: KeyRing, check: Check) -> None:
    more = ["--deposit-address", MONERO, "--network", "sandbox"]
    assert check(attested(ring), *ORDER, *HOME, *more) == 0
    answer = cli.answer
    assert answer["terms"]["depositAddress"] == MONERO
    assert answer["expired"] is False
    assert answer["status"].startswith("not asked")
    assert list(answer) == ["verified", "kind", "kid", "keyRetiredAt", "expired", "terms", "status"]


def test_an_order_of_the_verifiers_session_is_verified(ring: KeyRing, check: Check) -> None:
    assert check(attested(ring, refund_to=None), *ORDER, "--session", SESSION) == 0


@pytest.mark.parametrize(
    ("refund_to", "more", "code"),
    [
        (MONERO, [], "foreign_refunds"),
        (MONERO, ["--session", SESSION], "foreign_refunds"),
        (None, [], "foreign_refunds"),
        (None, HOME, "terms_mismatch"),
        (None, ["--session", SESSION[:-1] + "5"], "terms_mismatch"),
    ],
)
def test_order_that_refunds_somebody_else_is_not_verified(
    cli: Cli, ring: KeyRing, check: Check, refund_to: str | None, more: list[str], code: str
) -> None:
    assert check(attested(ring, refund_to=refund_to), *ORDER, *more) == 1
    assert cli.error == code
    if code == "foreign_refunds":
        error = cli.answer["error"]
        assert error["refundControl"] == ("session" if refund_to is None else "address")
        assert error["refundAddress"] == refund_to


def test_an_issuer_that_can_not_be_asked_ends_in_3(
    cli: Cli, ring: KeyRing, site: Site, tmp_path: Path
) -> None:
    jwks = tmp_path / "jwks.json"
    jwks.write_text(json.dumps(ring.jwks()))
    nobody = "http://127.0.0.1:1"
    known = [attested(ring, issuer=nobody), *ORDER, *HOME, "--issuer", nobody, "--jwks", str(jwks)]
    assert cli("verify", "attestation", *known) == 3
    assert cli.error == "unreachable"
    assert cli("verify", "attestation", *known, "--offline") == 0


def test_answer_not_signed_by_the_issuer_proves_nothing(
    cli: Cli, ring: KeyRing, site: Site
) -> None:
    issuer = site(200, None)
    known = [attested(ring, issuer=issuer), *ORDER, *HOME, "--issuer", issuer]
    assert cli("verify", "attestation", *known) == 1
    assert cli.error == "missing_header"


def test_an_attestation_is_read_from_stdin(
    ring: KeyRing, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(attested(ring) + "\n"))
    assert check("-", *ORDER, *HOME) == 0


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--amount", "0.81", "depositAmount"),
        ("--chain-id", "1", "chainId"),
        ("--to", "0x8617E340B3D01FA5F11F306F4090FD50E238070D", "toAddress"),
        ("--deposit-address", MONERO.replace("N", "n", 1), "depositAddress"),
        ("--token", EVM, "token"),
        ("--order-id", "ord_1", "orderId"),
        ("--network", "mainnet", "network"),
    ],
)
def test_an_attestation_of_another_order_is_not_verified(
    cli: Cli, ring: KeyRing, check: Check, option: str, value: str, field: str
) -> None:
    order = dict(zip(ORDER[::2], ORDER[1::2], strict=True)) | {option: value}
    assert check(attested(ring), *(part for pair in order.items() for part in pair)) == 1
    assert cli.error == "terms_mismatch"
    assert cli.answer["error"]["fields"] == [field]


def test_an_attestation_of_another_issuer_is_not_verified(
    cli: Cli, ring: KeyRing, check: Check
) -> None:
    assert check(attested(ring, issuer="https://swap.example.evil"), *ORDER) == 1
    assert cli.answer["error"]["fields"] == ["issuer"]


def test_unpayable_order_is_verified_only_when_allowed(
    cli: Cli, ring: KeyRing, check: Check
) -> None:
    token = attested(ring, expires="2026-01-02T04:04:05Z")
    assert check(token, *ORDER, *HOME) == 1
    assert cli.error == "expired"
    assert cli.answer["terms"]["orderId"]
    assert check(token, *ORDER, *HOME, "--allow-expired") == 0
    assert cli.answer["expired"] is True


def test_verify_refuses_text_that_is_no_attestation(cli: Cli, check: Check) -> None:
    assert check("eyJhbGciOiJub25lIn0.e30.", *ORDER) == 1
    assert cli.error == "malformed_attestation"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--direction", "--direction"),
        ("--chain-id", "--chain-id"),
        ("--amount", "amount is missing: say what is sent"),
        ("--to", "--to"),
    ],
)
def test_verify_requires_the_options_that_decide_over_money(
    cli: Cli, ring: KeyRing, check: Check, option: str, says: str
) -> None:
    at = ORDER.index(option)
    assert check(attested(ring), *ORDER[:at], *ORDER[at + 2 :]) == 2
    assert says in cli.err


def test_an_order_that_can_not_be_is_a_usage_error(cli: Cli, ring: KeyRing, check: Check) -> None:
    order = ["--direction", "x2u", "--chain-id", "1", "--amount", "0.8", "--to", MONERO]
    assert check(attested(ring), *order) == 2
    assert (cli.error, cli.answer["kind"]) == ("bad_input", "attestation")
    assert "EVM address" in cli.err


def test_the_issuers_own_keys_are_the_default(cli: Cli, ring: KeyRing, site: Site) -> None:
    issuer = site(200, None)
    token = attested(ring, issuer=issuer)
    known = ["verify", "attestation", token, *ORDER, *HOME, "--offline"]
    assert cli(*known, "--issuer", issuer + "/") == 0
    assert cli(*known, "--issuer", "http://swap.example") == 2
