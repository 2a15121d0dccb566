"""Permitted URLs and addresses of webhooks, their secrets, and retry times."""

from __future__ import annotations

import base64
import re
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.domain.webhooks import (
    DAY_MS,
    SECRET_PATTERN,
    URL_PATTERN,
    DeliveryAttempt,
    Standing,
    Targets,
    Webhook,
    judge,
    read_secret,
    read_url,
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
