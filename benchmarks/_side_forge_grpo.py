"""forge's GRPO as one side of a comparison: rollouts of recorded completions and rewards, as in `forge.grpo`."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    from _forge_model import load

    import forge_algos
    from forge_algos import online

    model, machine, device, dtype = load(job)
    if job["adapter"] == "lora":
        machine.seed(0)
        model = forge_algos.adapt(model, forge_algos.AdapterSettings(adapter="lora", lora_r=16, lora_alpha=32.0)).model

    def autocast() -> Any:
        return machine.autocast(dtype)

    share, _ = forge_algos.shares_prompts(model, device=device)
    each = job["each"]
    own = forge_algos.GRPOSettings(num_generations=each, max_new_tokens=job["tokens"], reward=())
    settings = forge_algos.OptimizerSettings(learning_rate=job["learning_rate"], lr_scheduler="constant", max_grad_norm=1.0)
    optimizer = forge_algos.make_optimizer(model, settings, fused=machine.fused_optimizer.value)

    def steps() -> Iterator[list[Any]]:
        number = 0
        while True:
            samples = rows.samples[number % len(rows.samples)]
            number += 1
            begins = [int(np.argmax(sample.labels != -100)) for sample in samples]
            made = [
                online.Completion(ids=sample.input_ids[at:], finished=True) for sample, at in zip(samples, begins, strict=True)
            ]
            prompts = [
                SimpleNamespace(input_ids=samples[i].input_ids[: begins[i]], prompt="", columns={})
                for i in range(0, len(samples), each)
            ]
            scores = [int(completion.ids.sum()) % 97 / 97 for completion in made]
            rollout = online.make_rollout(
                model,
                SimpleNamespace(sample=lambda *_args, made=made, **_kwargs: made),
                prompts,
                settings=own,
                rewards=[online.Reward(name="recorded", function=lambda scores=scores, **_: scores)],
                decode=lambda _ids: "",
                max_tokens=job["row_tokens"],
                seed=0,
                device=device,
                autocast=autocast,
                share_prompts=share,
            )
            yield from online.rollout_batches(rollout, max_tokens=job["row_tokens"], share_prompts=share)

    session.ready()
    for done, output in enumerate(
        forge_algos.train(
            model,
            steps(),
            objective=forge_algos.GRPO(own),
            optimizer=optimizer,
            scheduler=forge_algos.schedule(optimizer, settings, num_steps=1_000_000),
            max_grad_norm=settings.max_grad_norm,
            device=device,
            autocast=autocast,
        )
    ):
        session.step_done(tokens=sum(rows.lengths(done % len(rows.samples))), computed=output.tokens, loss=output.loss)
