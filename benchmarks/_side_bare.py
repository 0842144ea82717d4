"""A bare PyTorch loop as one side: transformers' model, `F.cross_entropy` on the labelled positions, fused AdamW, clipping.

It has nothing of forge but the attention function that forge_accel chose, so that the rest is compared. Its logits are [P, V]
for the P labelled positions of a row, held at once.
"""

from typing import Any

from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    import numpy as np
    import torch
    from _forge_model import load

    loaded = load(job)
    device, model = loaded.device, loaded.model
    if job["adapter"] == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    causal_lm = model.get_base_model() if job["adapter"] == "lora" else model
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job["learning_rate"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)
    session.ready()
    while True:
        for row in rows.samples:
            lengths = [len(s.input_ids) for s in row]
            input_ids = torch.from_numpy(np.concatenate([s.input_ids for s in row])).to(device, torch.int64)[None]
            targets = torch.from_numpy(np.concatenate([np.append(s.labels[1:], -100) for s in row])).to(device, torch.int64)
            position_ids = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device)[None]
            ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
            where = (targets != -100).nonzero().squeeze(1)
            with loaded.accelerator.autocast(loaded.dtype):
                hidden = causal_lm.base_model(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    use_cache=False,
                    cu_seq_lens_q=ends,
                    cu_seq_lens_k=ends,
                    max_length_q=max(lengths),
                    max_length_k=max(lengths),
                ).last_hidden_state[0]
                logits = causal_lm.lm_head(hidden[where])
            loss = torch.nn.functional.cross_entropy(logits.float(), targets[where])
            del logits, hidden
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            session.step_done(tokens=sum(lengths), loss=loss.item())
