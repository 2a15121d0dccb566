"""config/compose.yaml: its settings exist, its ports agree, and its mounts exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from rpcsvc import engine_context
from rpcsvc.orders.scheduler.effects import STOP_SECONDS
from rpcsvc.settings import Settings, check_bind, load_settings
from rpcsvc.settings_onchain import read_chains

CONFIG = Path(__file__).parents[2] / "config"
COMPOSE: dict[str, Any] = yaml.safe_load((CONFIG / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROMETHEUS: dict[str, Any] = yaml.safe_load((CONFIG / "prometheus/prometheus.yaml").read_text())
GIVEN = {"RPCSVC_SITE_URL": "https://swap.example:8443", "ARBITRUM_URL": "http://10.0.0.5:8545"}
SECRETS = "/run/secrets/"


def options(service: str) -> dict[str, str]:
    """The options of a daemon's command."""
    words = (word.removeprefix("--").partition("=") for word in SERVICES[service]["command"])
    return {name: value for name, _, value in words}


def container_ports(service: str) -> list[int]:
    return [int(each.rpartition(":")[2]) for each in SERVICES[service].get("ports", [])]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """The service's settings, read by the product: an unknown key is refused."""
    environ = {"RPCSVC_DATA_DIR": str(tmp_path)}
    for name, value in SERVICES["rpcsvc"]["environment"].items():
        known = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: GIVEN[found[1]], value)
        if known.startswith(SECRETS):
            secret = tmp_path / known.removeprefix(SECRETS)
            secret.write_text(f"a-secret-of-some-length-{secret.name}\n")
            known = str(secret)
        environ[name] = known
    return load_settings(config_file=None, environ=environ, flags={}).settings


def test_compose_settings_would_start_the_engine_onchain(settings: Settings) -> None:
    check_bind(settings)
    engine_context.check(settings, read_chains(settings.chains_file))
    assert settings.engine == "onchain"
    assert settings.onchain.wallet_password is not None


def test_compose_daemons_answer_where_the_service_asks(settings: Settings) -> None:
    for service, url in (
        ("monerod", settings.onchain.monerod_url),
        ("wallet-rpc", settings.onchain.wallet_url),
        ("monerod", options("wallet-rpc")["daemon-address"]),
    ):
        asked = urlsplit(url)
        assert (asked.scheme, asked.hostname) == ("http", service)
        assert asked.port == int(options(service)["rpc-bind-port"])
        assert options(service)["rpc-ssl"] == "disabled"


def test_compose_publishes_no_wallet_and_no_node_rpc() -> None:
    assert "ports" not in SERVICES["wallet-rpc"]
    assert int(options("monerod")["rpc-bind-port"]) not in container_ports("monerod")
    for service in ("prometheus", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[service]["ports"])


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_compose_container_may_do_little(service: str) -> None:
    found = SERVICES[service]
    assert found["read_only"] is True
    assert found["tmpfs"] == ["/tmp"]
    assert found["cap_drop"] == ["ALL"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert found["pids_limit"] <= 512
    assert found["mem_limit"].endswith("g")
    assert found["ulimits"]["core"] == 0
    assert int(found["user"].partition(":")[0]) > 0
    assert not found.keys() & {"cap_add", "devices", "ipc", "network_mode", "pid", "privileged"}


def on_network(name: str) -> set[str]:
    return {service for service, found in SERVICES.items() if name in found["networks"]}


def test_compose_keeps_the_wallet_from_monitoring_and_outside() -> None:
    assert on_network("wallet") == {"monerod", "wallet-rpc", "rpcsvc"}
    assert SERVICES["wallet-rpc"]["networks"] == ["wallet"]
    assert COMPOSE["networks"]["wallet"] == {"internal": True}
    for service in ("prometheus", "grafana"):
        assert not {"wallet", "outside"} & set(SERVICES[service]["networks"])
    assert on_network("metrics") == {"rpcsvc", "prometheus"}
    assert on_network("dashboard") == {"prometheus", "grafana"}


def test_compose_monero_images_are_of_one_release() -> None:
    releases = {SERVICES[name]["image"].rpartition(":")[2] for name in ("monerod", "wallet-rpc")}
    assert {release.rpartition(".")[0] for release in releases} == {"v0.18.5"}


def test_compose_prometheus_asks_the_service(settings: Settings) -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert (host, int(port)) == ("rpcsvc", settings.port)
    assert host in settings.allowed_hosts
    assert container_ports("rpcsvc") == [settings.port]
    assert job["scheme"] == "https"
    assert job["job_name"] == "rpcsvc", "the alerts ask for it"
    token = job["authorization"]["credentials_file"]
    assert token == SERVICES["rpcsvc"]["environment"]["RPCSVC_TELEMETRY__METRICS_TOKEN_FILE"]
    assert SERVICES["prometheus"]["secrets"] == [token.removeprefix(SECRETS)]
    assert len(settings.telemetry.metrics_token) == 1


def test_compose_grafana_asks_prometheus() -> None:
    folder = CONFIG / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources.yaml").read_text())["datasources"]
    url = urlsplit(source["url"])
    assert (url.hostname, url.port) == ("prometheus", container_ports("prometheus")[0])
    dashboard = json.loads((CONFIG / "grafana" / "rpcsvc.json").read_text())
    (variable,) = dashboard["templating"]["list"]
    assert source["type"] == variable["query"]
    (provider,) = yaml.safe_load((folder / "dashboards.yaml").read_text())["providers"]
    mounted = [each.split(":")[1] for each in SERVICES["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/rpcsvc.json" in mounted


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_compose_names_only_what_exists(service: str) -> None:
    found = SERVICES[service]
    text = json.dumps(found)
    assert set(found.get("secrets", ())) == set(re.findall(rf"{SECRETS}(\w+)", text)) | (
        {"metrics_token"} if service == "prometheus" else set()
    )
    assert set(found.get("secrets", ())) <= COMPOSE["secrets"].keys()
    assert set(found.get("depends_on", ())) <= SERVICES.keys()
    assert set(found["networks"]) <= COMPOSE["networks"].keys()
    for volume in found.get("volumes", ()):
        source = volume.partition(":")[0]
        if source.startswith("."):
            assert source == "./tls" or (CONFIG / source).exists(), source
        else:
            assert source in COMPOSE["volumes"]


def test_compose_gives_the_service_time_to_stop() -> None:
    given = int(SERVICES["rpcsvc"]["stop_grace_period"].removesuffix("s"))
    assert given >= Settings.model_fields["graceful_seconds"].default + STOP_SECONDS + 5


def test_files_with_secrets_are_not_committed() -> None:
    ignored = (CONFIG.parent / ".gitignore").read_text().splitlines()
    folders = {Path(each["file"]).parent for each in COMPOSE["secrets"].values()}
    assert {f"config/{folder}/" for folder in folders} | {"config/tls/"} <= set(ignored)
