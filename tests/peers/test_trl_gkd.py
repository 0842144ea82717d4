"""TRL's GKD beside ours: the same loss and gradients on the same completions; what it learns of a row."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import forge_data
from forge.settings.convert._distillation import _GKD, _GOLD, _OF_DISTILLATION, _OF_GOLD, _OF_SFT, _SAMPLED
from forge.tasks.items._own_answers import OwnAnswers
from forge_algos import Distill, DistillSettings

from .data_families import FAMILIES

trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

V, END, PAD = 37, 2, 0
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]]
COMPLETIONS = [[20, 21, END], [22, 23, 24, 25, 26, 27], [END]]
"""One ends, one is cut off, one ends at once."""


class Rows(list):
    """Samples as a token store has them, with answers that nobody reads here."""

    conversations = weights = None

    def __init__(self) -> None:
        super().__init__(
            SimpleNamespace(
                input_ids=np.array([*each, 30, 31]), labels=np.array([-100] * len(each) + [30, 31]), weights=None, media=()
            )
            for each in PROMPTS
        )
        self.lengths = np.array([len(each.input_ids) for each in self])
        self.loss_counts = np.full(len(self), 2)

    def source(self, index: int) -> str:
        return f"rows:{index}"


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, initializer_range=0.3, **shape)).eval()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_step_is_that_of_trl(beta: float) -> None:
    """Loss and gradients of `GKDTrainer` with lmbda=1, whose generation gives the completions."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, teacher = model(1), model(2)
    width = max(map(len, PROMPTS))
    prompts = torch.tensor([[PAD] * (width - len(each)) + each for each in PROMPTS])
    longest = max(map(len, COMPLETIONS))
    drawn = torch.tensor([each + [PAD] * (longest - len(each)) for each in COMPLETIONS])
    sampler = SimpleNamespace(generate=lambda **_: SimpleNamespace(sequences=torch.cat((prompts, drawn), 1)))
    given = {"prompts": prompts, "prompt_attention_mask": (prompts != PAD).long()}
    ids, mask, labels = GKDTrainer.generate_on_policy_outputs(sampler, given, GenerationConfig(eos_token_id=END))
    trainer = SimpleNamespace(teacher_model=teacher, beta=beta, generalized_jsd_loss=GKDTrainer.generalized_jsd_loss)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    expected = GKDTrainer.compute_loss(trainer, student, inputs, num_items_in_batch=int((labels != -100).sum()))
    expected.backward()
    wanted = [weight.grad.clone() for weight in student.parameters()]
    student.zero_grad()

    row = OwnAnswers(Rows(), 8).with_completions([0, 1, 2], [np.array(each, np.int32) for each in COMPLETIONS])
    settings = DistillSettings(teacher_path="loaded", on_policy=1.0, beta=beta)
    terms = Distill(settings=settings, teacher=teacher).bind(student, device=torch.device("cpu"))(row, [])
    loss = terms.sum / terms.count
    loss.backward()
    assert terms.count == sum(map(len, COMPLETIONS))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip((weight.grad for weight in student.parameters()), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama-3", "chatml"])
def test_what_is_learned_of_a_row(family: str) -> None:
    """TRL's collator learns the last message alone, `train_on=last` here, and keeps the end of a row of over 1024 tokens."""
    from trl.experimental.utils import DataCollatorForChatML

    tokenizer = FAMILIES[family].tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    turns = [("user", "hello"), ("assistant", "Paris"), ("user", "What is the capital"), ("assistant", "France is")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    theirs = DataCollatorForChatML(tokenizer)([row])
    ours = forge_data.tokenize(row, tokenizer, train_on="last")
    assert theirs["input_ids"][0].tolist()[: len(ours.input_ids)] == ours.input_ids.tolist()
    learned = [token for token in theirs["labels"][0].tolist() if token != -100]
    wanted = [token for token in ours.labels.tolist() if token != -100]
    assert learned[: len(wanted)] == wanted
    assert not tokenizer.decode(learned[len(wanted) :]).strip()  # a line's end behind the token that ends the turn

    row["messages"][2]["content"] *= 500
    whole = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
    assert len(whole) > 1024
    assert DataCollatorForChatML(tokenizer)([row])["input_ids"][0].tolist() == whole[-1024:]


def test_which_trainer_a_file_is_for() -> None:
    """The keys by which `forge config convert` tells TRL's trainers with a teacher, and what it takes for their defaults."""
    from dataclasses import fields

    from trl.experimental.gkd import GKDConfig
    from trl.experimental.gold import GOLDConfig

    gkd, gold, other = (
        {field.name: field.default for field in fields(each)} for each in (GKDConfig, GOLDConfig, trl.DistillationConfig)
    )
    assert set(_OF_SFT) <= gkd.keys() - other.keys()
    assert set(_OF_SFT) - gold.keys() == {"max_new_tokens"}
    assert set(_SAMPLED) <= gold.keys() - gkd.keys()
    assert set(_OF_GOLD) <= gold.keys() - gkd.keys() - other.keys()
    assert set(_OF_DISTILLATION) <= other.keys() - gold.keys() - gkd.keys()
    assert gkd["max_length"] == gold["max_length"] == 1024
    names = {"on_policy": "lmbda", "sample_temperature": "temperature"}
    assert {name: gkd[names.get(name, name)] for name in _GKD} == _GKD
    names |= {"max_new_tokens": "max_completion_length"}
    assert {name: gold[names.get(name, name)] for name in _GOLD} == _GOLD
