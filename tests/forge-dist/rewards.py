"""Reward models on ranks: what each rank loads, trains, exports and finds; and the same in one process."""

from pathlib import Path

import torch

from .divided import SAMPLES, changed, strategy_of

ROWS = [ids for ids, _ in SAMPLES]


def rewards(model):
    """One unpadded row at a time, without an end that is looked for: at the last token."""
    base = getattr(model, "module", model)
    config, pad = base.config, base.config.pad_token_id
    config.pad_token_id = None
    with torch.no_grad():
        found = [model(input_ids=torch.tensor([row]), use_cache=False).logits.item() for row in ROWS]
    config.pad_token_id = pad
    return found


def padded(model, pad):
    """All rows in one batch, padded on the right, as plain transformers is called."""
    longest = max(map(len, ROWS))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in ROWS])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ROWS])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits.flatten().tolist()


def with_lora(model):
    """A LoRA adapter of rank 2 on `model`, whose head is trained whole, from a seed."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = LoraConfig(
            r=2, target_modules=["q_proj", "up_proj"], task_type="SEQ_CLS", modules_to_save=["score"], init_lora_weights=False
        )
        return get_peft_model(model, config)


def loaded(ranks, name, paths):
    """what → (rank 0's whole weights, the next random number, rewards) of each of the directories, and of a frozen model."""
    strategy = strategy_of(ranks, name)
    found = {}
    for what, path in paths.items():
        torch.manual_seed(5)
        model = strategy.load(path, dtype=torch.float32, task="reward")
        after = torch.rand(1).item()
        with strategy.computing(model):
            values = rewards(model)
        found[what] = ({n: t.clone() for n, t in strategy.whole(model) if t is not None}, after, values)
    return found


def exported(ranks, names, path, directory):
    """name → (ExportCheck, whether a changed head is seen) of a full reward model and of an adapter,
    after a step; all ranks.
    """
    import forge_dist

    found = {}
    for name in names:
        for lora in (False, True):
            strategy = strategy_of(ranks, name, adapter=lora)
            torch.manual_seed(5)
            model = strategy.load(path, dtype=torch.float32, task="reward")
            if lora:
                strategy.settle(model)
                model = with_lora(model)
            wrapped, optimizer = strategy.wrap(model, adamw)
            wrapped.train()
            strategy.zero_grad(optimizer)
            with strategy.micro_batch(last=True):
                value = wrapped(input_ids=torch.tensor(ROWS[:1]), use_cache=False).logits.square().sum()
                strategy.backward(value / strategy.world_size)
            strategy.step(optimizer)
            where = Path(directory, f"{name}-{lora}")
            forge_dist.export_model(wrapped, where, strategy=strategy)
            check = forge_dist.check_export(wrapped, where, SAMPLES, strategy=strategy)
            names_of = dict(wrapped.named_parameters())
            changed(p for n, p in names_of.items() if "score" in n and p.requires_grad)
            try:
                forge_dist.check_export(wrapped, where, SAMPLES, strategy=strategy)
                reported = ""
            except forge_dist.ExportError as error:
                reported = str(error)
            found[name, lora] = check, reported, wrapped.training
    return found


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
