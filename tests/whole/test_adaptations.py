"""Every adaptation with sft and dpo, in one process and on two ranks: it learns, and its export loads."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import forge
import forge_algos
import forge_data
from forge.reports.osft._inspect import inspect
from forge.run._adaptation import check_projections
from forge_algos.settings._adapter import Adapter

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .conftest import write_rows
from .starts import metrics
from .verbs import run_verb, settings_of

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the extra bitsandbytes is not installed"
)

# For each: what is given beside it, with a rate at which a dozen steps of a tiny model show.
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"lora_r": 4, "learning_rate": 2e-2},
    "qlora": {"lora_r": 4, "learning_rate": 2e-2},
    "qlora int8": {"quant_type": "int8", "lora_r": 4, "learning_rate": 2e-2},
    "dora": {"lora_r": 4, "learning_rate": 2e-2},
    "rslora": {"lora_r": 4, "learning_rate": 1e-2},
    "ia3": {"learning_rate": 1e-1},
    "prefix": {"num_virtual_tokens": 4, "learning_rate": 1e-1},
    "prompt": {"num_virtual_tokens": 4, "learning_rate": 1e-1},
    "adapter_prompt": {"num_virtual_tokens": 4, "learning_rate": 1e-1},
    "oft": {"oft_block_size": 4, "learning_rate": 2e-2},
    "qoft": {"oft_block_size": 4, "learning_rate": 2e-2},
    "hra": {"lora_r": 4, "learning_rate": 2e-2},
    "loha": {"lora_r": 4, "learning_rate": 2e-2},
    "lokr": {"lora_r": 4, "learning_rate": 2e-2},
    "miss": {"lora_r": 4, "learning_rate": 1e-2},
    "vera": {"vera_rank": 8, "learning_rate": 1e-1},
    "randlora": {"lora_r": 4, "learning_rate": 2e-2},
    "fourierft": {"fourier_n_frequency": 20, "learning_rate": 1e-1},
    "c3a": {"c3a_block_size": 8, "learning_rate": 5e-1},
    "osft": {"unfreeze_rank_ratio": 0.5, "learning_rate": 1e-2},
    "osft factors": {"osft_form": "factors", "unfreeze_rank_ratio": 0.5, "learning_rate": 1e-2},
    "osft paper": {"osft_rule": "paper", "unfreeze_rank_ratio": 0.5, "learning_rate": 5e-3},
}
CASES = [
    pytest.param(verb, name, marks=needs_bitsandbytes if name.startswith("q") else ())
    for verb in ("sft", "dpo")
    for name in ADAPTERS
]
# In one process each, and with pairs in front of the tokens and in the weights' place; beside the weights is in test_verbs.py.
# Of PEFT's tuners that differ by their layers or their scale alone, one; they are compared with plain PEFT in forge-algos.
ALIKE = ("rslora", "hra", "loha", "lokr", "miss", "randlora", "fourierft", "c3a")
ALONE = [*(("sft", name) for name in ADAPTERS if name not in ALIKE), *(("dpo", name) for name in ("prefix", "osft"))]
# Of two ranks: forms of weights that are divided (no module of the model, projected). LoRA is below, and quantised weights are
# in forge-dist/loading/test_quantization.py.
DIVIDED = [("sft", name) for name in ("prefix", "osft")]
TUNERS = ("oft", *ALIKE, "vera", pytest.param("qoft", marks=needs_bitsandbytes))


def test_every_adaptation_is_tried() -> None:
    """One that is added must be added here."""
    assert {name.split()[0] for name in ADAPTERS} | {"none"} == set(Adapter.__args__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of rows."""
    return tmp_path_factory.mktemp("adaptations")


def given(verb: str, name: str, model_dir: Path, folder: Path) -> dict[str, Any]:
    """Settings of a run of a dozen steps."""
    more = {"max_steps": 12, "effective_batch_size": 6, "adapter": name.split()[0], **ADAPTERS[name]}
    return {**settings_of(verb, model_dir, folder), **more}


def learned(run: Path, result: dict[str, Any]) -> None:
    """Assert that held-out rows are predicted better at the end, and that what was exported loads without forge."""
    held_out = [line["eval_loss"] for line in metrics(run) if "eval_loss" in line]
    assert held_out[-1] < held_out[0] - 0.01
    exported = Path(result["model_dir"])
    if (exported / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM

        model: Any = AutoPeftModelForCausalLM.from_pretrained(exported)
    else:
        model = AutoModelForCausalLM.from_pretrained(exported)
    with warnings.catch_warnings():
        # Plain PEFT 0.21, as of transformers 5.24.
        warnings.filterwarnings("ignore", message=".past_key_values. is deprecated")
        assert model(torch.arange(5)[None]).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "name"), ci_keeps(ALONE, CASES))
def test_in_one_process(verb: str, name: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """It learns, and plain PEFT or plain transformers loads the result."""
    learned(tmp_path, run_verb(verb, {**given(verb, name, model_dir, folder), "ckpt_output_dir": str(tmp_path)}))


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "name"), [("ppo", "prefix"), ("ppo", "prompt"), ("reward", "prefix")])
def test_virtual_tokens_beside_a_head(
    verb: str, name: str, model_dir: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value head is left out of what is exported, and each answer of a pair comes with a prompt of its own."""
    settings = {
        **settings_of(verb, model_dir, folder),
        "adapter": name,
        "num_virtual_tokens": 4,
        "ckpt_output_dir": str(tmp_path),
    }
    # Where the reward functions lie.
    monkeypatch.syspath_prepend(folder)
    exported = Path(run_verb(verb, settings)["model_dir"])
    assert not any("value_head" in tensor for tensor in load_file(exported / "adapter_model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ci_keeps(["sft"], ["sft", "dpo"]))
def test_virtual_tokens_are_planned_with_their_padding(verb: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """No forward holds more places than max_tokens_per_gpu, and the losses are those of any other cut."""
    settings = {**given(verb, "prefix", model_dir, folder), "max_steps": 3, "effective_batch_size": 8}
    found = {}
    for tokens in (160, 4096):
        run = tmp_path / str(tokens)
        run_verb(verb, {**settings, "max_tokens_per_gpu": tokens, "ckpt_output_dir": str(run)})
        plan = forge.packing.BatchPlan.load(run / "plan" / "plan.npz")
        rows = [row for step in range(3) for row in plan.micro_batches(step)]
        assert max(plan.places(row) for row in rows) <= tokens
        assert plan.widths is not None
        assert (plan.widths >= 4 + plan.lengths // (1 if verb == "sft" else 2)).all()
        found[tokens] = len(rows), [line["loss"] for line in metrics(run) if "loss" in line]
    assert found[160][0] > found[4096][0] == 3
    assert found[160][1] == pytest.approx(found[4096][1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "name"), ci_keeps(DIVIDED, CASES))
def test_on_two_ranks(verb: str, name: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """The same where every weight of the model is divided."""
    settings = {**given(verb, name, model_dir, folder), "strategy": "fsdp2", "ckpt_output_dir": str(tmp_path)}
    learned(tmp_path, run_on_ranks(run_verb, 2, verb, settings, joined=False)[0])


@pytest.mark.slow
@pytest.mark.lane
@pytest.mark.parametrize("name", TUNERS)
def test_the_same_resumed_and_on_two_ranks(name: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Stopped and resumed the same bits, on two ranks the same losses, and `forge export --merge` what was trained.

    vera's random matrices are drawn anew by every rank and by a resumed run.
    """
    settings = {**given("sft", name, model_dir, folder), "lr_scheduler": "constant", "full_state_every_steps": 2}

    def losses(run: str) -> list[float]:
        return [line["loss"] for line in metrics(tmp_path / run) if "loss" in line]

    run_verb("sft", {**settings, "max_steps": 4, "ckpt_output_dir": str(tmp_path / "whole")})
    for steps in (2, 4):
        result = run_verb("sft", {**settings, "max_steps": steps, "ckpt_output_dir": str(tmp_path / "resumed")})
    one, other = losses("whole"), losses("resumed")
    assert one == other
    ranks = {**settings, "max_steps": 4, "strategy": "fsdp2", "ckpt_output_dir": str(tmp_path / "ranks")}
    run_on_ranks(run_verb, 2, "sft", ranks, joined=False)
    assert losses("ranks") == pytest.approx(one, rel=1e-6)
    forge.export(tmp_path / "resumed", tmp_path / "merged", merge=True, dtype="float32")
    if name == "qoft":
        return  # merged into what the codes stand for, which the export compares
    from peft import AutoPeftModelForCausalLM

    beside: Any = AutoPeftModelForCausalLM.from_pretrained(result["model_dir"])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        found, wanted = (model(torch.arange(5)[None]).logits for model in (merged, beside))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.slow
@pytest.mark.parametrize("name", ci_keeps(["osft"], ["osft", "osft factors", "osft paper"]))
def test_what_osft_protects_stays(name: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Resumed on two ranks after half of the steps, with decay and clipping: protected directions stay.

    Everything but the targets is the base to the bit."""
    settings = {
        **given("sft", name, model_dir, folder),
        "max_steps": 40,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler": "constant",
        "full_state_every_steps": 20,
        "ckpt_output_dir": str(tmp_path),
    }
    run_verb("sft", {**settings, "max_steps": 20})
    result = run_on_ranks(run_verb, 2, "sft", {**settings, "strategy": "fsdp2"}, joined=False)[0]
    before, after = load_file(model_dir / "model.safetensors"), load_file(Path(result["model_dir"]) / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in before.items()} == {name: (t.shape, t.dtype) for name, t in after.items()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    linears = {name for name in before if name.endswith("_proj.weight")}
    assert moved == linears
    for name in moved:
        change = (after[name] - before[name]).double()
        u, _, vh = torch.linalg.svd(before[name].double(), full_matrices=False)
        kept = min(change.shape) - round(0.5 * min(change.shape))
        inward, outward = u[:, :kept].T @ change, change @ vh[:kept].T
        leaks = [u[:, :kept].T @ outward] if settings.get("osft_rule") == "paper" else [inward, outward]
        assert all(leak.norm() <= 1e-5 * change.norm() for leak in leaks), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ci_keeps(["fsdp2"], ["ddp", "fsdp2", "zero1", "zero3"]))
def test_named_weights_alone_move(strategy: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Resumed on two ranks after half of the steps: the losses of one process, and all other weights to the bit."""
    settings = {
        **settings_of("sft", model_dir, folder),
        "unfrozen_parameters": ("model.layers.1", ".*.q_proj", "model.norm"),
        "effective_batch_size": 6,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_scheduler": "constant",
        "full_state_every_steps": 3,
    }
    run_verb("sft", {**settings, "max_steps": 6, "ckpt_output_dir": str(tmp_path / "whole")})
    parts = {**settings, "ckpt_output_dir": str(tmp_path / "parts")}
    run_on_ranks(run_verb, 2, "sft", {**parts, "max_steps": 3, "strategy": strategy}, joined=False)
    result = run_verb("sft", {**parts, "max_steps": 6})
    losses = [[line["loss"] for line in metrics(tmp_path / run) if "loss" in line] for run in ("whole", "parts")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    before, after = load_file(model_dir / "model.safetensors"), load_file(Path(result["model_dir"]) / "model.safetensors")
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.startswith("model.layers.1.") or ".q_proj." in name or name == "model.norm.weight"
    }
    assert "trains " in (tmp_path / "whole/log.txt").read_text()


@pytest.mark.lane
@pytest.mark.slow
def test_what_is_frozen_stays_where_ranks_measured_before(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """The forwards of osft_rank=adaptive leave divided weights divided and frozen: only targets move."""
    settings = {**given("sft", "osft", model_dir, folder), "max_steps": 3, "osft_rank": "adaptive", "strategy": "fsdp2"}
    result = run_on_ranks(run_verb, 2, "sft", {**settings, "ckpt_output_dir": str(tmp_path)}, joined=False)[0]
    before, after = load_file(model_dir / "model.safetensors"), load_file(Path(result["model_dir"]) / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert moved <= {name for name in before if name.endswith("_proj.weight")}


@pytest.mark.slow
def test_lost_singular_vectors_are_named(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Missing singular vectors that come out otherwise when computed anew are refused, and none is kept."""
    settings = {**given("sft", "osft", model_dir, folder), "lr_scheduler": "constant", "ckpt_output_dir": str(tmp_path)}
    run_verb("sft", {**settings, "max_steps": 2})
    plan = json.loads((tmp_path / "osft" / "plan.json").read_text())
    for file in (tmp_path / "osft").glob("*.safetensors"):
        file.unlink()
    changed = {name: {**target, "bases": "0" * 64} for name, target in plan.items()}
    (tmp_path / "osft" / "plan.json").write_text(json.dumps(changed))
    with pytest.raises(forge.SettingsError, match="singular vectors of .*osft_cache"):
        run_verb("sft", settings)
    assert not list((tmp_path / "osft").glob("*.safetensors"))
    for spoiled in ("[]", "{}", '{"a": 1}', ""):
        (tmp_path / "osft" / "plan.json").write_text(spoiled)
        with pytest.raises(forge.SettingsError, match="plan.json: what the run protects cannot be read"):
            run_verb("sft", settings)
    (tmp_path / "osft" / "plan.json").write_text(json.dumps(plan))
    assert run_verb("sft", settings)["steps"] == 12


@pytest.mark.slow
def test_a_chain_of_tasks_needs_the_directory_alone(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """A second task starts from the run directory of the first, even without the first one's osft/."""
    import shutil

    first = forge.osft(**_without_adapter(given("sft", "osft", model_dir, folder)), ckpt_output_dir=tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "osft")
    settings = {**_without_adapter(given("sft", "osft", model_dir, folder)), "model_path": str(tmp_path / "one")}
    second = forge.osft(**settings, ckpt_output_dir=tmp_path / "two")
    assert first.eval_after is not None
    assert second.eval_before is not None
    assert second.eval_before["eval_loss"] == pytest.approx(first.eval_after["eval_loss"], rel=1e-5)


def _without_adapter(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "adapter"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ci_keeps(["osft"], ["osft", "osft paper"]))
def test_a_resume_is_invisible_to_osft(name: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Resumed after half of the steps, it ends with the bits of an uninterrupted run."""
    settings = {**given("sft", name, model_dir, folder), "lr_scheduler": "constant", "max_steps": 6}
    whole = run_verb("sft", {**settings, "ckpt_output_dir": str(tmp_path / "whole")})
    halves = {**settings, "full_state_every_steps": 3, "ckpt_output_dir": str(tmp_path / "halves")}
    run_verb("sft", {**halves, "max_steps": 3})
    again = run_verb("sft", halves)
    one, other = (Path(result["model_dir"]) / "model.safetensors" for result in (whole, again))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_inputs_of_earlier_rows_are_protected(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """A run that protects inputs resumes to the bit, keeps the earlier rows' losses, and is inspected by its own directions.

    Without rows it is refused before a row is read.
    """
    earlier = [{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]}]
    settings = {
        **given("sft", "osft", model_dir, folder),
        "unfreeze_rank_ratio": 0.5,
        "osft_directions": "inputs",
        "lr_scheduler": "constant",
        "max_steps": 6,
        "full_state_every_steps": 3,
    }
    with pytest.raises(forge.SettingsError, match="osft_directions=inputs .* there are none: set osft_calibration_path"):
        run_verb("sft", {**settings, "ckpt_output_dir": str(tmp_path / "none")})
    assert not (tmp_path / "none").exists()
    settings["osft_calibration_path"] = str(write_rows(tmp_path / "earlier.jsonl", earlier))
    del settings["osft_directions"]  # with such rows it is the default
    with pytest.raises(forge.SettingsError, match="cp_size=2 .* with osft_calibration_path=.*earlier.jsonl it cannot"):
        run_verb("sft", {**settings, "cp_size": 2, "strategy": "fsdp2", "ckpt_output_dir": str(tmp_path / "none")})
    whole = run_verb("sft", {**settings, "ckpt_output_dir": str(tmp_path / "whole")})
    halves = {**settings, "ckpt_output_dir": str(tmp_path / "halves")}
    run_verb("sft", {**halves, "max_steps": 3})
    again = run_verb("sft", {**halves, "osft_directions": "inputs"})  # as it is already
    one, other = (Path(result["model_dir"]) / "model.safetensors" for result in (whole, again))
    assert one.read_bytes() == other.read_bytes()
    assert "osft_calibration_path, with rows of what to keep" not in (tmp_path / "whole/log.txt").read_text()
    chosen = "osft_directions: inputs  # chosen: the default with osft_calibration_path\n"
    assert chosen in (tmp_path / "whole/config.yaml").read_text()
    for run in ("whole", "halves"):  # what was measured stands beside the run, which a resume reads
        assert (tmp_path / run / "log.txt").read_text().count("osft_directions=inputs: measuring what") == 1
    assert (
        "protected is where inputs and outputs are largest on rows of earlier tasks" in (tmp_path / "whole/log.txt").read_text()
    )
    assert {target["directions"] for target in json.loads((tmp_path / "whole/osft/plan.json").read_text()).values()} == {
        "inputs"
    }
    kept = forge.forgetting(tmp_path / "whole", data=[tmp_path / "earlier.jsonl"]).sources["earlier.jsonl"]
    assert kept.after == pytest.approx(kept.before, abs=0.02)
    assert "so nothing leaked" in inspect(tmp_path / "whole")
    assert "The directions in which inputs are largest" in (tmp_path / "whole/osft/inspect.html").read_text()
    for file in (tmp_path / "whole/osft").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(forge_algos.AdapterError, match="put back the run's osft/"):
        inspect(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "osft"])
def test_a_run_of_a_version_that_wrote_what_is_protected_resumes(
    adapter: str, model_dir: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It wrote `osft_directions: weights` to every run, and into its full states, where now nothing is given."""
    settings = {**settings_of("sft", model_dir, folder), "adapter": adapter, "ckpt_output_dir": str(tmp_path)}
    settings |= {"lr_scheduler": "constant", "keep_full_state": True}
    run_verb("sft", {**settings, "max_steps": 2})
    state = json.loads((tmp_path / "full_state/step_2/manifest.json").read_text())
    assert state["must_match"]["osft_directions"] == "weights"
    config = (tmp_path / "config.yaml").read_text()
    assert ("osft_directions: null" in config) == (adapter == "none")
    (tmp_path / "config.yaml").write_text(config.replace("osft_directions: null", "osft_directions: weights"))
    run_verb("sft", {**settings, "max_steps": 3})
    said = capsys.readouterr().err
    assert "resuming after step 2" in said
    assert said.count("osft_calibration_path, with rows of what to keep, protects more") == (adapter == "osft")


@pytest.mark.slow
def test_rows_to_keep_are_read_as_the_tasks_own(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """They are in the run's chat template, and none is longer than max_seq_len."""
    earlier = [{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day " * 40}]}]
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.role }} says: {{ message.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant says: {% endif %}"
    )
    settings = {
        **given("sft", "osft", model_dir, folder),
        "osft_directions": "inputs",
        "osft_calibration_path": str(write_rows(tmp_path / "earlier.jsonl", earlier)),
        "chat_template": str(template),
        "max_seq_len": 60,
        "max_steps": 1,
    }
    run_verb("sft", {**settings, "ckpt_output_dir": str(tmp_path / "run")})
    store = forge_data.TokenStore.open(tmp_path / "run/data/calibration")
    assert store.lengths.tolist() == [60]
    assert store.tokenizer().decode(store[0].input_ids).startswith("user says: hello")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra deepspeed is not installed")
@pytest.mark.lane
@pytest.mark.parametrize(("name", "value"), [("osft_directions", "inputs"), ("osft_rank", "adaptive")])
def test_measured_where_zero3_divides(name: str, value: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Weights are gathered to measure, before there is an engine: the plan and the losses are those of one process, which goes
    on where two ranks ended.
    """
    settings = {**given("sft", "osft", model_dir, folder), name: value, "lr_scheduler": "constant", "max_steps": 4}
    settings["osft_calibration_path"] = settings["data_path"]
    run_verb("sft", {**settings, "ckpt_output_dir": str(tmp_path / "alone")})
    both = {**settings, "full_state_every_steps": 2, "ckpt_output_dir": str(tmp_path / "both")}
    run_on_ranks(run_verb, 2, "sft", {**both, "max_steps": 2, "strategy": "zero3"}, joined=False)
    run_verb("sft", both)
    losses = [[line["loss"] for line in metrics(tmp_path / run) if "loss" in line] for run in ("alone", "both")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    plans = [json.loads((tmp_path / run / "osft/plan.json").read_text()) for run in ("alone", "both")]
    free = [{target: planned["free"] for target, planned in plan.items()} for plan in plans]
    assert free[0] == free[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file at"),
        ("", "is empty: it holds no rows"),
        ('{"query": "a", "positive": "b"}\n', "no known format"),
    ],
)
def test_rows_to_keep_are_looked_at_first(
    content: str | None, message: str, model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    """A file that cannot be measured on is refused by the setting's name before rows to train on are read."""
    file = tmp_path / "keep.jsonl"
    if content is not None:
        file.write_text(content)
    settings = {**given("sft", "osft", model_dir, folder), "osft_directions": "inputs", "osft_calibration_path": str(file)}
    (tmp_path / "broken.jsonl").write_text("{}\n" if content is None else "{\n")
    for data in (settings["data_path"], str(tmp_path / "broken.jsonl")):
        with pytest.raises(forge.SettingsError, match=f"^osft_calibration_path: .*{message}"):
            run_verb("sft", {**settings, "data_path": data, "ckpt_output_dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_reward_model_under_osft(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """It learns which answers are better, is exported as a plain model, score and all, and resumes to the bit."""
    settings = {**given("reward", "osft", model_dir, folder), "lr_scheduler": "constant", "max_steps": 6}
    whole = run_verb("reward", {**settings, "ckpt_output_dir": str(tmp_path / "whole")})
    halves = {**settings, "full_state_every_steps": 3, "ckpt_output_dir": str(tmp_path / "halves")}
    run_verb("reward", {**halves, "max_steps": 3})
    again = run_verb("reward", halves)
    files = [Path(result["model_dir"]) / "model.safetensors" for result in (whole, again)]
    assert files[0].read_bytes() == files[1].read_bytes()
    losses = [line["loss"] for line in metrics(tmp_path / "whole") if "loss" in line]
    assert losses[-1] < losses[0] - 0.01
    model: Any = AutoModelForSequenceClassification.from_pretrained(files[0].parent)
    exported, base = model.state_dict(), AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    assert not any(".osft" in name for name in load_file(files[0]))
    assert torch.equal(exported["score.weight"], load_file(files[0])["score.weight"])
    assert not torch.equal(exported["model.layers.0.self_attn.q_proj.weight"], base["model.layers.0.self_attn.q_proj.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    ci_keeps(
        [{"init_lora_weights": "pissa", "weight_decay": 0.1}],
        [
            {"init_lora_weights": "pissa", "weight_decay": 0.1},
            {"init_lora_weights": "olora", "loraplus_lr_ratio": 4.0},
            {"init_lora_weights": "mica"},
            {"init_lora_weights": "eva", "rank_pattern": {"q_proj": 2}},
            {"lora_fa": True},
        ],
    ),
)
def test_first_values_on_any_ranks_and_after_a_resume(
    more: dict[str, Any], model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    """Resumed it ends with the bits of an uninterrupted run; two ranks that divide the base have its losses."""
    settings = {**given("sft", "lora", model_dir, folder), "lr_scheduler": "constant", "max_steps": 6, **more}
    whole = run_verb("sft", {**settings, "ckpt_output_dir": str(tmp_path / "whole")})
    halves = {**settings, "full_state_every_steps": 3, "ckpt_output_dir": str(tmp_path / "halves")}
    run_verb("sft", {**halves, "max_steps": 3})
    again = run_verb("sft", halves)
    one, other = (Path(result["model_dir"]) / "adapter_model.safetensors" for result in (whole, again))
    assert one.read_bytes() == other.read_bytes()
    divided = {**settings, "strategy": "fsdp2", "ckpt_output_dir": str(tmp_path / "divided")}
    run_on_ranks(run_verb, 2, "sft", divided, joined=False)
    losses = [[line["loss"] for line in metrics(tmp_path / run) if "loss" in line] for run in ("whole", "divided")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_a_reference_is_the_base_whatever_the_first_values(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """DPO's adapter switched off is the base under PiSSA too: the first loss is log 2, as check_reference demands."""
    settings = {**given("dpo", "lora", model_dir, folder), "max_steps": 2, "reference": "adapter_off"}
    run_verb("dpo", {**settings, "init_lora_weights": "pissa", "ckpt_output_dir": str(tmp_path)})
    first = next(line for line in metrics(tmp_path) if "grad_norm" in line)
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5)


FREE = {"optimizer": "schedule_free", "lr_scheduler": "constant"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"adapter": "lora", "optimizer": "apollo"},
            "optimizer=apollo with adapter=lora: .*, or set adapter=none",
        ),
        ({**FREE, "adapter": "osft", "osft_form": "factors"}, "optimizer=schedule_free with osft_form=factors"),
        ({**FREE, "adapter": "lora", "init_lora_weights": "pissa", "weight_decay": 0.1}, "Leave weight_decay out"),
        ({"loraplus_lr_ratio": 4.0}, "loraplus_lr_ratio=4 has no effect with adapter=none"),
        ({"adapter": "loha", "loraplus_lr_ratio": 4.0}, "loraplus_lr_ratio=4 has no effect with adapter=loha"),
        ({"adapter": "hra", "lora_r": 3}, "lora_r=3: hra begins as its base .*: set lora_r=4"),
        ({"adapter": "oft", "oft_block_size": 24}, "oft_block_size=24 must divide the inputs of .*: set oft_block_size=16"),
        ({"adapter": "lora", "init_lora_weights": "pissa", "lora_r": 999}, "directions, and its rank is 999"),
        ({"adapter": "lora", "init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"adapter": "lora", "init_lora_weights": "eva", "cp_size": 2}, "inputs are measured on whole rows"),
        ({"adapter": "lora", "rank_pattern": ["q_prj=2"]}, "Did you mean q_proj"),
        ({"adapter": "osft", "unfreeze_rank_ratio": 1.5}, "unfreeze_rank_ratio"),
        ({"adapter": "osft", "rank_pattern": ["q_proj=999"]}, "999"),
        ({"adapter": "osft", "target_modules": ["q_prj"]}, "q_proj"),
        ({"adapter": "lora", "unfreeze_rank_ratio": 0.5}, "adapter=osft"),
        ({"adapter": "prefix", "activation_checkpointing": True}, "activation_checkpointing"),
    ],
)
def test_bad_input_is_refused(settings: dict[str, Any], words: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """By name, with the way out, exit status 2, and nothing is left behind."""
    with pytest.raises(Exception, match=words) as caught:
        forge.sft(**{**settings_of("sft", model_dir, folder), **settings}, ckpt_output_dir=tmp_path / "run")
    assert getattr(caught.value, "exit_status", None) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": "apollo"}, {"loraplus_lr_ratio": 4.0}, {"lora_r": 8}, {"weights": "bfloat16"}],
    ids=lambda settings: next(iter(settings)),
)
def test_osft_is_offered_no_other_adapter(settings: dict[str, Any], model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """`forge osft` has its own adapter alone: what it refuses is left out; `forge sft` offers another too."""
    given = {**settings_of("sft", model_dir, folder), **settings, "ckpt_output_dir": tmp_path / "run"}
    for call, other in ((partial(forge.sft, adapter="osft"), True), (forge.osft, False)):
        with pytest.raises(forge.SettingsError, match="(?i)leave .* out") as caught:
            call(**given)
        assert (re.search("adapter=(none|lora)", str(caught.value)) is not None) == other
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("settings", [{"osft_rule": "paper"}, {"osft_form": "factors"}])
def test_what_projects_is_refused_under_zero(settings: dict[str, Any]) -> None:
    """Projections cannot act under ZeRO: refused by name with the alternatives; settings without them are not."""

    def check(**more: Any) -> None:
        adapter = forge.algos.AdapterSettings(adapter="osft", **more)
        check_projections(_settings(adapter, 0.0), SimpleNamespace(name="zero1"))

    with pytest.raises(forge.SettingsError, match="projects.*strategy=fsdp2") as caught:
        check(**settings)
    assert next(iter(settings)) in str(caught.value)
    check()


def test_what_decays_back_is_refused_under_zero() -> None:
    """What PiSSA subtracts could not be kept from a decay there."""
    adapter = forge.algos.AdapterSettings(adapter="lora", init_lora_weights="pissa")
    check_projections(_settings(adapter, 0.0), SimpleNamespace(name="zero1"))
    check_projections(_settings(adapter, 0.1), SimpleNamespace(name="fsdp2"))
    with pytest.raises(forge.SettingsError, match="set weight_decay=0, or strategy=fsdp2"):
        check_projections(_settings(adapter, 0.1), SimpleNamespace(name="zero1"))


def _settings(adapter: Any, weight_decay: float) -> Any:
    return SimpleNamespace(adapter=adapter, optimizer=SimpleNamespace(weight_decay=weight_decay))


@pytest.mark.slow
def test_config_repeats_an_osft_run(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """A config.yaml with tuples and patterns in it is a recipe of the same run."""
    settings = {
        **given("sft", "osft", model_dir, folder),
        "rank_pattern": {"q_proj": 2},
        "osft_train_rest": ["norms"],
        "max_steps": 2,
    }
    first = run_verb("sft", {**settings, "ckpt_output_dir": str(tmp_path / "one")})
    values = yaml.safe_load((tmp_path / "one" / "config.yaml").read_text())
    recipe = tmp_path / "again.yaml"
    recipe.write_text(yaml.safe_dump({**values, "ckpt_output_dir": str(tmp_path / "two")}))
    again = forge.sft(recipe)
    assert again.loss == first["loss"]
