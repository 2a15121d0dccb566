"""Rules and dashboard use existing metrics; rules link to docs/operate/alerts.md and are tested.

The rules are tested on recorded series if promtool is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rpcsvc.http.metrics import FAMILIES

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "config" / "prometheus"
RULES = (FOLDER / "alerts.yaml").read_text()
DASHBOARD = (ROOT / "config" / "grafana" / "rpcsvc.json").read_text()
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
TESTS = (FOLDER / "alerts_test.yaml").read_text()


# Series by their scraped names, with their labels.
SERVED = {
    name + suffix: set(family.labels) | ({"le"} if suffix == "_bucket" else set())
    for name, family in FAMILIES.items()
    for suffix in SUFFIXES[family.kind]
}
EXPRESSIONS = [
    target["expr"]
    for panel in json.loads(DASHBOARD)["panels"]
    for target in panel.get("targets", ())
]


def series_in(expression: str) -> set[str]:
    """The series of rpcsvc that an expression reads."""
    return set(re.findall(r"\b(rpcsvc_\w+)", expression))


def labels_in(expression: str) -> set[str]:
    """The labels that an expression selects or groups by."""
    grouped = ",".join(re.findall(r"\bby \(([^)]*)\)", expression))
    selected = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression)
    return {label for label in re.split(r"[,\s]+", grouped) if label} | set(selected)


def test_rules_are_on_metrics_that_exist() -> None:
    used = {each for text in re.findall(r"expr: (.*)", RULES) for each in series_in(text)}
    assert len(used) > 4
    assert used <= SERVED.keys()


def test_every_rule_links_to_its_section() -> None:
    _, *rules = RULES.split("- alert: ")
    assert len(rules) > 4
    for rule in rules:
        anchors = re.findall(
            r'runbook_url: "{{ \$externalLabels\.rpcsvc_docs }}/operate/alerts\.md#(\w+)"', rule
        )
        assert anchors == [rule.split()[0].lower()]


def test_prometheus_of_compose_says_where_the_docs_are() -> None:
    """Links to runbooks begin with this label; without it they are broken."""
    settings = (FOLDER / "prometheus.yaml").read_text()
    assert re.search(r"external_labels: {rpcsvc_docs: https://\S+[^/]}", settings)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_dashboard_reads_series_and_labels_that_exist(expression: str) -> None:
    (series,) = series_in(expression)
    assert labels_in(expression) <= SERVED[series]


def test_dashboard_shows_every_family() -> None:
    shown = {
        re.sub(r"_(total|bucket)$", "", each) for text in EXPRESSIONS for each in series_in(text)
    }
    assert shown == FAMILIES.keys()


def test_dashboard_legends_name_labels_that_are_left() -> None:
    panels = json.loads(DASHBOARD)["panels"]
    targets = [target for panel in panels for target in panel.get("targets", ())]
    assert len(targets) > 4
    for target in targets:
        expression, named = target["expr"], re.findall(r"{{(\w+)}}", target["legendFormat"])
        grouped = re.findall(r"\bby \(([^)]*)\)", expression)
        (series,) = series_in(expression)
        left = set(re.split(r",\s*", grouped[0])) - {"le"} if grouped else SERVED[series]
        assert set(named) <= left, expression


def test_dashboard_panels_have_a_place_of_their_own() -> None:
    panels = json.loads(DASHBOARD)["panels"]
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_dashboard_expressions_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    file = tmp_path / "rules.yaml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_has_a_section_and_every_chapter_has_a_rule() -> None:
    page = (ROOT / "docs" / "operate" / "alerts.md").read_text()
    chapters = [re.findall(r"^### (Rpcsvc\w+)$", part, re.MULTILINE)
                for part in re.split(r"^## .*$", page, flags=re.MULTILINE)[1:]]  # fmt: skip
    assert all(chapters)
    sections = [rule for chapter in chapters for rule in chapter]
    assert sorted(sections) == sorted(re.findall(r"- alert: (\w+)", RULES))


def test_every_rule_is_tested() -> None:
    rules = set(re.findall(r"- alert: (\w+)", RULES))
    assert rules == set(re.findall(r"alertname: (\w+)", TESTS))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_rules_raise_the_expected_alerts_on_recorded_series() -> None:
    command = ["promtool", "test", "rules", "alerts_test.yaml"]
    done = subprocess.run(
        command, check=False, cwd=FOLDER, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
