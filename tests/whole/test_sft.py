"""`forge.sft` end to end: the run directory, the exported model, Python and shell, every kind of row."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

import forge
import forge_accel
import forge_dist
from forge.cli._app import main

from .conftest import CHATML, conversations, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

FEW: dict[str, Any] = {"max_steps": 4, "effective_batch_size": 8, "max_tokens_per_gpu": 256, "learning_rate": 1e-2}


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def learned(run: Path) -> list[tuple[float, float, float]]:
    return [(line["loss"], line["grad_norm"], line["lr"]) for line in metrics(run) if "loss" in line]


@pytest.mark.slow
def test_a_run_leaves_what_the_design_names(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """It holds config.yaml, metrics.jsonl, log.txt, data/, plan/, one export and the result only."""
    result = forge.sft(
        model_path=model_dir, data_path=chats, ckpt_output_dir=tmp_path / "run", validation_split=0.2, eval_every_steps=2, **FEW
    )
    run = tmp_path / "run"
    assert sorted(entry.name for entry in run.iterdir()) == [
        "config.yaml",
        "data",
        "events.jsonl",
        "hf_format",
        "inputs.json",
        "log.txt",
        "metrics.jsonl",
        "plan",
        "report.html",
        "result.json",
        "run.json",
    ]
    lines = metrics(run)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 2, 4]
    assert {"epoch", "samples", "lr", "grad_norm", "tokens", "loss_tokens", "tokens_per_second", "memory"} <= set(lines[1])
    assert result.model_dir == run / "hf_format" / f"samples_{result.samples}"
    assert result.eval_loss_after is not None
    assert result.eval_loss_before is not None
    assert result.eval_loss_after < result.eval_loss_before
    assert "finished" in (run / "log.txt").read_text().splitlines()[-1]
    assert "read 24 rows, kept 24" in (run / "log.txt").read_text()


@pytest.mark.slow
def test_the_export_asks_as_it_was_trained(
    model_dir: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exported tokenizer has the run's template, with the run's arguments as its defaults; a recipe repeats both."""
    from transformers import AutoTokenizer

    template = tmp_path / "own.jinja"
    template.write_text("{{ mood or 'plain' }}: " + CHATML)
    words = ["--model-path", model_dir, "--data-path", chats, "--ckpt-output-dir", tmp_path / "run", "--max-steps", 1]
    words += ["--effective-batch-size", 4, "--chat-template", template, "--chat-template-kwargs", "mood=glad"]
    assert main(["sft", *map(str, words)]) == 0
    exported = AutoTokenizer.from_pretrained(capsys.readouterr().out.splitlines()[-1])
    question: list[dict[str, str]] = [{"role": "user", "content": "Hi"}]
    asked = exported.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert asked == "glad: <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    own = exported.apply_chat_template(question, tokenize=False, mood="sad")
    assert own.startswith("sad: ")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["chat_template"], config["chat_template_kwargs"]) == (str(template), {"mood": "glad"})
    again = forge.data.TokenStore.open(tmp_path / "run" / "data" / "train")
    assert again.tokenizer().chat_template == exported.chat_template


@pytest.mark.slow
def test_the_export_is_plain(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Plain transformers loads the export, with the base's keys and dtypes, its tokenizer and chat template."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = forge.sft(model_path=model_dir, data_path=chats, ckpt_output_dir=tmp_path / "run", **FEW)
    before, after = (load_file(folder / "model.safetensors") for folder in (model_dir, result.model_dir))
    assert {key: value.dtype for key, value in before.items()} == {key: value.dtype for key, value in after.items()}
    assert any(not torch.equal(before[key], after[key]) for key in before)
    AutoModelForCausalLM.from_pretrained(result.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(result.model_dir)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(model_dir).chat_template


@pytest.mark.slow
def test_lora_gives_a_plain_peft_directory(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """adapter="lora" trains adapters alone; plain PEFT loads them onto an untouched base, and `forge.generate` answers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base_before = (model_dir / "model.safetensors").read_bytes()
    result = forge.sft(model_path=model_dir, data_path=chats, ckpt_output_dir=tmp_path / "run", adapter="lora", lora_r=4, **FEW)
    assert (result.model_dir / "adapter_model.safetensors").exists()
    assert not (result.model_dir / "model.safetensors").exists()
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), result.model_dir)
    assert (model_dir / "model.safetensors").read_bytes() == base_before
    assert isinstance(forge.generate(result.model_dir, "what colour has the fig?", max_new_tokens=4), str)
    losses = [loss for loss, _, _ in learned(tmp_path / "run")]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_python_shell_and_recipe_are_one_run(
    model_dir: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python, the command line and a run's own config.yaml give the same losses to the last bit."""
    forge.sft(
        model_path=model_dir,
        data_path=chats,
        ckpt_output_dir=tmp_path / "python",
        lora_r=4,
        adapter="lora",
        lora_dropout=0.1,
        **FEW,
    )
    words = ["sft", "--model-path", str(model_dir), "--data-path", str(chats), "--ckpt-output-dir", str(tmp_path / "shell")]
    words += ["--adapter", "lora", "--lora-r", "4", "--lora-dropout", "0.1", "--max-steps", "4", "--effective-batch-size", "8"]
    words += ["--max-tokens-per-gpu", "256", "--learning-rate", "1e-2"]
    assert main(words) == 0
    assert capsys.readouterr().out.strip().endswith("samples_32")
    assert main(["sft", str(tmp_path / "python" / "config.yaml"), "--ckpt-output-dir", str(tmp_path / "again")]) == 0
    runs = [learned(tmp_path / name) for name in ("python", "shell", "again")]
    assert len(runs[0]) == 4
    assert runs[0] == runs[1] == runs[2]
    exports = {
        (tmp_path / name / "hf_format/samples_32/adapter_model.safetensors").read_bytes()
        for name in ("python", "shell", "again")
    }
    assert len(exports) == 1


@pytest.mark.slow
def test_config_says_where_every_value_came_from(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """config.yaml holds every setting with its origin: default, recipe, flag, or chosen with the reason."""
    (tmp_path / "recipe.yaml").write_text("effective_batch_size: 8\nlearning_rate: 1e-2\nmax_steps: 3\n")
    words = ["sft", str(tmp_path / "recipe.yaml"), "--model-path", str(model_dir), "--data-path", str(chats)]
    assert main([*words, "--ckpt-output-dir", str(tmp_path / "run"), "--max-steps", "2"]) == 0
    text = (tmp_path / "run" / "config.yaml").read_text()
    config = yaml.safe_load(text)
    assert (config["max_steps"], config["effective_batch_size"], config["learning_rate"]) == (2, 8, 0.01)
    line = {row.split(":")[0]: row for row in text.splitlines()}
    assert line["max_steps"].endswith("# flag")
    assert "# recipe" in line["learning_rate"]
    assert line["beta1"].endswith("# default")
    assert "# chosen: " in line["dtype"]
    assert "# chosen: " in line["attention"]
    from forge.settings._settings import flat_fields
    from forge.verbs._sft import SFTSettings

    assert set(config) == {field.name for _, field in flat_fields(SFTSettings)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prompt", "prompt messages", "tokens", "parquet"])
def test_every_kind_of_row_trains(kind: str, model_dir: Path, tmp_path: Path) -> None:
    """Prompt/completion (strings, messages), tokens and Parquet train as messages in JSONL do."""
    rows: list[dict[str, Any]] = conversations()
    if kind == "prompt":
        rows = [{"prompt": row["messages"][0]["content"], "completion": row["messages"][1]["content"]} for row in rows]
    elif kind == "prompt messages":
        rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:2]} for row in rows]
    elif kind == "tokens":
        rows = [{"input_ids": [5, 6, 7 + i % 40, 9], "labels": [-100, -100, 7 + i % 40, 9], "len": 4} for i in range(24)]
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    result = forge.sft(model_path=model_dir, data_path=path, ckpt_output_dir=tmp_path / "run", **FEW)
    losses = [loss for loss, _, _ in learned(tmp_path / "run")]
    assert losses[-1] < losses[0]
    assert result.samples == 32


@pytest.mark.slow
def test_save_samples_and_epochs_make_exports(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """save_samples exports each time that many more samples were seen, divisible by the batch or not; epochs too."""
    common = {
        "model_path": model_dir,
        "data_path": chats,
        "effective_batch_size": 7,
        "num_epochs": 2,
        "max_tokens_per_gpu": 256,
    }
    forge.sft(ckpt_output_dir=tmp_path / "samples", save_samples=20, **common)
    assert names(tmp_path / "samples") == ["samples_21", "samples_45", "samples_48"]
    forge.sft(ckpt_output_dir=tmp_path / "epochs", checkpoint_at_epoch=True, **common)
    assert names(tmp_path / "epochs") == ["samples_24", "samples_48"]


@pytest.mark.slow
def test_a_share_of_the_run_makes_exports_and_states(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Of five steps 0.4 are two, and 0.3 are two as well, rounded up as in transformers; a dry run counts the exports."""
    given = {"model_path": model_dir, "data_path": chats, "effective_batch_size": 4, "max_steps": 5, "max_tokens_per_gpu": 256}
    given |= {"save_samples": 0.4, "full_state_every_steps": 0.3, "keep_full_state": True, "keep_last_n": 9}
    given |= {"accelerate_full_state_at_epoch": False, "ckpt_output_dir": tmp_path / "run"}
    assert "exports: 3" in str(forge.dry_run(forge.sft, **given))
    forge.sft(**given)
    assert names(tmp_path / "run") == ["samples_16", "samples_20", "samples_8"]
    assert sorted(each.name for each in (tmp_path / "run" / "full_state").glob("step_*")) == ["step_2", "step_4", "step_5"]
    with pytest.raises(forge.SettingsError, match=r"num_epochs=inf has no end, and save_samples=0\.4 is a share"):
        forge.sft(**{**given, "max_steps": None, "num_epochs": "inf", "lr_scheduler": "constant"})


def names(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "hf_format").glob("*/"))


@pytest.mark.slow
def test_held_out_loss_does_not_depend_on_the_budget(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """The held-out loss before training is the same number whatever micro-batches it was measured in."""
    losses = []
    for budget in (64, 512):
        options = {**FEW, "max_tokens_per_gpu": budget, "max_steps": 1}
        result = forge.sft(
            model_path=model_dir, data_path=chats, ckpt_output_dir=tmp_path / str(budget), validation_split=0.25, **options
        )
        losses.append(result.eval_loss_before)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
def test_generate_takes_a_run_directory(
    model_dir: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`forge generate` answers from a run's last export, and greedily twice the same."""
    forge.sft(model_path=model_dir, data_path=chats, ckpt_output_dir=tmp_path / "run", **FEW)
    said = []
    for _ in range(2):
        assert main(["generate", str(tmp_path / "run"), "what colour has the fig?", "--max-new-tokens", "8"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].strip()


@pytest.mark.slow
def test_a_run_in_bfloat16_reports_the_exported_model(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """A bfloat16 model is exported in bfloat16: the reported loss is the export's, and a lost gain is logged."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = tmp_path / "bf16"
    AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(base)
    options = {**FEW, "learning_rate": 1e-6, "lr_scheduler": "constant", "validation_split": 0.25}
    result = forge.sft(model_path=base, data_path=chats, ckpt_output_dir=tmp_path / "run", **options)
    _, held_out = forge.data.TokenStore.open(tmp_path / "run" / "data" / "train").split(0.25, seed=42)
    model = AutoModelForCausalLM.from_pretrained(result.model_dir, dtype=torch.float32)
    assert AutoModelForCausalLM.from_pretrained(result.model_dir).dtype == torch.bfloat16
    total = count = 0.0
    for example in held_out:
        ids, labels = (torch.from_numpy(np.array(array, dtype=np.int64))[None] for array in (example.input_ids, example.labels))
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum"))
        count += int((labels[0, 1:] != -100).sum())
    assert result.eval_loss_after == pytest.approx(total / count, rel=1e-6)
    lines = metrics(tmp_path / "run")
    assert [line["exported_eval_loss"] for line in lines if "exported_eval_loss" in line] == [result.eval_loss_after]
    assert "of the held-out gain was lost" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_an_override_chooses_anew_what_was_chosen(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """A config.yaml as recipe keeps given settings; defaults and choices, such as LoRA's rate, are left open."""
    options = {name: value for name, value in FEW.items() if name != "learning_rate"}
    forge.sft(model_path=model_dir, data_path=chats, ckpt_output_dir=tmp_path / "lora", adapter="lora", **options)
    forge.sft(tmp_path / "lora" / "config.yaml", ckpt_output_dir=tmp_path / "full", adapter="none")
    first, second = (yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in ("lora", "full"))
    assert (first["learning_rate"], second["learning_rate"]) == (2e-4, 2e-5)
    assert second["max_steps"] == first["max_steps"] == 4
    assert "beta1: 0.9  # default" in (tmp_path / "full" / "config.yaml").read_text()


def test_samples_beyond_the_models_positions_are_warned_of(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Training on more tokens than the model has positions for continues with a warning that counts them."""
    import shutil

    short = tmp_path / "short"
    shutil.copytree(model_dir, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 50}))
    forge.sft(model_path=short, data_path=chats, ckpt_output_dir=tmp_path / "run", **FEW)
    warned = r"than the 50 positions .* the longest of them .*\.jsonl:\d+ with \d+ tokens; max_seq_len=50"
    assert re.search(warned, (tmp_path / "run" / "log.txt").read_text())


@pytest.mark.slow
def test_attention_falls_back_to_eager(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Llama 4's chunks are expressed by a mask alone: auto takes eager and logs why; attention=documents is refused."""
    import torch
    from transformers import AutoTokenizer, Llama4ForCausalLM, Llama4TextConfig

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Llama4ForCausalLM(config).save_pretrained(tmp_path / "llama4")
    tokenizer.save_pretrained(tmp_path / "llama4")
    common = {"model_path": tmp_path / "llama4", "data_path": chats, **FEW}
    result = forge.sft(ckpt_output_dir=tmp_path / "auto", **common)
    written = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())
    assert written["attention"] == "eager"
    assert "does not fit this model" in (tmp_path / "auto" / "log.txt").read_text()
    assert isinstance(forge.generate(result.model_dir, "what colour has the fig?", max_new_tokens=4), str)
    with pytest.raises(forge.dist.ModelError, match="eager"):
        forge.sft(ckpt_output_dir=tmp_path / "documents", attention="documents", **common)
    assert not (tmp_path / "documents").exists()


@pytest.mark.slow
def test_a_run_from_relative_paths_works_from_anywhere(
    model_dir: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained with relative paths, an adapter answers and config.yaml repeats the run from another directory."""
    monkeypatch.chdir(model_dir.parent)
    forge.sft(model_path=model_dir.name, data_path=chats, ckpt_output_dir=tmp_path / "run", adapter="lora", lora_r=4, **FEW)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert isinstance(forge.generate("../run", "what colour has the fig?", max_new_tokens=4), str)
    forge.sft("../run/config.yaml", ckpt_output_dir="again")
    assert learned(tmp_path / "run") == learned(Path("again"))


@pytest.mark.slow
def test_no_garbage_is_looked_for_while_libraries_are_imported(
    model_dir: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a new process imports torch, DTensor and the model's class, no collection begins; in steps they do."""
    found: dict[str, bool] = {}

    def noted(name: str, called: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (found.setdefault(name, gc.isenabled()), called(*args, **kwargs))[1]

    for owner, name in ((forge_accel, "accelerator"), (forge_dist, "make_strategy"), (forge_dist, "check_model")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    monkeypatch.setattr("torch.optim.AdamW.step", noted("step", torch.optim.AdamW.step))
    forge.sft(model_path=model_dir, data_path=chats, ckpt_output_dir=tmp_path / "run", **FEW)
    assert found == {"accelerator": False, "make_strategy": False, "check_model": False, "step": True}
