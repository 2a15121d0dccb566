"""The examples in the documents of a service on stagenet can be sent to it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain.addresses import MoneroNetwork, parse_monero_address, subaddress_on
from rpcsvc.http.documents import links, recording
from rpcsvc.operations.table import MONERO, OPERATIONS, on_network
from tests.contract.serving import Served, serving
from tests.contract.sidecar import beside

DOCUMENTS = [*links.DESCRIPTIONS, *links.ALIASES]
ADDRESS = re.compile(r"\b[48][1-9A-HJ-NP-Za-km-z]{94}\b")
# An id of the recording, which no installation has.
MISSING = {"order_not_found", "ticket_not_found"}


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[Served]:
    more: dict[str, Any] = {
        "orders__unfunded_address_orders": 1000,
        "orders__unfunded_address_share": 100,
    }
    async with (
        serving(tmp_path / "central", **more) as central,
        beside(central, tmp_path / "sidecar", **more) as ready,
    ):
        yield ready


async def read(served: Served, path: str) -> str:
    return await (await served.client.get(path)).text()


@pytest.mark.parametrize("network", MoneroNetwork)
def test_example_address_has_the_same_keys_on_each_network(network: MoneroNetwork) -> None:
    address = subaddress_on(MONERO, network)
    parsed = parse_monero_address(address, field="to", networks={network})
    assert (parsed.network, parsed.kind) == (network, "subaddress")
    assert subaddress_on(address, MoneroNetwork.MAINNET) == MONERO
    assert on_network({"a": [MONERO, 1, None]}, network.value) == {"a": [address, 1, None]}


@pytest.mark.parametrize("network", ["sandbox", "regtest"])
def test_example_address_stays_where_mainnets_are_taken(network: str) -> None:
    assert on_network(MONERO, network) == MONERO


async def test_no_document_on_stagenet_names_a_mainnet_address(sidecar: Served) -> None:
    for path in DOCUMENTS:
        assert not ADDRESS.search(await read(sidecar, path)), path
    discovered = (await sidecar.raw(_call("rpc.discover", {}))).body
    assert not ADDRESS.search(json.dumps(discovered))


async def test_every_example_on_stagenet_is_accepted(sidecar: Served) -> None:
    openapi, openrpc = [json.loads(await read(sidecar, p)) for p in (links.OPENAPI, links.OPENRPC)]
    quick = json.loads(await read(sidecar, links.QUICKSTART))["examples"]
    calls = [
        *(("POST", each["path"], each["body"]) for each in quick.values()),
        *_bodies(openapi),
        *_http_blocks(await read(sidecar, links.LLMS_FULL)),
    ]
    assert len(calls) > 25
    for method, path, body in calls:
        answer = await sidecar.client.request(method, path, json=body)
        _accepted(f"{path} {body}", await answer.json())
    methods = {f"service.{operation.name}" for operation in OPERATIONS}
    called = 0
    for described in openrpc["methods"]:
        for example in described.get("examples", ()):
            if described["name"] in methods and not _is_refused(example):
                params = {each["name"]: each["value"] for each in example["params"]}
                answer = (await sidecar.raw(_call(described["name"], params))).body
                _accepted(f"{described['name']} {params}", answer["result"])
                called += 1
    assert called > 15


def _call(method: str, params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": "1", "method": method, "params": params}).encode()


def _is_refused(example: Any) -> bool:
    """Whether an example is of a refusal."""
    recorded = recording.load().get(example["name"])
    return recorded is not None and not recorded.answer["ok"]


def _accepted(what: str, answer: dict[str, Any]) -> None:
    error = answer.get("error")
    assert error is None or error["code"] in MISSING, f"{what}: {error}"


def _bodies(openapi: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The examples of all request bodies whose path names no order."""
    for path, item in openapi["paths"].items():
        for method, described in item.items():
            content = described.get("requestBody", {}).get("content", {})
            media = content.get("application/json", {})
            found = [e["value"] for e in media.get("examples", {}).values()]
            found += [media["example"]] if "example" in media else []
            for body in found:
                if "{" not in path:
                    yield method.upper(), path, body


def _http_blocks(page: str) -> Iterator[tuple[str, str, Any]]:
    """The requests that are shown as accepted."""
    for block, answer in re.findall(
        r"```http\n(.*?)\n```\n\nAnswer:\n\n```json\n(.*?)\n```", page, re.DOTALL
    ):
        head, _, body = block.partition("\n\n")
        method, target, _ = head.split("\n")[0].split(" ")
        if json.loads(answer)["ok"]:
            yield method, target, json.loads(body) if body else None
