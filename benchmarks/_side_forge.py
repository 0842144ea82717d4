"""forge's packages as one side of a comparison, combined as in `forge.sft`."""

from collections.abc import Iterator
from typing import Any

from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    from _forge_model import load

    from forge_algos import SFT, AdapterSettings, OptimizerSettings, adamw, adapt, keep_documents_apart, schedule, train
    from forge_packing import PackedBatch, collate

    model, machine, device, dtype = load(job)
    keep_documents_apart(model, device=device)
    if job["adapter"] == "lora":
        machine.seed(0)
        model = adapt(model, AdapterSettings(adapter="lora", lora_r=16, lora_alpha=32.0)).model
    settings = OptimizerSettings(learning_rate=job["learning_rate"], lr_scheduler="constant", max_grad_norm=1.0)
    optimizer = adamw(model, settings, fused=machine.fused_optimizer.value)

    def steps() -> Iterator[list[PackedBatch]]:
        while True:
            for row in rows.samples:
                yield [collate(row)]

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
