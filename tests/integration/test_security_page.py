"""What the security page tells people to apply, applied."""

import re
from pathlib import Path

import yaml

from grpo_operator import names
from harness.fixtures import AnyCluster

PAGE = Path("docs/security.md")


def page_policy() -> str:
    """The NetworkPolicy for training pods, as the page has it."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(text)


def test_the_pages_network_policy_is_taken_and_selects_our_pods(api_cluster: AnyCluster) -> None:
    text = page_policy()
    ours = {names.LABEL_MANAGED_BY: names.MANAGER}
    policy = yaml.safe_load(text)["spec"]
    assert policy["podSelector"]["matchLabels"] == ours == policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    api_cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "--filename", "-", input=text)
