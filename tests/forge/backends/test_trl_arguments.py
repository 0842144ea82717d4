"""Settings → TRL's arguments: every setting is honoured or refused, and a step is cut so that every rank has as much."""

from __future__ import annotations

from typing import Any

import pytest

import forge
from forge.backends import _backend
from forge.backends._trl import REFUSED, TRLBackend
from forge.backends._trl_arguments import BY_FORGE, CLASSES, OBJECTIVE, Cut, arguments, cut_step, short_steps, spread
from forge.backends._trl_rows import planned_batches, rows_of
from forge.settings._settings import flat_fields, resolve
from forge.verbs._registry import task_of

VERBS = TRLBackend().capabilities().verbs or ()
# Groups that forge itself reads before, around and after TRL's trainer.
FORGES = {"model", "data", "plan", "optimizer", "adapter", "moe", "device", "strategy", "launch", "checkpoints", "report"}
FORGES |= {"tracking", "backend", "passed_on"}


def settings(verb: str, **more: Any) -> Any:
    """Settings of a verb for this backend, with the choices that data and machine decide."""
    reward = {"reward": ("m:f",)} if verb == "grpo" else {}
    given = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o", "backend": "trl", **reward, **more}
    found = resolve(task_of(verb).settings, ("argument", given))
    return found.resolved("max_tokens_per_gpu", 100, "a test") if found.plan.max_tokens_per_gpu is None else found


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_of_the_objective_is_translated_or_refused(verb: str) -> None:
    """No setting of an objective is silently without effect, and each argument is one that TRL's class has."""
    named = set(OBJECTIVE[verb]) | set(BY_FORGE.get(verb, ()))
    refused = {*REFUSED, *(("label_smoothing",) if verb == "sft" else ())}
    for group, field in flat_fields(task_of(verb).settings):
        if group == "objective":
            assert (field.name in named) != (field.name in refused), field.name
        else:
            assert group in FORGES or field.name in refused, field.name


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_trl_cannot_honour_is_a_setting(name: str) -> None:
    """The table of refusals names settings that some verb has: one that was renamed is found."""
    assert any(field.name == name for verb in VERBS for _, field in flat_fields(task_of(verb).settings))


@pytest.mark.parametrize("verb", VERBS)
def test_the_arguments_make_the_real_class(verb: str) -> None:
    """TRL's own configuration class takes what it is given, and holds our values."""
    trl = pytest.importorskip("trl", reason="TRL is not installed here: forge-llm[trl]")
    s = settings(verb, learning_rate=0.5, seed=7, max_grad_norm=0.25)
    given = arguments(verb, s, Cut(8, 3), steps=5, output_dir="x", on_cpu=True, bf16=False, ddp=None)
    made = getattr(trl, CLASSES[verb][0])(**given)
    assert (made.max_steps, made.learning_rate, made.seed, made.max_grad_norm) == (5, 0.5, 7, 0.25)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (8, 3)
    assert (made.bf16, made.gradient_checkpointing, made.report_to, str(made.save_strategy)) == (
        False,
        False,
        [],
        "SaveStrategy.NO",
    )
    assert getattr(made, "max_length", None) is None


@pytest.mark.parametrize("verb", VERBS)
def test_dropout_stays_on(verb: str) -> None:
    """No configuration of TRL switches dropout off, as three do by default: lora_dropout would do nothing."""
    trl = pytest.importorskip("trl", reason="TRL is not installed here: forge-llm[trl]")
    given = arguments(verb, settings(verb), Cut(8, 3), steps=5, output_dir="x", on_cpu=True, bf16=False, ddp=None)
    made = getattr(trl, CLASSES[verb][0])(**given)
    assert not getattr(made, "disable_dropout", False)


@pytest.mark.parametrize(
    ("verb", "given", "theirs", "value"),
    [
        ("sft", {"loss": "dft"}, "loss_type", "dft"),
        ("sft", {"neftune_alpha": 5.0}, "neftune_noise_alpha", 5.0),
        ("sft", {"pad_to_multiple_of": 8}, "pad_to_multiple_of", 8),
        ("sft", {"moe_aux_loss": "trl"}, "router_aux_loss_coef", None),
        ("sft", {"activation_checkpointing": True}, "activation_checkpointing", True),
        ("dpo", {"loss_type": ("sigmoid", "sft"), "loss_weights": (1.0, 0.5)}, "loss_weights", [1.0, 0.5]),
        ("dpo", {"loss_type": "robust", "label_smoothing": 0.1}, "label_smoothing", 0.1),
        ("dpo", {"f_divergence": "js_divergence"}, "f_divergence_type", "js_divergence"),
        ("dpo", {"ld_alpha": 0.5}, "ld_alpha", 0.5),
        ("dpo", {"wpo": True}, "use_weighting", True),
        ("kto", {"reference": "moving"}, "sync_ref_model", True),
        ("dpo", {"reference": "moving", "reference_mixup": 0.9}, "ref_model_mixup_alpha", 0.9),
        ("grpo", {"reference": "moving", "kl_weight": 0.1}, "sync_ref_model", True),
        ("grpo", {"reference": "moving", "kl_weight": 0.1, "reference_sync_steps": 3}, "ref_model_sync_steps", 3),
        ("dpo", {"f_divergence": "alpha_divergence", "f_divergence_alpha": 0.2}, "f_alpha_divergence_coef", 0.2),
        ("dpo", {"loss_type": "discopop", "discopop_tau": 0.2}, "discopop_tau", 0.2),
        ("kto", {"loss_type": "apo_zero_unpaired"}, "loss_type", "apo_zero_unpaired"),
        ("kto", {"desirable_weight": 2.0}, "desirable_weight", 2.0),
        ("reward", {"centering": 0.1}, "center_rewards_coefficient", 0.1),
        ("grpo", {"kl_weight": 0.1}, "beta", 0.1),
        ("grpo", {"loss_type": "dr_grpo"}, "scale_rewards", "none"),
        ("grpo", {"loss_type": "gspo"}, "importance_sampling_level", "sequence"),
        ("grpo", {"loss_type": "gspo"}, "loss_type", "grpo"),
        ("grpo", {"loss_type": "gspo"}, "epsilon", 3e-4),
        ("grpo", {"loss_type": "cispo"}, "epsilon_high", 5.0),
        (
            "grpo",
            {"multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation",
            "normalize_then_sum",
        ),
        ("grpo", {"entropy_coef": 0.01}, "entropy_coef", 0.01),
        ("grpo", {"top_entropy_quantile": 0.2}, "top_entropy_quantile", 0.2),
        ("grpo", {"min_p": 0.2}, "min_p", 0.2),
        ("grpo", {"use_adaptive_entropy": True, "entropy_target": 2.0}, "entropy_target", 2.0),
        ("sft", {"moe_aux_loss": "trl", "router_aux_loss_coef": 0.1}, "router_aux_loss_coef", 0.1),
        ("grpo", {"loss_type": "vespo", "vespo_k_neg": 1.5}, "vespo_k_neg", 1.5),
        ("grpo", {"loss_type": "vespo"}, "loss_type", "vespo"),
        ("grpo", {"importance_sampling_level": "sequence"}, "importance_sampling_level", "sequence"),
        ("grpo", {"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ("grpo", {"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold", 0.1),
        ("grpo", {"loss_type": "luspo"}, "importance_sampling_level", "sequence"),
        ("grpo", {"dual_clip": 3.0}, "delta", 3.0),
        ("grpo", {"loss_type": "sapo", "sapo_temperature_neg": 2.0}, "sapo_temperature_neg", 2.0),
        ("grpo", {"kl_weight": 0.1, "kl_estimator": "unbiased"}, "use_bias_correction_kl", True),
        ("grpo", {"clip": 0.1}, "epsilon_high", 0.1),
        ("grpo", {"updates_per_pass": 2}, "steps_per_generation", 6),
    ],
)
def test_a_setting_becomes_an_argument(verb: str, given: dict[str, Any], theirs: str, value: object) -> None:
    """A value of ours is the value of TRL's argument."""
    plain, changed = (
        arguments(verb, settings(verb, **each), Cut(8, 3), steps=5, output_dir="x", on_cpu=True, bf16=False, ddp=None)
        for each in ({}, given)
    )
    assert changed[theirs] == value
    assert plain[theirs] != value


@pytest.mark.parametrize(
    ("rows", "shards", "longest", "more", "expected"),
    [
        (32, 1, 10, {}, Cut(8, 4)),
        (32, 2, 10, {}, Cut(8, 2)),
        (8, 1, 10, {}, Cut(8, 1)),
        (7, 1, 60, {}, Cut(1, 7)),
        (8, 1, 1000, {}, Cut(1, 8)),
        (8, 1, 1000, {"least": 2}, Cut(2, 4)),
        (8, 1, 10, {"asked": 4}, Cut(2, 4)),
    ],
)
def test_a_step_is_cut_to_fit(rows: int, shards: int, longest: int, more: dict[str, int], expected: Cut) -> None:
    """As few micro-batches as max_tokens_per_gpu=100 allows with padding, equally many rows in each."""
    assert cut_step(settings("sft"), rows, shards, longest, **more) == expected


@pytest.mark.parametrize(
    ("rows", "shards", "more", "message"),
    [
        (7, 2, {}, "2 ranks cannot share evenly"),
        (8, 2, {"asked": 3}, "gradient_accumulation_steps=3 does not divide the 4 rows .* choose 1, 2, 4"),
        (2, 2, {"least": 2}, "leaves a rank 1 row a step, and TRL needs 2"),
    ],
)
def test_a_step_that_cannot_be_cut_is_refused(rows: int, shards: int, more: dict[str, int], message: str) -> None:
    """One message by name."""
    with pytest.raises(forge.SettingsError, match=message):
        cut_step(settings("sft"), rows, shards, 10, **more)


def test_planned_batches_lose_no_item() -> None:
    """Ranks and micro-batches divide each step's items, as many micro-batches for each rank in every step."""
    steps = [[3, 1, 2, 0], [4, 5, 6]]
    for shards, parts in ((1, 1), (1, 3), (2, 1)):
        mine = [planned_batches(steps, Cut(4, parts), rank, shards) for rank in range(shards)]
        assert {len(each) for each in mine} == {parts * len(steps)}
        for number, step in enumerate(steps):
            found = [each[number * parts + part] for part in range(parts) for each in mine]
            assert [index for batch in found for index in batch] == step
            assert all(found)
    assert spread(3, 2) == [2, 1]


@pytest.mark.parametrize(
    ("sizes", "shards", "cut", "first"),
    [([4, 4, 3], 1, Cut(4, 1), None), ([4, 4, 3], 2, Cut(2, 1), 2), ([4, 2, 4], 1, Cut(1, 4), 1), ([4, 4], 2, Cut(1, 2), None)],
)
def test_short_steps_are_found(sizes: list[int], shards: int, cut: Cut, first: int | None) -> None:
    """A step that has no row for some micro-batch, or not as many for each rank, is one that TRL cannot make."""
    assert short_steps(sizes, shards, cut) == first


@pytest.mark.parametrize(
    ("verb", "given", "message"),
    [
        ("sft", {"validation_split": 0.1}, "validation_split=0.1 has no effect with backend=trl: it measures nothing"),
        ("sft", {"full_state_every_steps": 3}, "it saves no full states"),
        ("sft", {"save_samples": 3}, "the model is exported once"),
        ("sft", {"label_smoothing": 0.1}, "label_smoothing is not available with sft of backend=trl"),
        ("sft", {"num_epochs": "inf", "lr_scheduler": "constant"}, "num_epochs=inf is not available with backend=trl"),
        ("sft", {"checkpoint_storage": "file:///x"}, "checkpoint_storage=file:///x has no effect with backend=trl"),
        ("sft", {"packing": "on"}, "the rows of a micro-batch are padded"),
        ("sft", {"attention": "documents"}, "attention=documents is for packed rows"),
        ("sft", {"strategy": "fsdp2"}, "strategy=fsdp2 is not available with backend=trl; it has auto, single, ddp"),
        ("sft", {"adapter": "ia3"}, "adapter=ia3 is not available with backend=trl"),
        ("sft", {"optimizer": "schedule_free", "lr_scheduler": "constant"}, "optimizer=schedule_free is not available"),
        ("dpo", {"loss_type": "hinge", "wpo": True}, "wpo with loss_type=hinge is not available with backend=trl"),
        ("kto", {"reference": "moving", "adapter": "lora"}, "reference=moving with adapter=lora is not available with backend"),
        ("grpo", {"reference": "moving", "kl_weight": 0.1, "adapter": "lora"}, "reference=moving with adapter=lora is not"),
        ("dpo", {"loss_type": "cdpo", "label_smoothing": 0.1}, "loss_type=cdpo is not available with backend=trl"),
        ("grpo", {"pad_to_multiple_of": 8}, "pad_to_multiple_of has no effect with grpo"),
        ("grpo", {"loss_type": "cispo", "clip": 0.5}, "clip=0.5 is not available with loss_type=cispo of backend=trl"),
        (
            "grpo",
            {"importance_sampling_level": "sequence", "kl_weight": 0.1, "kl_estimator": "unbiased"},
            "kl_estimator=unbiased is not available with a completion's ratio of backend=trl",
        ),
        ("grpo", {"missing_eos_penalty": 0.5}, "missing_eos_penalty=0.5 has no effect with backend=trl"),
        ("grpo", {"chat_template_kwargs": {"a": "b"}}, "chat_template_kwargs is not available with grpo"),
        ("reward", {"normalize": "trl"}, "normalize=trl has no effect with backend=trl"),
        ("orpo", {}, "backend=trl has no orpo; it has sft, dpo, kto, reward, grpo"),
    ],
)
def test_what_trl_does_not_have_is_refused(verb: str, given: dict[str, Any], message: str) -> None:
    """Before a model is looked for: the message names the setting, the backend and the reason."""
    pytest.importorskip("trl", reason="TRL is not installed here: forge-llm[trl]")
    reward = {"reward": ("m:f",)} if verb == "grpo" else {}
    with pytest.raises(forge.SettingsError, match=message):
        getattr(forge, verb)(model_path="m", data_path="d", ckpt_output_dir="o", backend="trl", **reward, **given)


@pytest.mark.parametrize("version", ["1.9.0", "2.0.0rc1"])
def test_a_version_that_it_is_not_written_for_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older or a newer TRL cannot be given is not found out by a TypeError."""
    pytest.importorskip("trl", reason="TRL is not installed here: forge-llm[trl]")
    monkeypatch.setattr(_backend, "version", lambda _: version)
    with pytest.raises(
        forge.SettingsError, match=rf"trl {version} is installed, and >=1.16,<2 is needed: `pip install 'forge-llm\[trl\]'"
    ):
        forge.sft(model_path="m", data_path="d", ckpt_output_dir="o", backend="trl")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
        ({"gradient_accumulation_step": 2}, "did you mean `gradient_accumulation_steps`?"),
    ],
)
def test_the_backends_own_settings_are_checked(given: dict[str, Any], message: str) -> None:
    """Names and ranges, as for any setting."""
    with pytest.raises(forge.SettingsError, match=message):
        forge.dpo(model_path="m", data_path="d", ckpt_output_dir="o", backend="trl", **given)


class Pairs:
    """One pair of answers, given as tokens and labels."""

    def __init__(self, *examples: tuple[list[int], list[int]]) -> None:
        self._examples = examples

    def source(self, index: int) -> str:
        """Return the file and row."""
        return f"rows.jsonl:{index + 1}"

    def examples(self, index: int) -> tuple[tuple[list[int], list[int]], ...]:
        """Return both answers."""
        assert index == 0
        return self._examples


def test_what_follows_the_last_learned_token_is_left_out() -> None:
    """TRL learns all that follows the prompt, so that the line break after a turn must not be there."""
    items = Pairs(([1, 2, 3, 9], [-100, 2, 3, -100]), ([1, 4, 9], [-100, 4, -100]))
    assert rows_of("dpo", items)(0) == [{"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]}]


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        (([1, 2, 3, 4], [-100, 2, -100, 4]), ([1, 5], [-100, 5]), "rows.jsonl:1: only parts of an answer are learned"),
        (([1, 2], [-100, 2]), ([7, 5], [-100, 5]), "rows.jsonl:1: the prompts of its two answers have other tokens"),
    ],
)
def test_pairs_that_trl_would_learn_otherwise_are_refused(chosen: Any, rejected: Any, message: str) -> None:
    """By file and row."""
    with pytest.raises(forge.SettingsError, match=message):
        rows_of("dpo", Pairs(chosen, rejected))(0)
