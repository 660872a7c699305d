"""An optimizer of many groups."""

from tests.inputs import KL, weight


def test_many_groups_are_checked_once_when_they_are_made(monkeypatch):
    """What takes all groups would take the square of their number, were it done for every one."""
    calls = []
    for name in ("check_names", "check_memory"):
        monkeypatch.setattr(f"prokl.engine.base.{name}", lambda *_, name=name: calls.append(name))
    optimizer = KL([{"params": [(f"w{i}", weight(4, 6))]} for i in range(20)])
    assert calls == ["check_names", "check_memory"]
    optimizer.add_param_group({"params": [("more", weight(4, 6))]})
    assert len(calls) == 4
