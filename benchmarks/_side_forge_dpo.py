"""forge's DPO as one side of a comparison, combined as in `forge.dpo`; the reference is scored before the measurement."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    from _forge_model import load

    import forge_algos
    from forge_packing import collate_groups

    model, machine, device, dtype = load(job)
    if job["adapter"] == "lora":
        machine.seed(0)
        model = forge_algos.adapt(model, forge_algos.AdapterSettings(adapter="lora", lora_r=16, lora_alpha=32.0)).model

    def autocast() -> Any:
        return machine.autocast(dtype)

    share, _ = forge_algos.shares_prompts(model, device=device)

    def groups(row: int) -> Any:
        samples = rows.samples[row]
        pairs = [samples[i : i + 2] for i in range(0, len(samples), 2)]
        return collate_groups(pairs, share_prompt=share and job["share"], share_prefix=share and job["share"])

    numbers = range(len(rows.samples))
    scored = forge_algos.reference_logps(model, (groups(row) for row in numbers), device=device, autocast=autocast)
    references = [np.asarray(logps) for logps in scored]
    settings = forge_algos.OptimizerSettings(learning_rate=job["learning_rate"], lr_scheduler="constant", max_grad_norm=1.0)
    optimizer = forge_algos.make_optimizer(model, settings, fused=machine.fused_optimizer.value)
    real = [sum(rows.lengths(row)) for row in numbers]

    def steps() -> Iterator[list[Any]]:
        while True:
            for row in numbers:
                yield [forge_algos.PreferenceBatch(groups=groups(row), ref_logps=references[row])]

    session.ready()
    for done, output in enumerate(
        forge_algos.train(
            model,
            steps(),
            objective=forge_algos.DPO(forge_algos.DPOSettings()),
            optimizer=optimizer,
            scheduler=forge_algos.schedule(optimizer, settings, num_steps=1_000_000),
            max_grad_norm=settings.max_grad_norm,
            device=device,
            autocast=autocast,
        )
    ):
        # Tokens of both completions, each prompt counted twice whatever went through the model: those that the user trains on.
        session.step_done(tokens=real[done % len(real)], computed=output.tokens, loss=output.loss)
