"""Stories of jobs and of their operator, as the series that Prometheus would have of them, minute by minute.

Alerts are put to them by promtool (tests/integration/test_alerts.py), and docs/alerts.md says what comes of it;
dashboards are drawn of them (harness/pictures). A story says what differs from WELL, and names metrics by their
declarations: it can't tell of one that nothing exports.
"""

from .of_cluster import STORIES as OF_CLUSTER
from .of_engines import STORIES as OF_ENGINES
from .of_training import STORIES as OF_TRAINING
from .story import Story

STORIES = (*OF_TRAINING, *OF_ENGINES, *OF_CLUSTER)
"""All stories. Each says what no other does."""

__all__ = ["STORIES", "Story"]
