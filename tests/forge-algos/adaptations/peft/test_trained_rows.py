"""Rows of new tokens and whole modules beside LoRA: PEFT's own training of them is the oracle."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from forge_algos import SFT, AdapterError, AdapterSettings, OptimizerSettings, adapt, make_optimizer, schedule, train

from ...oracle import VOCAB, distance, gradients, make, naive, pack, samples

NEW = (VOCAB - 3, VOCAB - 1)
ROWS = samples([6, 9, 4], learned=1.0)
LORA = AdapterSettings(adapter="lora", lora_r=3, lora_alpha=5.0)
EMBED, HEAD = ["embed_tokens"], ["embed_tokens", "lm_head"]
ENDS = {"llama-tied": EMBED, "llama-untied": HEAD, "gemma3": EMBED, "qwen3": HEAD}
every = pytest.mark.parametrize("architecture", ENDS)


def with_new_tokens():
    """Rows in which the new tokens stand, and are learned."""
    rows = [(ids.copy(), labels.copy()) for ids, labels in ROWS]
    for number, (ids, labels) in enumerate(rows):
        ids[[1, -1]] = labels[[1, -1]] = NEW[number % 2]
    return rows


def ours_and_pefts(architecture, settings, **arguments):
    """The same model under `adapt` and under plain PEFT, from one seed."""
    models = []
    for made in ("ours", "theirs"):
        model = make(architecture)
        torch.manual_seed(3)
        if made == "ours":
            models.append(adapt(model, settings, new_tokens=NEW).model)
        else:
            models.append(
                get_peft_model(
                    model,
                    LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5.0, target_modules="all-linear", **arguments),
                )
            )
    return models


def check_step(ours, theirs):
    """The loss and every gradient of a step are those of plain PEFT, one document at a time."""
    rows = with_new_tokens()
    total, count = naive(theirs, rows)
    (total / count).backward()
    settings = OptimizerSettings(learning_rate=1e-3, weight_decay=0.0)
    optimizer = make_optimizer(ours, settings)
    found = {}
    optimizer.register_step_pre_hook(lambda *_: found.update(gradients(ours)))
    (out,) = train(
        ours,
        [[pack(rows)]],
        objective=SFT(),
        optimizer=optimizer,
        scheduler=schedule(optimizer, settings, num_steps=1),
        max_grad_norm=1e9,
    )
    assert out.loss == pytest.approx((total / count).item(), rel=1e-6)
    assert distance(found, gradients(theirs)) < 1e-5
    return found


@every
def test_new_tokens_train_as_pefts_token_rows(architecture):
    """By default the new tokens' rows train beside LoRA, of a tied embedding and head once: loss and gradients are PEFT's."""
    rows = {name: list(NEW) for name in ENDS[architecture]}
    ours, theirs = ours_and_pefts(architecture, LORA, trainable_token_indices=rows)
    found = check_step(ours, theirs)
    assert sum("trainable_tokens_delta" in name for name in found) == len(rows)
    assert all(p.requires_grad == ("lora_" in n or "trainable_tokens" in n) for n, p in ours.named_parameters())


@pytest.mark.parametrize("architecture", ["llama-tied", "llama-untied"])
def test_modules_that_train_whole(architecture):
    """modules_to_save trains whole modules beside LoRA; a tie is kept, and the new rows are among them."""
    names = ENDS[architecture]
    tie = {"ensure_weight_tying": True} if architecture == "llama-tied" else {}
    settings = AdapterSettings(adapter="lora", lora_r=3, lora_alpha=5.0, modules_to_save=names)
    ours, theirs = ours_and_pefts(architecture, settings, modules_to_save=list(names), **tie)
    found = check_step(ours, theirs)
    assert sum("modules_to_save" in name for name in found) == len(names)
    assert not any("trainable_tokens" in name for name in found)


@every
def test_saved_rows_load_in_plain_peft_and_merge(architecture, tmp_path):
    """After a step the saved adapter gives the same logits in plain PEFT, and merged; switched off it gives the base's."""
    base = make(architecture).eval()
    ids = torch.tensor([[5, NEW[0], 7, NEW[1], 9]])
    with torch.no_grad():
        before = base(input_ids=ids).logits
    ours = adapt(copy.deepcopy(base), LORA, new_tokens=NEW).model
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        ours.eval()
        logits = ours(input_ids=ids).logits
        with ours.disable_adapter():
            torch.testing.assert_close(ours(input_ids=ids).logits, before)
        ours.save_pretrained(tmp_path, save_embedding_layers=False)
        loaded = PeftModel.from_pretrained(base, tmp_path).eval()
        torch.testing.assert_close(loaded(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loaded.merge_and_unload()(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, before)


def test_rows_and_copies_beside_a_base_in_bfloat16():
    """What trains is float32 beside a base in 16 bits, and what it gives the layers around it has their dtype."""
    for names in (None, EMBED, ["lm_head", "embed_tokens"]):
        settings = AdapterSettings(adapter="lora", lora_r=3, modules_to_save=names)
        model = adapt(make("llama-untied").to(torch.bfloat16), settings, new_tokens=NEW).model
        trained = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
        assert set(trained.values()) == {torch.float32}
        assert model(input_ids=torch.tensor([[5, NEW[0]]])).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"adapter": "lora", "modules_to_save": ["embed_token"]},
            r"embed_token matches no module .* Did you mean embed_tokens",
        ),
        ({"adapter": "lora", "modules_to_save": ["layers.0.mlp"]}, r"model\.layers\.0\.mlp\.gate_proj is a target"),
        ({"adapter": "ia3"}, r"beside LoRA, and not beside ia3"),
        ({"adapter": "ia3", "modules_to_save": ["embed_tokens"]}, r"rows of lm_head beside LoRA"),
    ],
)
def test_what_cannot_train_is_refused(settings, message):
    """A name without a module, a module with targets in it, and an adapter that trains no rows are named."""
    with pytest.raises(AdapterError, match=message):
        adapt(make("llama-untied"), AdapterSettings(**settings), new_tokens=NEW)


def test_ia3_cannot_keep_a_tie():
    """PEFT's ia3 has no way to train a tied embedding and head as one."""
    with pytest.raises(AdapterError, match="share one weight"):
        adapt(make("llama-tied"), AdapterSettings(adapter="ia3", modules_to_save=EMBED))


def test_a_head_with_a_bias_is_refused():
    """PEFT's rows of a head leave its bias out."""
    model = make("llama-untied")
    model.lm_head = torch.nn.Linear(16, VOCAB, bias=True)
    with pytest.raises(AdapterError, match="the head lm_head has a bias"):
        adapt(model, LORA, new_tokens=NEW)
