"""A reward model, whole or divided → a directory that plain transformers (or plain PEFT) loads, proved by its rewards."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from forge_dist import ExportError, check_export, export_model, load_model

from ...ranks import run_on_ranks
from ..divided import SAMPLES, by_family
from ..rewards import ROWS, exported, padded, rewards, with_lora


def reward_model(path, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return load_model(path, dtype=dtype, device="cpu", task="reward")


def plainly(directory, base=None, pad=1):
    """As whoever was sent the directory would load it."""
    if base is None:
        return AutoModelForSequenceClassification.from_pretrained(directory).eval()
    from peft import PeftModel

    with torch.random.fork_rng():  # the head that the adapter replaces is drawn
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=pad)
    return PeftModel.from_pretrained(model, directory).eval()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_plain_libraries_give_the_same_rewards(save_base, tmp_path, architecture, lora):
    """A plain load gives the rewards of the model in memory, within float32's rounding, for single rows
    and in a padded batch.
    """
    path = save_base(architecture)
    model = reward_model(path)
    model = with_lora(model).train() if lora else model.train()
    where = export_model(model, tmp_path / "out")
    check = check_export(model, where, SAMPLES)
    base = model.get_base_model() if lora else model
    expected, pad = rewards(model.eval()), base.config.pad_token_id
    assert check.loss_tokens == 3
    assert check.in_memory == pytest.approx(sum(expected) / 3, rel=1e-6)
    assert check.difference <= 1e-6  # not to the bit: kernels may differ by where in memory a weight begins
    plain = plainly(where, path if lora else None, pad)
    assert rewards(plain) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    if pad is not None:
        assert padded(plain, pad) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_configuration(base, tmp_path):
    """The directory says one label, the class and the padding token, and has no settings for writing text."""
    where = export_model(reward_model(base), tmp_path / "out")
    config = json.loads((where / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    assert config["pad_token_id"] == 1
    assert not (where / "generation_config.json").exists()


def test_rounded(base, tmp_path):
    """Weights that were rounded to 16 bits pass within the tolerance of such an export."""
    model = reward_model(base)
    check = check_export(model, export_model(model, tmp_path / "out", dtype=torch.bfloat16), SAMPLES)
    assert 0 < check.difference < check.tolerance == 0.1


def test_the_tokenizer_pads_as_the_model_reads(base, edit_config, tmp_path, tokenizer):
    """The tokenizer in the directory has the padding token of the configuration; the one in memory is left alone."""
    edit_config(base, pad_token_id=3, eos_token_id=1)
    where = export_model(reward_model(base), tmp_path / "out", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(where).pad_token_id == 3
    assert tokenizer.pad_token_id == 0


def test_another_head_is_seen(base, tmp_path):
    """The trained head is part of what is proved, in a full model and in an adapter."""
    for name, model in {"full": reward_model(base), "lora": with_lora(reward_model(base))}.items():
        where = export_model(model, tmp_path / name)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "score" in key:
                    parameter.add_(0.25)
        with pytest.raises(ExportError, match=r"tensor .*score.* is not the one in memory"):
            check_export(model, where, SAMPLES)


def test_another_padding_token_is_seen(base, edit_config, tmp_path):
    """A directory whose padding token ends a row reads the reward of that row elsewhere: the proof says so."""
    model = reward_model(base)
    where = export_model(model, tmp_path / "out")
    edit_config(where, pad_token_id=11)  # the last token of the first row
    with pytest.raises(ExportError, match="as the reward of a sample instead of"):
        check_export(model, where, SAMPLES)


def test_padding_that_changes_a_reward_is_seen(base, edit_config, tmp_path, monkeypatch):
    """A padded batch that does not give what single rows do is an error too."""
    from forge_dist.verifying import _loss as _score

    model = reward_model(base)
    where = export_model(model, tmp_path / "out")
    monkeypatch.setattr(_score.torch.nn.utils.rnn, "pad_sequence", wrongly_padded)
    with pytest.raises(ExportError, match="in a padded batch does not compute"):
        check_export(model, where, SAMPLES)


def wrongly_padded(rows, **_how):
    return torch.stack([torch.cat([row, torch.full((11 - len(row),), 30)]) for row in rows])


def test_rows_that_end_with_padding_are_not_compared(base, tmp_path):
    """Such a row has another reward in plain transformers, whatever the weights; where there are no others, that is said."""
    model = reward_model(base)
    where = export_model(model, tmp_path / "out")
    ending = ([5, 6, 1], [5, 6, 1])
    assert check_export(model, where, [*SAMPLES, ending]).loss_tokens == 3
    with pytest.raises(ExportError, match="none of 1 sample ends with another token than the padding one"):
        check_export(model, where, [ending])


@pytest.mark.slow
@by_family
def test_on_two_ranks(save_base, tmp_path, names):
    """After a step under each strategy, full and LoRA: proved on all ranks, loaded plainly with the same rewards, and a
    changed head is seen.
    """
    path = save_base("llama-untied")
    for reported in run_on_ranks(exported, 2, names, path, str(tmp_path)):
        assert len(reported) == 2 * len(names)
        for (name, lora), (check, wrong, training) in reported.items():
            assert check.loss_tokens == 3, (name, lora)
            assert check.difference <= check.tolerance == 1e-5, (name, lora)
            assert "score" in wrong, (name, lora)
            assert training, (name, lora)
    for (name, lora), (check, _, _) in reported.items():
        found = rewards(plainly(tmp_path / f"{name}-{lora}", path if lora else None))
        assert sum(found) / 3 == pytest.approx(check.in_memory, rel=1e-6), (name, lora)
        assert Path(tmp_path, f"{name}-{lora}", "adapter_config.json").exists() == lora


@pytest.mark.lane
@pytest.mark.slow
def test_on_four_ranks(save_base, tmp_path):
    """Where copies of the model are each divided over two ranks."""
    reported = run_on_ranks(exported, 4, ["hsdp"], save_base("llama-tied"), str(tmp_path))
    assert all(found["hsdp", True][0].difference <= 1e-6 for found in reported)
    assert len(ROWS) == reported[0]["hsdp", False][0].loss_tokens
