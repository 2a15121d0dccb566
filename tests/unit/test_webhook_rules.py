"""Permitted URLs and addresses of webhooks, their secrets, and retry times."""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import UTC, datetime
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook as Peer

from rpcsvc.domain.webhooks import (
    DAY_MS,
    FIRST_PAUSE_MS,
    LONGEST_URL,
    SECRET_PATTERN,
    URL_PATTERN,
    DeliveryAttempt,
    DeliveryVerdict,
    Standing,
    Targets,
    Webhook,
    as_address,
    judge,
    message_id,
    public_key,
    read_secret,
    read_url,
    secret_digest,
    sign_v1,
    sign_v1a,
    signed_content,
)
from rpcsvc.errors import InvalidInput

PUBLIC = Targets()
PRIVATE = Targets((ip_network("10.0.0.0/8"),), onion=True)
ONION = "a" * 56


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.255",
        "168.63.129.16", "169.254.169.254", "172.16.0.1", "192.0.0.192", "192.0.2.1",
        "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1",
        "239.255.255.255", "240.0.0.1", "255.255.255.255",
        "::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1",
        "64:ff9b:1::1", "100::1", "2001:0:7f00:1::", "2001:db8::1", "2002:7f00:1::", "fc00::1",
        "3fff::1", "3fff:fff:ffff::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0",
        "fec0::1", "ff02::1", "4000::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not PUBLIC.permits(ip_address(address))


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "::ffff:1.1.1.1", "2606:4700::1"])
def test_public_addresses_are_permitted(address: str) -> None:
    assert PUBLIC.permits(ip_address(address))


def test_an_allowed_network_is_permitted_and_no_other() -> None:
    assert PRIVATE.permits(ip_address("10.1.2.3"))
    assert PRIVATE.permits(ip_address("::ffff:10.1.2.3"))
    assert not PRIVATE.permits(ip_address("192.168.0.1"))


@pytest.mark.parametrize(
    "url",
    [
        "https://agent.example", "https://agent.example/", "https://agent.example:8443/a?b=c@d",
        "https://xn--bcher-kva.example/%C3%BC", "https://1.1.1.1/hook", "https://[2606:4700::1]/",
        "https://agent.example./hook", "HTTPS://Agent.Example/", "https://agent.example:443/",
        "https://agent.example:80/", "https://agent.example:1024/",
    ],
)  # fmt: skip
def test_urls_of_public_hosts_are_taken_as_they_are(url: str) -> None:
    assert read_url(url, PUBLIC, name="url") == url


@pytest.mark.parametrize(
    "url",
    [
        "", "agent.example", "//agent.example/", "http://agent.example/", "ftp://agent.example/",
        "https://", "https:///path", "https://:443/", "https://agent.example:0/",
        "https://agent.example:99999/", "https://agent.example:x/", "https://a b.example/",
        "https://agent.example/\n", "https://agent.example\\@127.0.0.1/", "https://bücher.example/",
        "https://user:pass@agent.example/", "https://@agent.example/", "https://agent.example/#x",
        "https://localhost/", "https://db/", "https://a.localhost/", "https://127.0.0.1/",
        "https://[::1]/", "https://[fe80::1%25eth0]/", "https://[::1/", "https://-a.example/",
        "https://agent.example:25/", "https://agent.example:1023/", "https://1.1.1.1:22/",
        "https://a..example/", f"https://{ONION}.onion/", "https://agent.example/" + "x" * 1_000,
    ],
)  # fmt: skip
def test_other_urls_are_refused_with_what_to_send(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"(?i)send|put|https|letters"):
        read_url(url, PUBLIC, name="url")


def test_ports_that_the_operator_allows_are_taken() -> None:
    for url in ("https://agent.example:444/", f"http://{ONION}.onion:444/"):
        allowed = Targets(onion=True, ports=(444,))
        assert read_url(url, allowed, name="url") == url
        with pytest.raises(InvalidInput, match="port 443, 80, or 1024"):
            read_url(url, Targets(onion=True), name="url")


def test_the_operator_s_networks_and_proxy_widen_it() -> None:
    for url in ("https://10.1.2.3/", "https://db/", f"http://{ONION}.onion/"):
        assert read_url(url, PRIVATE, name="url") == url
    for url in ("https://192.168.0.1/", "http://db/", "https://short.onion/"):
        with pytest.raises(InvalidInput):
            read_url(url, PRIVATE, name="url")


@given(st.from_regex(URL_PATTERN, fullmatch=True))
def test_urls_of_the_schema_are_valid(url: str) -> None:
    if len(url) <= 1_000 and not re.search(r"\.(onion|localhost)[:/?]?", url):
        assert read_url(url, PUBLIC, name="url") == url


@given(st.from_regex(SECRET_PATTERN, fullmatch=True))
def test_secrets_of_the_schema_are_valid(secret: str) -> None:
    assert read_secret(secret, name="secret") == secret


@given(st.binary(max_size=80))
def test_secrets_have_24_to_64_bytes(raw: bytes) -> None:
    secret = "whsec_" + base64.b64encode(raw).decode()
    if 24 <= len(raw) <= 64:
        assert read_secret(secret, name="secret") == secret
        assert re.fullmatch(SECRET_PATTERN, secret)
        return
    with pytest.raises(InvalidInput) as refusal:
        read_secret(secret, name="secret")
    assert refusal.value.received is None


def test_a_webhook_does_not_show_its_secret() -> None:
    assert "hush" not in repr(Webhook("https://agent.example/", "hush"))


def test_receivers_are_distinguished_by_host_and_port() -> None:
    urls = ["https://a.example/1", "https://A.example:443/2", "https://a.example./", "http://b/"]
    assert [Webhook(url).receiver for url in urls] == [*["a.example:443"] * 3, "b:80"]


def test_judge_never_waits_longer_than_a_day_and_ends() -> None:
    standing, now, attempts = Standing(), 0, 0
    failed = DeliveryAttempt(None, "No connection could be made.")
    while True:
        verdict = judge(failed, standing, now)
        attempts += 1
        if verdict.state == "dead":
            break
        assert now < verdict.standing.due_at <= DAY_MS
        standing, now = verdict.standing, verdict.standing.due_at
    assert (now, attempts) == (DAY_MS, 16)
    assert judge(failed, verdict.standing, now + 1).state == "dead"
    assert judge(DeliveryAttempt(200), verdict.standing, now + 1).standing == Standing()


def test_judge_survives_a_clock_that_is_set_back() -> None:
    before = Standing(3, 10 * DAY_MS, 10 * DAY_MS)
    verdict = judge(DeliveryAttempt(500, "Status 500."), before, DAY_MS)
    assert verdict.standing.failing_since == DAY_MS
    assert verdict.standing.due_at <= 2 * DAY_MS


def test_retry_after_is_bounded_by_a_day() -> None:
    verdict = judge(DeliveryAttempt(503, "Status 503.", 10 * DAY_MS), Standing(), 0)
    assert verdict.standing.due_at == DAY_MS


FAILED = DeliveryAttempt(500, "Status 500.")


@pytest.mark.parametrize("failures", range(30))
def test_pause_doubles_until_the_day_is_over(failures: int) -> None:
    verdict = judge(FAILED, Standing(failures, 0), 1_000)
    pause = FIRST_PAUSE_MS * 2 ** min(failures, 20)
    expected = Standing(failures + 1, 0, min(DAY_MS, 1_000 + pause))
    assert verdict == DeliveryVerdict("pending", expected)


def test_webhook_that_is_gone_ends_at_once() -> None:
    for status in (410, 409, 411):
        verdict = judge(DeliveryAttempt(status), Standing(2, 7, 9), 8)
        is_gone = status == 410
        assert verdict.state == ("dead" if is_gone else "pending")
        assert verdict.standing.is_ended is is_gone
    gone = judge(DeliveryAttempt(410), Standing(2, 7, 9), 8)
    assert gone == DeliveryVerdict("dead", Standing(3, 7, 0, is_ended=True))


def test_delivery_dies_a_day_after_the_first_failure() -> None:
    before = Standing(4, 100, 200)
    assert judge(FAILED, before, 99 + DAY_MS).state == "pending"
    assert judge(FAILED, before, 100 + DAY_MS) == DeliveryVerdict("dead", Standing(5, 100, 0))


def test_first_failure_begins_the_day() -> None:
    first = judge(FAILED, Standing(), 50)
    assert first == DeliveryVerdict("pending", Standing(1, 50, 50 + FIRST_PAUSE_MS))


@pytest.mark.parametrize(("asked", "due"), [(0, 5_000), (5_000, 5_000), (5_001, 5_001)])
def test_receiver_may_ask_for_a_longer_pause(asked: int, due: int) -> None:
    attempt = DeliveryAttempt(503, None, asked)
    assert judge(attempt, Standing(), 100).standing.due_at == 100 + due


@pytest.mark.parametrize(
    ("status", "delivered"), [(199, False), (200, True), (299, True), (300, False), (None, False)]
)
def test_success_of_http_is_delivered(status: int | None, delivered: bool) -> None:
    attempt = DeliveryAttempt(status)
    assert attempt.is_delivered is delivered
    state = judge(attempt, Standing(3, 0, 5), 10)
    assert (state == DeliveryVerdict("delivered", Standing())) is delivered


@given(st.binary(min_size=24, max_size=64), st.binary(max_size=50).map(lambda raw: raw.hex()))
def test_symmetric_signature_is_that_of_the_standard(key: bytes, body: str) -> None:
    secret = "whsec_" + base64.b64encode(key).decode()
    moment = datetime(2026, 11, 24, tzinfo=UTC)
    second = int(moment.timestamp())
    ours = sign_v1(secret, signed_content("msg_1", second, body.encode()))
    assert ours == Peer(secret).sign("msg_1", moment, body)
    assert sign_v1(secret.rstrip("="), signed_content("msg_1", second, body.encode())) == ours


def test_other_forms_of_the_standard_are_kept() -> None:
    assert signed_content("msg_1", 5, b"{}") == b"msg_1.5.{}"
    assert sign_v1a(b"\xff" * 3) == "v1a,////"
    assert public_key(b"\xff" * 3) == "whpk_////"
    assert message_id("ord_7", 3) == "msg_7_3"
    assert secret_digest("whsec_x") == hashlib.sha256(b"whsec_x").hexdigest()


@pytest.mark.parametrize("size", [23, 24, 64, 65])
def test_bounds_of_a_secret_are_exact(size: int) -> None:
    secret = "whsec_" + base64.b64encode(bytes(size)).decode()
    if size in (24, 64):
        assert read_secret(secret, name="secret") == secret
        return
    with pytest.raises(InvalidInput):
        read_secret(secret, name="secret")


@pytest.mark.parametrize(
    "secret",
    ["", "whsec_", "whsec_!", "whsec_" + "A" * 33, "A" * 40, "whsec_" + "A" * 40 + "!!!!"],
)
def test_text_that_is_no_secret_is_refused_by_its_name(secret: str) -> None:
    with pytest.raises(InvalidInput, match=r"^webhook\.secret must be whsec_ and") as caught:
        read_secret(secret, name="webhook.secret")
    assert caught.value.field == "webhook.secret"
    assert caught.value.allowed == "whsec_ and base64"
    assert secret_digest(secret) not in caught.value.message


def test_url_of_the_longest_length_is_taken() -> None:
    head = "https://agent.example/"
    longest = head + "x" * (LONGEST_URL - len(head))
    assert read_url(longest, PUBLIC, name="url") == longest
    for more in (1, LONGEST_URL, LONGEST_URL + 1):
        with pytest.raises(InvalidInput, match=r"^hook is too long: send at most 1000") as caught:
            read_url(longest + "x" * more, PUBLIC, name="hook")
        assert caught.value.field == "hook"
        assert caught.value.received == (longest + "x" * more)[: 2 * LONGEST_URL]
        assert "https URL of a public host" in str(caught.value.allowed)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "is not a URL"), ("https:///path", "is not a URL"),
        ("https://agent.example:0/", "is not a URL"),
        ("https://./", "is not a URL"), ("https://a.example\\b/", "is not a URL"),
        ("https://@agent.example/", "no user name"), ("https://agent.example/#x", "no user name"),
        ("http://agent.example/", "must begin with https"),
        ("https://agent.example:1023/", "names port 1023"),
        ("https://10.0.0.1/", "names 10.0.0.1, which is no public address"),
        ("https://a..example/", "has a host that is no name"),
        ("https://db/", "names db, which is no public host"),
        ("https://a.localhost/", r"names a\.localhost, which is no public host"),
        (f"https://{ONION}.onion/", "has no proxy to Tor"),
    ],
)  # fmt: skip
def test_url_gets_its_own_complaint(url: str, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=f"^url .*{complaint}"):
        read_url(url, PUBLIC, name="url")


def test_onion_service_has_its_own_rules() -> None:
    for url, complaint in (
        ("https://short.onion/", "no onion service of version 3"),
        (f"ftp://{ONION}.onion/", "begin with https:// or http://"),
        (f"http://{ONION}.onion:22/", "names port 22"),
    ):
        with pytest.raises(InvalidInput, match=complaint):
            read_url(url, PRIVATE, name="url")
    for scheme in ("http", "https"):
        assert read_url(f"{scheme}://a.{ONION}.onion./", PRIVATE, name="url")


def test_host_of_a_url_is_an_address_or_a_name() -> None:
    assert as_address("1.1.1.1") == ip_address("1.1.1.1")
    assert as_address("agent.example") is None
    hook = Webhook(f"http://{ONION}.onion./x")
    assert (hook.receiver, hook.is_onion) == (f"{ONION}.onion:80", True)
    assert not Webhook("https://onion.example/").is_onion
    assert Webhook("https://a.example:8443/").receiver == "a.example:8443"
