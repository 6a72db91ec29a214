"""Alerts, the scraper and Grafana's provisioning: queries ask for series that exist, and files meet each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

from tests.unit.exported_metrics import ROOT, exported, labels_of, our_names

INFRA = ROOT / "infra"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((INFRA / "prometheus" / "alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
# Ray's own series in our alerts and the runbook, where Ray 2.60 defines them, and the labels that we use.
RAYS_OWN = {
    "ray_serve_num_http_error_requests_total": ("dashboard/modules/metrics/dashboards", {"error_code"}),
    "ray_serve_deployment_queued_queries": ("dashboard/modules/metrics/dashboards", {"deployment", "application"}),
    "ray_node_gram_used": ("dashboard/modules/metrics/dashboards", set()),
    "ray_node_gram_available": ("dashboard/modules/metrics/dashboards", set()),
    "ray_node_disk_utilization_percentage": ("dashboard/modules/reporter", set()),
}
FUNCTIONS = {"abs", "by", "group_left", "histogram_quantile", "increase", "offset", "on", "rate", "sum"}


def words(query: str) -> set[str]:
    """Identifiers of a query, without the contents of braces, strings, groupings and durations."""
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"|\[[^\]]*\]|\b(?:by|on|group_left) \([^)]*\)|\boffset \w+", " ", query)
    return set(re.findall(r"\b[a-z_]+\b", bare)) - FUNCTIONS


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert(rule: dict[str, Any]) -> None:
    query, known = rule["expr"], exported()
    assert words(query) and words(query) <= known.keys() | RAYS_OWN.keys() | {"up"}, query
    for name in our_names(query):
        assert labels_of(query) <= known[name], name
    for name in words(query) & RAYS_OWN.keys():
        assert labels_of(query) <= RAYS_OWN[name][1], name
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    assert rule["labels"]["severity"] in ("page", "ticket") and re.fullmatch(r"\d+m", rule["for"])
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert shown <= labels_of(query) | {"instance", "GpuIndex"}, "a label that the result does not have"


@pytest.mark.parametrize("name", RAYS_OWN)
def test_rays_own_series_exist(name: str) -> None:
    folder = Path(ray.__file__).parent / RAYS_OWN[name][0]
    stem = name.removeprefix("ray_")
    assert any(stem in path.read_text("utf-8") for path in folder.glob("*.py"))


def test_alerts_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) > 10


def test_the_runbook_has_a_row_for_every_alert_and_no_other_metric() -> None:
    text = (ROOT / "docs" / "operations.md").read_text("utf-8")
    for rule in RULES:
        assert f"`{rule['alert']}`" in text, rule["alert"]
    named = set(re.findall(r"`(ray_\w+)`", text))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()} | exported().keys()
    assert len(named) > 5 and named <= families | RAYS_OWN.keys()


def test_prometheus_reads_what_ray_writes() -> None:
    config = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "ray"  # RayNodeDown names it
    assert job["file_sd_configs"][0]["files"] == [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]
    assert all((INFRA / "prometheus" / name).is_file() for name in config["rule_files"])


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioning = INFRA / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text("utf-8"))["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "citer.yaml").read_text("utf-8"))["providers"]
    services = yaml.safe_load((INFRA / "compose.yaml").read_text("utf-8"))["services"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    mounts = dict(volume.split(":")[:2][::-1] for volume in services["grafana"]["volumes"])
    assert (INFRA / mounts["/etc/grafana/provisioning"]).resolve() == provisioning
    dashboard = f"{provider['options']['path']}/citer-ray.json"
    assert (INFRA / mounts[dashboard]).is_file()
