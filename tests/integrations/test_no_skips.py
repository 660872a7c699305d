"""``--no-skips``, with which CI runs these tests: what lacks its package has failed."""

from types import SimpleNamespace

import pytest

from tests.integrations.conftest import without_skips


def report(skipped, **more):
    return SimpleNamespace(
        skipped=skipped, outcome="skipped" if skipped else "passed", longrepr="could not import 'peft'", **more
    )


@pytest.mark.parametrize("told", [False, True])
def test_a_skip_is_a_failure_where_none_is_allowed(told):
    config = SimpleNamespace(getoption=lambda name, default: told if name == "--no-skips" else default)
    judged = without_skips(config, report(skipped=True))
    assert judged.outcome == ("failed" if told else "skipped") and "peft" in judged.longrepr
    assert without_skips(config, report(skipped=False)).outcome == "passed"
    assert without_skips(config, report(skipped=True, wasxfail="a reason")).outcome == "skipped"
