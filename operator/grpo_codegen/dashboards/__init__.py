"""The chart's Grafana dashboards, laid out over the metrics that grpo_api declares.

Each answers one person's questions: whose job it is (training), whose GPUs they are (fleet), whose
operator it is (controller). The chart ships charts/grpo-operator/files/dashboards in ConfigMaps;
docs/reference/dashboards.md explains them.
"""

from . import controller, fleet, training

DASHBOARDS = {
    "training-health": training.DASHBOARD,
    "fleet": fleet.DASHBOARD,
    "operator": controller.DASHBOARD,
}
"""All of them by file name."""
