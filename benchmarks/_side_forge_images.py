"""forge's SFT on rows with images as one side of a comparison, combined as in `forge.sft`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from _rows import Rows

_ARRAYS = ("input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen", "weights")


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    import torch

    import forge_algos
    import forge_data
    import forge_packing
    from forge_accel import accelerator
    from forge_dist import load_model

    machine = accelerator(job["device"])
    device = machine.device.value
    # As forge.sft finds: the tokens of an image see each other, which its own attention does not compute.
    model = load_model(job["model"], dtype=torch.float32, device=device, attention="sdpa").train()
    store, inputs = forge_data.TokenStore.open(job["store"]), forge_data.MediaInputs(job["model"])
    each = len(rows.samples[0])
    shown = sorted((store[row] for row in range(each)), key=lambda sample: len(sample.input_ids))[:2]
    spans = [[(image.start, image.stop) for image in sample.media] for sample in shown]
    tried = [forge_algos.MediaDocument(sample.input_ids, inputs(sample), of) for sample, of in zip(shown, spans, strict=True)]
    way, why = forge_algos.pack_media(model, tried, device=device)
    if way != "lines":
        raise SystemExit(f"Gemma 3 was to be trained in lines: {why}")
    settings = forge_algos.OptimizerSettings(learning_rate=job["learning_rate"], lr_scheduler="constant", max_grad_norm=1.0)
    optimizer = forge_algos.make_optimizer(model, settings, fused=machine.fused_optimizer.value)
    threads = ThreadPoolExecutor(2)

    def micro_batch(samples: list[Any]) -> Any:
        row, read = forge_packing.collate(samples), threads.map(inputs, samples)
        return SimpleNamespace(**{name: getattr(row, name) for name in _ARRAYS}, media_inputs=lambda: list(read))

    def steps() -> Iterator[list[Any]]:
        while True:
            for first in range(0, len(store), each):
                lengths = store.lengths[first : first + each]
                (parts,) = forge_packing.divide(lengths, widths=lengths, max_tokens=max(2048, int(lengths.max())))
                yield [micro_batch([store[first + int(at)] for at in part]) for part in parts]

    session.ready()
    objective = forge_algos.SFT()
    for done, output in enumerate(
        forge_algos.train(
            model,
            steps(),
            objective=objective,
            optimizer=optimizer,
            scheduler=forge_algos.schedule(optimizer, settings, num_steps=1_000_000),
            max_grad_norm=settings.max_grad_norm,
            device=device,
        )
    ):
        session.step_done(tokens=rows.tokens(done % len(rows.samples)), loss=output.loss)
