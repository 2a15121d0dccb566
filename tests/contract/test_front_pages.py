"""The site root and /status: contents, access, and escaping of a brand's texts."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

from rpcsvc.health import Health
from rpcsvc.http.documents import links
from rpcsvc.http.pages.rendering import Catalogues
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.local_venue import LocalVenue
from tests.contract.checkout import fault
from tests.contract.serving import Served, serving
from tests.rows import set_rates

SAY = Catalogues().choose("en").say


async def page(served: Served, path: str, **headers: str) -> tuple[int, str]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await served.client.get(path, headers=names)
    assert response.content_type == "text/html"
    return response.status, html.unescape(await response.text())


async def test_home_page_shows_what_can_be_swapped_now(served: Served) -> None:
    status, text = await page(served, "/")
    assert (status, SAY("home.open") in text) == (200, True)
    assert "1 XMR = 165 USDC" in text
    for name in ("Monero Stagenet", "Arbitrum Sepolia", "Ethereum Sepolia"):
        assert f"{name}: <strong>{SAY('home.network_up')}</strong>" in text
    assert SAY("home.from_to", least="0.0607 XMR", most="303.0303 XMR") in text
    for path in links.DESCRIPTIONS:
        assert f'href="{path}"' in text


async def test_home_page_draws_the_rates_of_the_last_day(served: Served) -> None:
    _, text = await page(served, "/")
    assert "<svg" not in text  # only the rate of just now is published
    await set_rates(served.up.database, {164_000_000: 3_600_000, 166_500_000: 1_200_000})
    _, text = await page(served, "/")
    assert SAY("home.chart_says", least="164", most="166.5") in text
    assert '<path d="M920 152h0M947 8h0"/>' in text


async def test_home_page_shows_when_no_orders_are_taken(served: Served) -> None:
    await fault(served, "rates_down")
    status, text = await page(served, "/")
    assert (status, SAY("home.closed") in text) == (200, True)
    assert "165 USDC" not in text


@pytest.mark.parametrize("path", ["/", "/status"])
async def test_page_shows_which_networks_are_down(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    await fault(served, "engine_down")
    _, text = await page(served, path, x_forwarded_for="192.0.2.7")
    down = f'<strong class="down">{SAY("home.network_down")}</strong>'
    assert text.count(down) == 7
    assert SAY("home.network_up") not in text
    assert "engine_down" not in text
    await fault(served, "engine_up")

    async def networks(_: object) -> dict[str, Health]:
        return {"monero": Health(False, "http://127.0.0.1:18081 is down"), "base": Health(True)}

    monkeypatch.setattr(LocalVenue, "networks", networks)
    _, text = await page(served, path, x_forwarded_for="192.0.2.7")
    assert f"Monero Stagenet: {down}" in text
    assert f"Base Sepolia: <strong>{SAY('home.network_up')}</strong>" in text
    assert f"Ethereum Sepolia: <strong>{SAY('home.network_unknown')}</strong>" in text
    assert "18081" not in text


async def test_network_whose_scan_is_behind_is_down(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScanProgress, "behind", lambda _: {"base": 600_000})
    _, text = await page(served, "/")
    assert f'Base Sepolia: <strong class="down">{SAY("home.network_down")}</strong>' in text
    assert text.count(SAY("home.network_up")) == 6


async def test_words_of_a_brand_stay_words_on_a_page(tmp_path: Path) -> None:
    brand = {"brand__name": '<b>](x) "&"', "brand__motto": "<script>alert(1)</script>"}
    async with serving(tmp_path, **brand) as served:  # type: ignore[arg-type] # flags are any
        response = await served.client.get("/")
        text = await response.text()
    assert "<script" not in text
    assert "<b>" not in text


async def test_status_page_says_what_health_says(served: Served) -> None:
    assert (await page(served, "/status"))[0] == 200
    await fault(served, "rates_down")
    answer = await (await served.client.get("/health")).json()
    status, text = await page(served, "/status")
    assert (status, SAY("status.unwell") in text) == (503, True)
    assert SAY("status.serves", version=answer["version"], engine="sandbox") in text
    for name, check in answer["checks"].items():
        label, word = SAY(f"status.check_{name}"), SAY(f"status.{check['status']}")
        assert f"<dt>{label}</dt><dd><strong>{word}</strong>" in text
    assert answer["checks"]["rates"]["detail"] in text


async def test_status_page_shows_outsiders_no_details(served: Served) -> None:
    await fault(served, "rates_down")
    answer = await (await served.client.get("/health")).json()
    _, text = await page(served, "/status", x_forwarded_for="192.0.2.7")
    assert SAY("status.degraded") in text
    assert answer["checks"]["rates"]["detail"] not in text


async def test_pages_speak_the_readers_language_or_english(served: Served) -> None:
    for wanted in ("", "xx", "de;q=0.9, en;q=0.1", "q=;;,*"):
        response = await served.client.get("/", headers={"accept-language": wanted})
        assert response.headers["content-language"] == "en"


async def test_pages_name_themselves_as_an_onion_service(tmp_path: Path) -> None:
    onion = f"http://{'a' * 56}.onion"
    async with serving(tmp_path, onion_url=onion) as served:
        response = await served.client.get("/status?a=1", headers={"host": onion[7:]})
        assert response.status == 200
        assert response.headers["onion-location"] == f"{onion}/status?a=1"
        document = await served.client.get("/llms.txt")
        assert "onion-location" not in document.headers


async def test_pages_name_no_onion_service_without_one(served: Served) -> None:
    response = await served.client.get("/")
    assert "onion-location" not in response.headers
