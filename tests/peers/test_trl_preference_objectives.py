"""Three steps of TRL 1.16's preference trainers, and of ours with normalize="trl": the same losses and gradient norms.

Steps of 4 + 3, where a mean of means differs from a mean; TRL's own collators, forwards and losses, from our token ids.
"""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest

pytest.importorskip("trl", reason="TRL is the oracle of this file")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

EPOCHS, MICRO, NUMBER, VOCAB = 3, 4, 7, 200
RATE = 1e-3


def some_pairs():
    """(prompt, chosen, rejected) as lists of ids, of very unequal lengths."""
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(3, VOCAB - 1, int(rng.integers(1, 12))).tolist() for _ in range(3)) for _ in range(NUMBER)]


PAIRS = some_pairs()
GOOD = [True, False, True, True, False, False, True]
MARGINS = [0.0, 0.3, 0.1, 1.5, 0.0, 0.2, 0.7]
# Within a micro-batch: TRL has its mismatched completions made beforehand, a batch at a time.
OTHERS = [PAIRS[k][1] for k in (3, 0, 1, 2, 6, 4, 5)]


def a_model(kind="causal", seed=0):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, num_labels=1, initializer_range=0.1,
    )  # fmt: skip
    return (LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM)(config)


def a_tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": VOCAB - 1}, unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<eos>"
    )


def run_trl(trainer_class, config_class, model, rows, scratch, **options):
    """[(loss, gradient norm) of each step]."""
    from datasets import Dataset

    own = {
        "output_dir": str(scratch), "num_train_epochs": EPOCHS, "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": 2, "max_length": 64, "train_sampling_strategy": "sequential", "learning_rate": RATE,
        "lr_scheduler_type": "constant", "optim": "adamw_torch", "adam_beta2": 0.95, "weight_decay": 0.0, "max_grad_norm": 0.5,
        "bf16": False, "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "remove_unused_columns": False,
    }  # fmt: skip
    extra = options.pop("trainer", {})
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if name in config_class.__dataclass_fields__:
            own[name] = False
    trainer = trainer_class(
        model=model, args=config_class(**own, **options), train_dataset=Dataset.from_dict(rows), processing_class=a_tokenizer(),
        **extra,
    )  # fmt: skip
    trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]


def run_ours(model, objective, batches, cuts=(slice(0, 4), slice(4, 7)), moving=None):
    """The same of ours; with `moving`, (share, every), `objective` is made of what exchanges the weights."""
    import forge_algos

    settings = forge_algos.OptimizerSettings(learning_rate=RATE, lr_scheduler="constant", max_grad_norm=0.5)
    optimizer = forge_algos.adamw(model, settings)
    average = None if moving is None else forge_algos.WeightAverage(optimizer, moving[0], every=moving[1])
    outputs = forge_algos.train(
        model,
        ([batches(cut) for cut in cuts] for _ in range(EPOCHS)),
        objective=objective if average is None else objective(average.exchanged),
        optimizer=optimizer,
        average=average,
        scheduler=forge_algos.schedule(optimizer, settings, num_steps=EPOCHS),
        max_grad_norm=settings.max_grad_norm,
    )
    return [(output.loss, output.grad_norm) for output in outputs]


def groups(pairs):
    """Each a group of (prompt, completion) lists, packed by forge_packing."""
    import forge_packing

    return forge_packing.collate_groups(
        [
            [(np.array(p + y), np.array([-100] * len(p) + y)) for p, y in group]
            for group in pairs
        ]
    )  # fmt: skip


def pair_batch(cut, margins=None):
    import forge_algos

    rows = groups([[(p, c), (p, r)] for p, c, r in PAIRS[cut]])
    return forge_algos.PreferenceBatch(groups=rows, margins=None if margins is None else np.array(margins[cut], np.float32))


def compare(ours, theirs):
    assert len(ours) == len(theirs) == EPOCHS
    assert all(norm > 0.5 for _, norm in ours), "clipping at 0.5 is to bind in every step"
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)


def columns(*names, **more):
    return {name: [pair[k] for pair in PAIRS] for k, name in enumerate(names) if name} | more


def as_given(trainer_class):
    """The trainer, whose rows are tokens already."""
    return type(trainer_class.__name__, (trainer_class,), {"_prepare_dataset": lambda self, dataset, *_args: dataset})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
        {"loss_type": ["aot"]},
        {"loss_type": ["ipo"]},
        {"loss_type": ["discopop", "sft"], "ld_alpha": 0.3},
        {"wpo": True},
        {"loss_type": ["ipo", "sigmoid"], "loss_weights": [1.0, 0.3], "wpo": True},
    ],
    ids=str,
)
def test_dpo(settings, tmp_path):
    """Alone, mixed with a likelihood, sorted, and a token; the reference is another model."""
    import trl

    import forge_algos

    theirs = run_trl(
        as_given(trl.DPOTrainer), trl.DPOConfig, a_model(),
        columns("prompt_ids", "chosen_ids", "rejected_ids", prompt=[""] * NUMBER),
        tmp_path, beta=0.3, trainer={"ref_model": a_model(seed=1)},
        **{"use_weighting" if name == "wpo" else name: value for name, value in settings.items()},
    )  # fmt: skip
    objective = forge_algos.DPO(
        forge_algos.DPOSettings(beta=0.3, reference="live", normalize="trl", **settings), reference=a_model(seed=1)
    )
    compare(run_ours(a_model(), objective, pair_batch), theirs)


@pytest.mark.parametrize(("every", "share"), [(1, 0.6), (2, 1.0)])
def test_dpo_with_a_reference_that_moves(every, share, tmp_path):
    """TR-DPO: the reference begins as the model, and follows it after each step, or after the second."""
    import trl

    import forge_algos

    theirs = run_trl(
        as_given(trl.DPOTrainer), trl.DPOConfig, a_model(),
        columns("prompt_ids", "chosen_ids", "rejected_ids", prompt=[""] * NUMBER), tmp_path, beta=0.3,
        sync_ref_model=True, ref_model_sync_steps=every, ref_model_mixup_alpha=share, trainer={"ref_model": a_model()},
    )  # fmt: skip
    settings = forge_algos.DPOSettings(
        beta=0.3, reference="moving", reference_sync_steps=every, reference_mixup=share, normalize="trl"
    )
    found = run_ours(a_model(), lambda weights: forge_algos.DPO(settings, reference=weights), pair_batch, moving=(share, every))
    compare(found, theirs)
    if every == 1:
        assert found[1][0] != pytest.approx(run_ours(a_model(), static(a_model()), pair_batch)[1][0], rel=1e-3)


def static(reference):
    """DPO with a reference that stays."""
    import forge_algos

    return forge_algos.DPO(forge_algos.DPOSettings(beta=0.3, reference="live", normalize="trl"), reference=reference)


@pytest.mark.parametrize(("kind", "likelihood"), [("orpo", 1.0), ("simpo", 0.0), ("simpo", 0.6)])
def test_orpo_and_simpo(kind, likelihood, tmp_path):
    """ORPO with the prompt in its likelihood, SimPO with its margin, without and with one: TRL's experimental trainers."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    import forge_algos

    parent, config = (ORPOTrainer, ORPOConfig) if kind == "orpo" else (CPOTrainer, CPOConfig)

    def tokenize_row(self, feature, model=None):
        p, c, r = PAIRS[int(feature["chosen"])]
        row = {"prompt_input_ids": p, "prompt_attention_mask": [1] * len(p)}
        for name, y in (("chosen", c), ("rejected", r)):
            row |= {
                f"{name}_input_ids": p + y,
                f"{name}_attention_mask": [1] * len(p + y),
                f"{name}_labels": [-100] * len(p) + y,
            }
        return row

    trainer_class = type(parent.__name__, (parent,), {"tokenize_row": tokenize_row})
    numbers = [str(k) for k in range(NUMBER)]
    rows = {"prompt": ["x"] * NUMBER, "chosen": numbers, "rejected": numbers}
    options = (
        {"beta": 0.4} if kind == "orpo" else {"beta": 1.5, "loss_type": "simpo", "simpo_gamma": 0.6, "cpo_alpha": likelihood}
    )
    theirs = run_trl(trainer_class, config, a_model(), rows, tmp_path, **options)
    if kind == "orpo":
        objective = forge_algos.ORPO(forge_algos.ORPOSettings(beta=0.4, learn_prompt=True, normalize="trl"))
    else:
        objective = forge_algos.SimPO(forge_algos.SimPOSettings(beta=1.5, gamma=0.6, cpo_alpha=likelihood, normalize="trl"))
    compare(run_ours(a_model(), objective, pair_batch), theirs)


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_kto(kind, tmp_path):
    """Both classes with weights, and each micro-batch's own KL, which this reference makes 1.5 and 2.1 at the start.
    Or none, for APO's form.
    """
    import trl

    import forge_algos

    theirs = run_trl(
        as_given(trl.KTOTrainer), trl.KTOConfig, a_model(),
        columns("prompt_ids", "completion_ids", KL_completion_ids=OTHERS, label=GOOD, prompt=[""] * NUMBER),
        tmp_path, loss_type=kind, beta=0.3, desirable_weight=1.3, undesirable_weight=0.8,
        trainer={"ref_model": a_model(seed=4)},
    )  # fmt: skip

    def batches(cut):
        others = groups([[(p, y)] for (p, *_), y in zip(PAIRS[cut], OTHERS[cut], strict=True)])
        return forge_algos.KTOBatch(
            completions=groups([[(p, c)] for p, c, _ in PAIRS[cut]]),
            mismatched=others if kind == "kto" else None,
            desirable=np.array(GOOD[cut]),
        )

    settings = forge_algos.KTOSettings(
        loss_type=kind, beta=0.3, desirable_weight=1.3, undesirable_weight=0.8, reference="live", normalize="trl"
    )
    compare(run_ours(a_model(), forge_algos.KTO(settings, reference=a_model(seed=4)), batches), theirs)


def test_reward(tmp_path):
    """A margin a pair, and centring."""
    import trl

    import forge_algos

    rows = {
        "chosen_ids": [p + c for p, c, _ in PAIRS],
        "rejected_ids": [p + r for p, _, r in PAIRS],
        "margin": MARGINS,
    }
    theirs = run_trl(trl.RewardTrainer, trl.RewardConfig, a_model("reward"), rows, tmp_path, center_rewards_coefficient=0.05)
    objective = forge_algos.Reward(forge_algos.RewardSettings(centering=0.05, normalize="trl"))
    compare(run_ours(a_model("reward"), objective, lambda cut: pair_batch(cut, MARGINS)), theirs)


def test_the_global_mean_is_another_one():
    """What is compared above is no accident of equal cuts: the mean over all seven pairs differs."""
    import forge_algos

    of = {
        normalize: run_ours(
            copy.deepcopy(a_model()),
            forge_algos.ORPO(forge_algos.ORPOSettings(beta=0.4, learn_prompt=True, normalize=normalize)),
            pair_batch,
        )
        for normalize in ("global", "trl")
    }
    assert abs(of["global"][0][0] / of["trl"][0][0] - 1) > 1e-3
