"""forge's packages as one side of a comparison, combined as in `forge.sft`.

Prefixes that samples of a row have in common are computed once, as there, unless the job's `share` is False.
"""

from collections.abc import Iterator
from typing import Any

from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    from _forge_model import load

    import forge_algos
    from forge_accel import CompiledBlocks
    from forge_algos import SFT, AdapterSettings, OptimizerSettings, adamw, adapt, keep_documents_apart, schedule, train
    from forge_packing import collate, collate_shared

    model, machine, device, dtype = load(job)
    keep_documents_apart(model, device=device)
    if job["adapter"] == "lora":
        machine.seed(0)
        model = adapt(model, AdapterSettings(adapter="lora", lora_r=16, lora_alpha=32.0)).model
    pack: Any = collate
    if job.get("share", True) and forge_algos.shares_prompts(model, device=device, autocast=lambda: machine.autocast(dtype))[0]:
        pack = collate_shared
    if (backend := machine.compiling(job.get("compile", "auto")).value) is not None:
        CompiledBlocks(forge_algos.repeated_blocks(model), backend=backend, own_hooks=True)
    settings = OptimizerSettings(learning_rate=job["learning_rate"], lr_scheduler="constant", max_grad_norm=1.0)
    optimizer = adamw(model, settings, fused=machine.fused_optimizer.value)

    def steps() -> Iterator[list[Any]]:
        while True:
            for row in rows.samples:
                yield [pack(row)]

    session.ready()
    for output in train(
        model,
        steps(),
        objective=SFT(),
        optimizer=optimizer,
        scheduler=schedule(optimizer, settings, num_steps=1_000_000),
        max_grad_norm=settings.max_grad_norm,
        device=device,
        autocast=lambda: machine.autocast(dtype),
    ):
        session.step_done(tokens=output.tokens, loss=output.loss)
