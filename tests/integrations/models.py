"""Tiny models and data for the trainers, seeded, and what is asked of an optimizer that has trained one."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 16


class LanguageModel(nn.Module):
    """Tokens to the loss of the next one."""

    def __init__(self, seed, dropout=0.0):
        torch.manual_seed(seed)
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = x + self.dropout(nn.functional.gelu(layer(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def llama(seed, dropout=0.1):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, attention_dropout=dropout))


def tokens(count=32, length=8):
    """Return rows of tokens that count upwards, from starts of their own."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(0))
    return (starts + torch.arange(length)) % VOCABULARY


class Labelled(Dataset):
    """Rows of tokens as transformers takes them."""

    def __init__(self):
        self.tokens = tokens()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def loader(dataset=None, shuffle=False):
    return DataLoader(tokens() if dataset is None else dataset, batch_size=4, shuffle=shuffle)


def assert_trained_by_prokl(optimizer):
    """Every trained matrix has the matrix method's state, every other trained weight AdamW's, frozen weights none."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.requires_grad:
                assert p not in optimizer.state
                continue
            assert optimizer.state[p].keys() & ({"M_Q", "M_Q.0"} if group["algorithm"] == "matrix" else {"exp_avg"})
    assert {group["algorithm"] for group in optimizer.param_groups} <= {"matrix", "adamw"}
    assert any("M_Q" in state for state in optimizer.state.values())


def assert_schedule_scales_every_group_alike(optimizer, factor):
    for group in optimizer.param_groups:
        torch.testing.assert_close(group["lr"], factor * group["initial_lr"], rtol=1e-6, atol=1e-9)


def assert_same_weights(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
