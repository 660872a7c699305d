"""Where the weights of real architectures go, and why: the lines of tests/data/architectures.csv, each read by eye."""

import pytest

for package in ("transformers", "peft", "diffusers"):
    pytest.importorskip(package)

from tests.integrations.architectures import ARCHITECTURES, TIMM, build_timm, lines, recorded  # noqa: E402

RECORDED = recorded()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_weights_of_an_architecture_go_where_the_table_says(name):
    assert lines(name, ARCHITECTURES[name]()) == RECORDED[name]


@pytest.mark.parametrize("name", TIMM)
def test_the_weights_of_an_architecture_of_timm_go_where_the_table_says(name, timm):
    assert lines(name, build_timm(timm, name)) == RECORDED[name]


def test_the_table_holds_these_architectures_and_no_others():
    assert list(RECORDED) == [*ARCHITECTURES, *TIMM]
