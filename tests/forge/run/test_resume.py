"""Full states of earlier versions, which lack the settings that were added since."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from forge._errors import SettingsError
from forge.run._resume import _FREE, _LENGTH, ADDED, as_json, compare_model, compare_settings, must_match, other_request
from forge.settings._recipe import as_values
from forge.settings._settings import flat_fields, resolve
from forge.verbs._registry import VERBS, task_of
from forge.verbs._sft import SFTSettings

FIRST = set(
    """
    adapter adapter_layers add_special_tokens add_tokens alpha_pattern beta beta1 beta2 block_size centering chat_template
    chat_template_kwargs clip clip_high cross_documents data_format decay_steps demonstration_template desirable_weight
    document_prefix double_quant dtype dual_clip effective_batch_size env env_timeout eps exclude_same_text f_divergence
    feedforward_modules gamma gather_dtype init_lora_weights kl_estimator kl_weight label_smoothing labels lam learn_prompt
    learning_rate lora_alpha lora_dropout lora_fa lora_r loraplus_lr_ratio loss loss_type loss_weights lr_scheduler margin
    mask_truncated max_bad_rows max_grad_norm max_group_reward max_new_tokens max_prompt_len max_resamples max_sampler_gap
    max_seq_len max_turns min_group_reward min_lr_ratio missing_eos_penalty modules_to_save moe_aux_loss momentum
    neftune_alpha normalize num_cycles num_generations num_iterations num_virtual_tokens on_bad_pair on_bad_row
    on_equal_rewards on_overflow on_reward_error optimizer osft_calibration_path osft_directions osft_form osft_rank
    osft_rule osft_svd osft_train_rest overlong_buffer pooling power prefix_projection problem_type prompt_init_text
    quant_type query_prefix rank_pattern reference rename_columns reward reward_timeout reward_weights sampler
    sampler_timeout sampler_url scale_rewards seed skip_tokens target_modules teacher teacher_rate temperature tis_above
    tis_cap top_k top_p train_on turn_end turns undesirable_weight unfreeze_rank_ratio updates_per_pass validation_split
    value_clip value_weight warmup_steps weight_decay weights whiten z_loss
    """.split()
)
"""Settings of all verbs that must stay in a resumed run, as they were on 2026-11-26: full states have those of their verb."""


def settings(**given: object) -> Any:
    return resolve(SFTSettings, ("argument", {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o", **given}))


def past(s: Any) -> dict[str, Any]:
    items: Any = SimpleNamespace(store=SimpleNamespace(fingerprint="data"))
    plan: Any = SimpleNamespace(order_fingerprint="order", num_steps=9)
    return must_match(s, items, plan, {"run": "1"}, "")


def test_a_state_of_before_matches() -> None:
    """It has no entry for a setting that was added since and is as runs were before; another value is one of the state's."""
    added = {field.name for verb in VERBS for _, field in flat_fields(task_of(verb).settings)} - FIRST
    added -= _FREE | {*_LENGTH, "backend"}
    # Other verbs had these before, with other values; those of the online verbs, of kto and of distill are new.
    added |= {"reference", "loss_type", "whiten", "dual_clip", "loss", "max_new_tokens", "top_p", "top_k"}
    assert added == set(ADDED), "a setting that is new needs an entry in ADDED, or no run of before resumes"
    values = as_values(settings())
    mine = set(ADDED) - {"loss"}
    assert {name: values.get(name, ADDED[name]) for name in mine} == {name: ADDED[name] for name in mine}, (
        "a default of before is the default"
    )
    assert not mine & set(past(settings()))
    assert past(settings(warmup_ratio=0.1))["warmup_ratio"] == 0.1


def test_an_adapter_to_go_on_from_is_known_by_its_content(tmp_path: Path) -> None:
    """Its path may change between starts; a run without one cannot go on with one, nor one with it without."""
    given = [settings(adapter="lora", **({} if path is None else {"adapter_path": path})) for path in (None, "a", "b")]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_json(as_values(given[1]))))
    assert compare_settings(tmp_path, given[2]) == ["adapter_path: a → b"]
    assert past(given[1]) == past(given[2])
    with pytest.raises(SettingsError, match="holds a run with adapter_path=a, and now `adapter_path` is null"):
        compare_settings(tmp_path, given[0], open_left=True)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_json(as_values(given[0]))))
    with pytest.raises(SettingsError, match="holds a run with no adapter_path, and now `adapter_path` is a.* to begin anew"):
        compare_settings(tmp_path, given[1], open_left=True)
    (tmp_path / "result.json").touch()
    export = tmp_path / "hf_format" / "samples_4"
    export.mkdir(parents=True)
    (export / "adapter_config.json").touch()
    with pytest.raises(SettingsError, match=f"That run is finished: .*, and adapter_path={export} to go on"):
        compare_settings(tmp_path, given[1], open_left=True)


def test_a_run_of_before_keeps_its_warm_up(tmp_path: Path) -> None:
    """A setting that its config.yaml lacks had the value of before."""
    before = {name: value for name, value in as_values(settings()).items() if name not in ADDED or name == "loss"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_json(before)))
    assert compare_settings(tmp_path, settings()) == []
    with pytest.raises(SettingsError, match="holds a run with warmup_ratio=0.0, and now `warmup_ratio` is 0.2"):
        compare_settings(tmp_path, settings(warmup_ratio=0.2))


def test_what_a_finished_run_is_not_is_named(tmp_path: Path) -> None:
    """A value that was given and is left out now, and one that an earlier version did not know; nothing for equal ones."""
    given = as_values(settings(qat="q4_0", max_samples=8))
    before = {name: value for name, value in given.items() if name != "warmup_ratio"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_json(before)))
    assert other_request(tmp_path, settings(qat="q4_0", max_samples=8, warmup_ratio=0.0)) == []
    assert set(other_request(tmp_path, settings(warmup_ratio=0.2))) == {
        "`qat`: q4_0 → left out",
        "`max_samples`: 8 → left out",
        "`warmup_ratio`: 0.0 → 0.2",
    }


@pytest.mark.parametrize("digests", [True, False])
def test_a_model_that_is_given_or_left_out_is_named(digests: bool, tmp_path: Path) -> None:
    """With what resumes the run; a model whose files changed keeps the words of one."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_path": "m", "reference_path": "a"}))
    (tmp_path / "run.json").write_text(json.dumps({"run": "1", "verb": "dpo", "model": "x", "reference_path": "y"}))
    now = {"run": "2", "verb": "dpo", "model": "x"}
    with pytest.raises(SettingsError, match=r"with reference_path=a, and now no reference_path; .* Give reference_path=a to"):
        compare_model(tmp_path, now, {}, digests=digests)
    (tmp_path / "run.json").write_text(json.dumps(now))
    with pytest.raises(SettingsError, match=r"with no reference_path, and now reference_path=b; .* Leave reference_path out"):
        compare_model(tmp_path, {**now, "reference_path": "y"}, {"reference_path": "b"}, digests=digests)
    with pytest.raises(SettingsError, match="the model in model_path is not the one that its run began with"):
        compare_model(tmp_path, {**now, "model": "z"}, {})
