"""A wrong command line of any bench gets one line with the remedy, before anything is trained."""

import re
from importlib import import_module

import pytest
import torch

from prokl.kernels.launch import INTERPRETED

WRONG = [
    ("pretrain --lr muon -1", "--lr -1: must be a finite number > 0"),
    ("pretrain --lr smok-hop 0.1", "smok-hop does not run; add it to --optimizers"),
    ("study main --model bert", "--model bert is the beginning of no model; there are gpt2-124m, gpt2-350m"),
    ("study main --model gpt2-1 --device cpu", "gpt2-124m trains on FineWeb-10B; give its token shards with --data"),
    ("study main --device cpu", "the paper has other data for each family; give --model gpt2 or llama"),
    ("study main --model llama --device cpu --data text", "no token shards, which llama-134m needs"),
    ("study ablation --model gpt2-350m --device cpu", "paper has no ablation on --model gpt2-350m; .*llama-450m"),
    ("study lengths --jobs 0", "--jobs 0: must be a whole number >= 1"),
    ("study gpt-124m --device cpu", "there is nothing to train on; give token shards with --data"),
    ("study gpt-124m --device cpu --data text", "--data text is no token shards; give .bin or .bin.xz files"),
    ("study gpt-124m --device cpu --data none", "cannot read --data none: No such file or directory"),
    ("study gpt-124m --minutes 0", "--minutes 0: must be a finite number > 0"),
    ("study gpt-124m --minutes nan", "--minutes nan: must be a finite number > 0"),
    ("study gpt-124m --rehearse --micro-batch 0", "--micro-batch 0: must be a whole number >= 1"),
    ("study gpt-124m --rehearse --micro-batch 3", "--micro-batch 3: must divide the 4 sequences of a step"),
    ("study gpt-124m --rehearse --vocabulary 9 --data text", "--vocabulary 9: text has bytes, .* leave it out"),
    ("study gpt-124m --jobs 2", "unrecognized arguments: --jobs 2; see --help"),
    ("tables --steps none.csv", "--steps none.csv has no timed step"),
    ("timing steps --sets bert", "argument --sets: invalid choice: 'bert'.*; see --help"),
    ("timing steps --out .", "--out . is a folder; name a file in it"),
]
if not torch.cuda.is_available():
    WRONG += [
        ("study gpt-124m --data text", "--device cuda: there is no CUDA device here; --rehearse tries the command"),
        ("study main --model gpt2", "--jobs 1: 0 GPUs are visible to torch; give fewer, or --device cpu"),
        ("timing steps --device cuda", "--device cuda: there is no CUDA device here; leave it out"),
    ]
if INTERPRETED:
    WRONG.append(("compile_report aot", "interprets the kernels, which compiles nothing; unset it"))


@pytest.mark.parametrize("line, message", WRONG)
def test_what_is_wrong_is_one_line_with_the_remedy(line, message, tmp_path, monkeypatch, capsys):
    pytest.importorskip("setuptools")  # of compile_report
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("many words of text that come back again and again " * 500)
    name, *arguments = line.split()
    module = import_module(f"bench.{name}" if name in ("pretrain", "tables") else f"bench.{name}.__main__")
    assert module.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and re.search(message, printed.err)


def test_a_value_that_there_is_not_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        import_module("bench.pretrain").main(["--optimizers", "adamw", "sophia"])
    assert "sophia" in capsys.readouterr().err
