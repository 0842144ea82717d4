"""forge's SFT on conversations, each turn in the form in which it is asked for, as a side of `shared_histories.py`."""

from collections.abc import Iterator
from typing import Any

from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any, *, form: str) -> None:
    """Train until the session ends it.

    Args:
        job: `turns` of a conversation, whose samples stand in a row turn after turn, and then the conversation as one sample.
        rows: the samples.
        session: the benchmark's.
        form: "shared" and "repeated" histories of turns apart, or "whole" conversations.
    """
    from _forge_model import load

    import forge_algos
    from forge_packing import collate, collate_turns

    model, machine, device, dtype = load(job)
    forge_algos.keep_documents_apart(model, device=device)
    assert forge_algos.shares_prompts(model, device=device)[0]
    settings = forge_algos.OptimizerSettings(learning_rate=job["learning_rate"], lr_scheduler="constant", max_grad_norm=1.0)
    optimizer = forge_algos.make_optimizer(model, settings, fused=machine.fused_optimizer.value)
    every = job["turns"] + 1

    def batch(row: int) -> Any:
        samples = rows.samples[row]
        conversations = [samples[at : at + every] for at in range(0, len(samples), every)]
        if form == "whole":
            return collate([conversation[-1] for conversation in conversations])
        return collate_turns([conversation[:-1] for conversation in conversations], share_history=form == "shared")

    def steps() -> Iterator[list[Any]]:
        while True:
            for row in range(len(rows.samples)):
                yield [batch(row)]

    session.ready()
    for output in forge_algos.train(
        model,
        steps(),
        objective=forge_algos.SFT(),
        optimizer=optimizer,
        scheduler=forge_algos.schedule(optimizer, settings, num_steps=1_000_000),
        max_grad_norm=settings.max_grad_norm,
        device=device,
        autocast=lambda: machine.autocast(dtype),
    ):
        session.step_done(tokens=output.tokens, loss=output.loss)
