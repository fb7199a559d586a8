"""No test builds a program or an image: a missing one fails the fixture that needs it, by name."""

import pytest

pytest_plugins = ("pytester",)

CODE = """
import pytest
from harness.programs.cache import cached

@pytest.fixture(scope='session')
def simulated_nodes(tmp_path_factory):
    cached(tmp_path_factory.mktemp('cache') / 'kwok-0123456789ab', lambda folder: folder.mkdir())

def test_pods_run(simulated_nodes): pass
def test_pods_end(simulated_nodes): pass
"""


def test_a_missing_tool_fails_the_test_with_the_name_of_its_fixture(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(CODE)
    result = pytester.runpytest_inprocess(
        "-p", "tests.built_tools", "-p", "no:hypothesispytest", "-W", "ignore"
    )
    result.assert_outcomes(errors=2)
    lines = [
        "*ClusterError: kwok is not built: run `make tools`",
        "*in the fixture `simulated_nodes`",
    ]
    result.stdout.fnmatch_lines(lines * 2)
