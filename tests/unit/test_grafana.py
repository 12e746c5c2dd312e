# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The dashboard: every metric and label of its queries exists, none is forgotten, and Grafana finds what it needs.

Grafana is not run here; what it needs is taken from its JSON model: ids, places that do not overlap, a data source.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from afd_dsv4 import metrics

DASHBOARD = json.loads(
    (Path(__file__).resolve().parents[2] / "recipes" / "grafana" / "afd_dsv4.json").read_text(encoding="utf-8")
)
KNOWN = {metric.full_name: set(metric.labels) for metric in metrics.METRICS}
#: No `vector`: a number of its own would stand where there are no metrics at all.
WORDS = {"sum", "rate", "by", "label_values"}
#: What each panel is of, by its title: the metrics of its queries, with the labels that pick among their series.
SHOWN = {
    "Workers by executor": ["executor"],
    "Quarantined leases": ["quarantined_total"],
    "Tails in doubt": ['tail_requests state="in_doubt"'],
    "Forwards refused": ["forward_refusals_total", "exhausted_total"],
    "Requests with a tail": ['tail_requests state="used"'],
    "Pages of tails": ["tail_pages"],
    "Slots by state": ["slots"],
    "Executions": ["leases_total", "uploads_total"],
    "What ordering costs": ["events_recorded_total", "leases_total", "stream_waits_total", "leases_total"],
    "Slots handed on": ["slots_handed_on_total"],
    "Host waits": ["host_waits_total"],
    "Bytes": ["allocated_bytes"],
    "What the gate said": ["decisions_total"],
    "Refused, and why": ["refusals_total"],
}


def queries(dashboard: dict[str, Any]) -> list[str]:
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return targets + [
        variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable
    ]


def picked(query: str) -> Iterator[str]:
    """The metrics of a query, with what picks among their series beside the engine."""
    for name, text in re.findall(rf"{metrics.PREFIX}(\w+)(?:\{{([^}}]*)\}})?", query):
        labels = [label.strip() for label in text.split(",")]
        if ("engine" in KNOWN.get(metrics.PREFIX + name, ())) is not ('engine=~"$engine"' in labels):
            yield f"{name} of engines that were not chosen"
        yield " ".join([name, *sorted(label for label in labels if label and label != 'engine=~"$engine"')])


def faults(dashboard: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a dashboard, in words."""
    for query in queries(dashboard):
        named = re.findall(rf"{metrics.PREFIX}\w+", query)
        yield from (f"no metric {name}" for name in named if name not in KNOWN)
        labels = {label for part in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)\s*=", part)}
        labels |= {label.strip() for part in re.findall(r"by \(([^)]*)\)", query) for label in part.split(",")}
        for name in named:
            yield from (f"{name} has no label {label}" for label in sorted(labels - KNOWN.get(name, labels)))
        if query.count("(") != query.count(")") or query.count("{") != query.count("}"):
            yield f"brackets of {query}"
        for name in re.findall(r"\brate\((\w+)", query):
            if not name.endswith("_total"):
                yield f"rate of {name}, which is no counter"
        bare = re.sub(r'\{[^}]*\}|\[[^\]]*\]|"[^"]*"|by \([^)]*\)|, \w+\)', "", query)
        yield from (
            f"word {word} in {query}"
            for word in re.findall(r"[a-z_]\w*", bare)
            if word not in WORDS and not word.startswith(metrics.PREFIX)
        )
    shown = {name for query in queries(dashboard) for name in re.findall(rf"{metrics.PREFIX}\w+", query)}
    yield from (f"{name} is not shown" for name in sorted(set(KNOWN) - shown))
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(set(ids)) != len(ids):
        yield "two panels with one id"
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        if not 0 <= place["x"] < place["x"] + place["w"] <= 24:
            yield f"{panel['title']} is beside the grid"
        for cell in ((x, y) for x in range(place["x"], place["x"] + place["w"])
                     for y in range(place["y"], place["y"] + place["h"])):  # fmt: skip
            if cell in taken:
                yield f"{panel['title']} lies on {taken[cell]}"
                break
            taken[cell] = panel["title"]
        if panel["type"] == "row":
            continue
        found = [part for target in panel["targets"] for part in picked(target["expr"])]
        if found != SHOWN.get(panel["title"]):
            yield f"{panel['title']} is of {found}"
        if panel["type"] == "stat":
            defaults = panel["fieldConfig"]["defaults"]
            if "no data" not in defaults["noValue"]:
                yield f"{panel['title']} says {defaults['noValue']} where there is no data"
            if defaults["thresholds"]["steps"][0] != {"color": "text", "value": None}:
                yield f"{panel['title']} has a colour where there is no data"
            # Over a range it would show the last value of a server that has ended.
            if not all(target["instant"] and not target["range"] for target in panel["targets"]):
                yield f"{panel['title']} shows what is over"
        if panel["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
            yield f"{panel['title']} has a data source of its own"
        for target in panel["targets"]:
            yield from (
                f"{panel['title']}: legend {{{{{label}}}}} is not in the query"
                for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
                if not re.search(rf"by \([^)]*\b{label}\b", target["expr"])
            )


def test_queries_are_of_metrics_that_exist_and_panels_where_grafana_can_draw_them() -> None:
    assert [*faults(DASHBOARD)] == []


def test_what_is_counted_from_the_start_of_a_worker_needs_no_zero_of_its_own() -> None:
    """Each of them is on the page of a worker that has done nothing; only what has a `reason` waits for the first."""
    stats = [panel for panel in DASHBOARD["panels"] if panel["type"] == "stat"]
    named = {
        name for panel in stats for target in panel["targets"] for name in re.findall(r"afd_dsv4_\w+", target["expr"])
    }
    late = {metric.full_name for metric in metrics.METRICS if metric.where == "front end" or "reason" in metric.labels}
    assert named - late == {
        f"afd_dsv4_{name}" for name in ("executor", "quarantined_total", "tail_requests", "exhausted_total")
    }
    program = (
        "from afd_dsv4 import metrics; from tests.metrics_worker import Runtime; import prometheus_client; "
        "metrics.WorkerMetrics(Runtime(), 0, 0); print(prometheus_client.generate_latest().decode())"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    for name in named - late:
        assert re.search(rf'^{name}\{{.*rank="0".*\}} \d', done.stdout, re.MULTILINE), name


def test_the_model_has_what_grafana_imports() -> None:
    for key in ("uid", "title", "schemaVersion", "panels", "templating", "time", "annotations"):
        assert key in DASHBOARD
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "engine"]
    assert DASHBOARD["templating"]["list"][0]["query"] == "prometheus"
    used = set(re.findall(r"\$(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used <= {"engine", "datasource"}
    assert len(DASHBOARD["uid"]) <= 40


def planted(change: str, to: str) -> list[str]:
    text = json.dumps(DASHBOARD)
    assert change in text
    return [*faults(json.loads(text.replace(change, to, 1)))]


def test_planted_faults_are_found() -> None:
    """Negative control."""
    assert "no metric afd_dsv4_executors" in planted("afd_dsv4_executor{", "afd_dsv4_executors{")
    assert "afd_dsv4_executor is not shown" in planted("afd_dsv4_executor{", "afd_dsv4_slots{")
    assert "afd_dsv4_executor has no label executer" in planted("sum by (executor)", "sum by (executer)")
    assert any("legend {{executor}}" in fault for fault in planted("sum by (executor)", "sum by (engine)"))
    assert "rate of afd_dsv4_slots, which is no counter" in planted(
        "sum(rate(afd_dsv4_leases_total{", "sum(rate(afd_dsv4_slots{"
    )
    assert "two panels with one id" in planted('"id": 2,', '"id": 1,')
    assert any("lies on" in fault for fault in planted('"x": 6,', '"x": 5,'))
    assert any(fault.startswith("brackets") for fault in planted("sum(afd_", "sum((afd_"))
    assert "word vector in " in "".join(planted('state=\\"in_doubt\\"})', 'state=\\"in_doubt\\"}) or vector(0)'))
    assert "Workers by executor says 0 where there is no data" in planted('"noValue": "no data"', '"noValue": "0"')
    assert "Workers by executor has a colour where there is no data" in planted('"color": "text"', '"color": "green"')
    assert "Workers by executor shows what is over" in planted('"instant": true', '"instant": false')
    free = planted('state=\\"used\\"', 'state=\\"free\\"')
    assert free == ["Requests with a tail is of ['tail_requests state=\"free\"']"]
    every = planted('afd_dsv4_slots{engine=~\\"$engine\\"}', "afd_dsv4_slots")
    assert every == ["Slots by state is of ['slots of engines that were not chosen', 'slots']"]
    assert any(fault.startswith("word sam") for fault in planted("sum(", "sam("))
