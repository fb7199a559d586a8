"""Stories of jobs and of their operator, as the series that Prometheus would have of them, minute
by minute.

promtool evaluates the alerts on them (tests/integration/test_alerts.py), docs/reference/alerts.md lists the
results, and tools/pictures draws dashboards from them. A story contains what differs from WELL. It
names metrics by their declarations, so it can't use one that nothing exports.
"""

from .of_cluster import STORIES as OF_CLUSTER
from .of_engines import STORIES as OF_ENGINES
from .of_learning import STORIES as OF_LEARNING
from .of_operator import STORIES as OF_OPERATOR
from .of_training import STORIES as OF_TRAINING
from .story import Story

STORIES = (*OF_TRAINING, *OF_LEARNING, *OF_ENGINES, *OF_CLUSTER, *OF_OPERATOR)
"""All stories. Each says what no other does."""

__all__ = ["STORIES", "Story"]
