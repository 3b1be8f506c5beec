"""The Grafana dashboard asks for what is exported, in words that Grafana knows."""

import json
import re
from typing import Any

import pytest
from watch_files import DASHBOARD, metric_names, queries

from tinyllm_ray.cluster.metrics import GPU_GAUGES, STUDY_GAUGES


def test_the_grafana_dashboard_asks_for_what_is_exported_and_for_all_of_it() -> None:
    exported = {**STUDY_GAUGES, **GPU_GAUGES}
    assert set().union(*map(metric_names, queries("s"))) == set(exported)
    for query in queries("s"):
        tags = {"NodeAddress"}.union(*(exported[name][1] for name in metric_names(query)))
        labels = re.findall(r"[{,]\s*(\w+)=", query)
        labels += [word for listed in re.findall(r"by \((.*?)\)", query) for word in listed.split(", ")]
        assert set(labels) <= tags, query


def test_grafanas_own_models_read_the_dashboard_without_losing_a_word() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="pip install grafana-foundation-sdk")
    from grafana_foundation_sdk.cog import encoder, plugins

    plugins.register_default_plugins()
    shipped = json.loads(DASHBOARD.read_text())
    known = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(shipped)))
    assert _within(shipped, known)


def _within(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return all(name in whole and _within(value, whole[name]) for name, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(_within, part, whole))
    return bool(part == whole)
