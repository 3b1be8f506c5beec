"""The files in cluster/ that watch a study, and what they ask for."""

import json
import re
from pathlib import Path

CLUSTER = Path(__file__).parents[1] / "cluster"
DASHBOARD = CLUSTER / "grafana_dashboard.json"


def queries(study: str) -> list[str]:
    """Of the Grafana dashboard, with that study chosen."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"].replace("$study", study) for panel in panels for target in panel["targets"]]


def metric_names(query: str) -> set[str]:
    """Of the project's own metrics, as they are called where they are exported."""
    return set(re.findall(r"\bray_(tinyllm_\w+)", query))
