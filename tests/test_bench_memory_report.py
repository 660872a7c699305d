"""The documents' tables of memory: float32 on the paper's models, in 10^6 bytes."""

from bench import records
from bench.steps import memory_report


def row(set_, contender, median, **values):
    given = {"metric": "state", "unit": "bytes", "dtype": "float32"} | values
    return dict.fromkeys(records.COLUMNS, "") | {"set": set_, "contender": contender, "median": median} | given


ROWS = [
    row("gpt2-124m", "muon", "339738624"),
    row("gpt2-124m", "muon", "84934656", unit="elements"),
    row("gpt2-124m", "pro-klshampoo", "694454400", rank="32"),
    row("gpt2-124m", "pro-klshampoo", "347227632", rank="32", dtype="bfloat16"),
    row("gpt2-124m/4", "muon", "1000000"),
    row("llama-134m", "pro-klshampoo", "2500001", rank="32", metric="workspace"),
]


def lines(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_state_in_megabytes_by_method_and_rank():
    assert lines(memory_report.state(ROWS)) == [
        ["Muon", "340", "-", "-", "-"],
        ["Pro-KLShampoo, r = 32", "694", "-", "-", "-"],
    ]


def test_workspace_has_its_own_table():
    assert lines(memory_report.workspace(ROWS)) == [["Pro-KLShampoo, r = 32", "-", "-", "3", "-"]]
