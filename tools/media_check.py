"""One model family, one kind of rows, one check → what forge makes of a tiny random model of it, beside plain transformers.

`python tools/media_check.py FAMILY KIND CHECK` prints the answer. The oracles are those of tests/whole: plain transformers in
float32 with eager attention and the model's own processor, one conversation a forward, and a trainer written out.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch

# media_parts imports torchvision, which must come before transformers.
from media_configs import AUDIO, VIDEO, Family, families
from media_parts import pictures
from media_rows import Rows, ask_for_videos, same_arrays
from transformers import AutoConfig, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM
from transformers.utils import logging

import forge
import forge_data
import forge_packing
from forge_algos import online
from tests.whole import (
    reference,
    test_images_of_answers as rated_answers,
    test_images_of_pairs as pairs,
    test_images_of_teachers as teachers,
    test_images_online as prompted,
)
from tests.whole.policies import logits, oracle as updates
from tests.whole.three_steps import SETTINGS, figures, samples

CLOSE = {"loss": 1e-5, "gradients": 1e-4}
"""Largest relative differences of a step's loss and of its gradient norm."""
TIE = 1e-3
"""Two tokens whose logits differ by less are equally likely, at ten times the temperature of `likeliest`."""


def all_parts(kinds: frozenset[str]) -> dict[str, Any]:
    """Return settings with which all parts train that rows with media of some kinds reach."""
    towers = {"freeze_vision_tower": kinds == {AUDIO}, "freeze_audio_tower": AUDIO not in kinds}
    return towers | {"freeze_multi_modal_projector": False, "save_dtype": "float32"}


Answer = dict[str, Any]
"""`ok`, `says` (a few words), and figures: `rows` (how they share a forward), `loss`, `gradients`, both of the `first` step."""
Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def _class(config: Any) -> Any:
    """Return the Auto class of a model; Audio Flamingo 3, a decoder, is listed with models of encoder and decoder."""
    return AutoModelForMultimodalLM if type(config) in AutoModelForMultimodalLM._model_mapping else AutoModelForSeq2SeqLM


def save(family: Family, folder: Path, seed: int = 20) -> Path:
    """Save the tiny model with random weights that bfloat16 holds, and its processor."""
    config, processor = family.make()
    torch.manual_seed(seed)
    model = _class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = (parameter + 0.1 * torch.randn_like(parameter)).to(torch.bfloat16)
    for each in (model, processor, processor.tokenizer):
        each.save_pretrained(folder)
    return folder


# --- plain transformers -----------------------------------------------------------------------------------------------------


def plain(model: Path, *, whole: bool = False) -> Any:
    """Load the model as plain transformers; its language part trains, or the `whole` of it.

    What its class freezes stays so (Qwen2-Audio's sinusoids), which `from_pretrained` forgets.
    """
    auto = _class(AutoConfig.from_pretrained(model))
    found = auto.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    made = dict(auto.from_config(found.config).named_parameters())
    for name, parameter in found.named_parameters():
        parameter.requires_grad_(whole and made[name].requires_grad)
    if not whole:
        for part in (found.get_decoder(), found.get_output_embeddings()):
            part.requires_grad_(requires_grad=True)
    return _counting_media(found)


def _counting_media(model: Any) -> Any:
    """Have Qwen-Omni count marks of media behind which none stands as text, as forge does; by itself it fails on such a text.

    A model with random weights draws them.
    """
    own, config = getattr(model.model, "get_rope_index", None) if hasattr(model, "model") else None, model.config
    marks = [getattr(config, f"{name}_start_token_id", None) for name in ("vision", "audio")]
    if own is None or None in marks:
        return model
    media = torch.tensor([getattr(config, f"{name}_token_id") for name in ("image", "video", "audio")])

    @wraps(own)
    def positions(input_ids: torch.Tensor, *given: Any, **more: Any) -> Any:
        begins = torch.isin(input_ids, torch.tensor(marks))
        before = torch.cat([torch.isin(input_ids, media)[:, 1:], torch.zeros_like(begins[:, :1])], 1)
        return own(torch.where(begins & ~before, 0, input_ids), *given, **more)

    model.model.get_rope_index = positions
    return model


def planned(run: Path) -> tuple[forge_data.TokenStore, Any]:
    """Return the rows that a run trained on, and its plan."""
    return forge_data.TokenStore.open(run / "data" / "train"), forge_packing.BatchPlan.load(run / "plan" / "plan.npz")


def compare(run: Path, model: Path, expected: Steps, least: float = 0.0) -> Answer:
    """Compare losses and gradient norms of a run; of a loss beside it, or `least` where that is more."""
    found = list(zip(figures(run), figures(run, "grad_norm"), strict=True))
    assert len(found) == len(expected), f"{len(found)} steps, and {len(expected)} of plain transformers"
    losses = [abs(ours[0] - theirs[0]) / max(abs(theirs[0]), least) for ours, theirs in zip(found, expected, strict=True)]
    norms = [abs(ours[1] / theirs[1] - 1) for ours, theirs in zip(found, expected, strict=True)]
    loss, gradients = max(losses), max(norms)
    first = losses[0], norms[0]
    assert np.isfinite([loss, gradients]).all(), f"{found}, and of plain transformers {expected}"
    return {
        "ok": _close(loss, gradients),
        "says": f"loss {loss:.0e}, gradients {gradients:.0e}",
        "loss": loss,
        "gradients": gradients,
        "first": first,
        "rows": _rows(run, model),
    }


def _close(loss: float, gradients: float) -> bool:
    return loss < CLOSE["loss"] and gradients < CLOSE["gradients"]


_WAYS = {"several in a row": "packed", "several in a forward, padded": "padded", "one sample a row": "one a row"}


def _rows(run: Path, model: Path) -> str:
    """Return how samples share a forward, as the log says it."""
    said = re.findall(rf"(?:images|audio|videos)[a-z, ]*: ({'|'.join(_WAYS)})", (run / "log.txt").read_text(encoding="utf-8"))
    way = _WAYS[said[-1]]
    return f"{way}, arrays padded" if way != "one a row" and forge_data.MediaInputs(model).pads else way


# --- the checks -------------------------------------------------------------------------------------------------------------


def sft(family: Family, rows: Rows, home: Path, *, whole: bool = False) -> Answer:
    """Two steps of `forge sft`, of the language part or of all parts."""
    model, data = save(family, home / "model"), rows.conversations()
    settings = {**SETTINGS, "max_steps": 2, "effective_batch_size": 6, "max_tokens_per_gpu": family.tokens}
    more = {**all_parts(rows.kinds), **family.parts} if whole else {}
    run = forge.sft(**settings | more, model_path=str(model), data_path=str(data), ckpt_output_dir=str(home / "run")).output_dir
    store, plan = planned(run)
    inputs = rows.inputs_of(model, data)
    if rows.kind == VIDEO:
        same_arrays(store, model, inputs)
    batches = [samples(store, plan.samples(step).tolist(), inputs) for step in range(plan.num_steps)]
    recipe = reference.Recipe(1e-3, 2, lr_scheduler="constant", max_grad_norm=0.5)
    steps = reference.train(plain(model, whole=whole), batches, recipe, lambda _name, _parameter: False)
    return compare(run, model, [(step.loss, step.grad_norm) for step in steps])


def _verb(verb: str, family: Family, data: Path, home: Path, **settings: Any) -> Path:
    """Run two steps of a verb without held-out rows."""
    own = {name: value for name, value in settings.items() if name != "validation_split"}
    own |= {"max_steps": 2, "max_tokens_per_gpu": 2 * family.tokens, "data_path": str(data), "moe_aux_loss": "off"}
    run = getattr(forge, verb)(**own, model_path=str(home / "model"), ckpt_output_dir=str(home / "run"))
    found: Path = run.output_dir
    return found


def dpo(family: Family, rows: Rows, home: Path) -> Answer:
    """Two steps of `forge dpo`."""
    model, data = save(family, home / "model"), rows.preferences()
    run = _verb("dpo", family, data, home, **pairs.GIVEN, beta=pairs.BETA)
    (store, plan), tuned = planned(run), plain(model)
    known = rows.pairs_of(store, data, model)
    with torch.no_grad():
        references = [pairs.terms(tuned, pair) for pair in known]

    def loss(taken: list[int]) -> torch.Tensor:
        return pairs.dpo([pairs.terms(tuned, known[at]) for at in taken], [references[at] for at in taken])

    return compare(run, model, pictures.steps(tuned, plan, loss))


def kto(family: Family, rows: Rows, home: Path) -> Answer:
    """Two steps of `forge kto`, around the KL of mismatched answers."""
    model, data = save(family, home / "model"), rows.rated()
    run = _verb("kto", family, data, home, **rated_answers.GIVEN)
    (store, plan), tuned = planned(run), plain(model)
    answers = rows.answers(store, data, model)
    references = answers.references(tuned)
    return compare(run, model, pictures.steps(tuned, plan, lambda taken: answers.loss(tuned, taken, *references)))


def distill(family: Family, rows: Rows, home: Path) -> Answer:
    """Two steps of `forge distill`, from a teacher of other weights."""
    model, data = save(family, home / "model"), rows.conversations()
    teacher = save(family, home / "teacher", seed=21)
    run = _verb("distill", family, data, home, **teachers.GIVEN, teacher_path=str(teacher))
    (store, plan), tuned, other = planned(run), plain(model), plain(teacher)
    known = samples(store, list(range(len(store))), rows.inputs_of(model, data))
    steps = pictures.steps(tuned, plan, lambda taken: teachers.divergence(tuned, other, [known[at] for at in taken]))
    return compare(run, model, steps, least=0.1)


def grpo(family: Family, rows: Rows, home: Path, *, whole: bool = False) -> Answer:
    """Two rollouts of `forge grpo`, two updates on each; what is drawn too, and the likeliest tokens."""
    model, data = save(family, home / "model"), rows.prompts()
    sys.path.insert(0, str(data.parent))
    given = prompted.GIVEN | prompted.OWN["grpo"] | ({**all_parts(rows.kinds), **family.parts} if whole else {})
    given |= {"max_tokens_per_gpu": 12 * family.tokens, "moe_aux_loss": "off"}
    run = forge.grpo(**given, model_path=str(model), data_path=str(data), ckpt_output_dir=str(home / "run")).output_dir
    asked = prompted.asked(data, model)
    never = forge_data.MediaInputs(model).token_ids
    expected = updates(run, plain(model, whole=whole).eval(), plain(model).eval(), asked, never)
    found = compare(run, model, expected, least=0.1)
    return found if whole else found | likeliest(model, data, asked, home)


def likeliest(model: Path, data: Path, asked: Sequence[dict[str, torch.Tensor]], home: Path) -> Answer:
    """Sample the likeliest tokens, prompts one by one, in batches and three times each: those of `generate`.

    Returns which prompts stand beside others, and whether one is computed once for its completions.
    """
    store = forge_data.prepare_prompts(data, str(model), home / "store", media=True)
    inputs, tuned = forge_data.MediaInputs(model), plain(model).eval()
    known = prompted.sampled_media(inputs, store)
    eos, never = forge_data.load_tokenizer(model).eos_token_id, [*known.token_ids]
    media = [partial(inputs, each) if each.media else None for each in store]
    draw = partial(online.GenerateSampler, tuned, eos_ids=[eos], pad_id=0, media=known)
    expected = []
    for prompt in asked:
        greedy = {"do_sample": False, "eos_token_id": eos, "suppress_tokens": never, "pad_token_id": 0}
        made = tuned.generate(**prompt, max_new_tokens=prompted.OPTIONS["max_new_tokens"], **greedy)
        expected.append(made[0, prompt["input_ids"].shape[1] :].tolist())
    ids = [each.input_ids for each in store]
    for tokens, several in ((1, 1), (10_000, 1), (10_000, 3)):
        sampler = draw(batch_tokens=tokens)
        drawn = sampler.sample(ids, num_generations=several, temperature=1e-4, media=media, **prompted.OPTIONS)
        for number, one in enumerate(drawn):
            at = number // several
            gap = _gap(tuned, asked[at], expected[at], one.ids.tolist())
            assert gap < TIE, f"prompt {at}, {several} times in {tokens} tokens: a token drawn is less likely by {gap:.1e}"
    return {"beside": sampler._beside, "shared": bool(sampler._shares_media)}


def _gap(tuned: Any, prompt: dict[str, torch.Tensor], expected: list[int], drawn: list[int]) -> float:
    """Return by how much the first token that differs is less likely, in logits; 0 where none does."""
    at = next((at for at, (one, other) in enumerate(zip(drawn, expected, strict=False)) if one != other), None)
    if at is None:
        return 0.0 if len(drawn) == len(expected) else np.inf
    with torch.no_grad():
        scores = logits(tuned, prompt, expected)[at]
    return float(scores[expected[at]] - scores[drawn[at]])


CHECKS: dict[str, Callable[[Family, Rows, Path], Answer]] = {
    "sft": sft,
    "all_parts": partial(sft, whole=True),
    "dpo": dpo,
    "kto": kto,
    "distill": distill,
    "grpo": grpo,
    "grpo_all_parts": partial(grpo, whole=True),
}


def answers(name: str, kind: str, check: str) -> Answer:
    """Check a family in a folder that goes afterwards."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    family = families(kind)[name]
    if kind == VIDEO:
        ask_for_videos()
    with tempfile.TemporaryDirectory() as home:
        (folder := Path(home) / "rows").mkdir()
        try:
            found = CHECKS[check](family, Rows(family, kind, folder), Path(home))
        except Exception as error:  # noqa: BLE001 - whatever it is is what is to be said of the family
            return _failed(error, family.refused.get(check), home)
    if check in family.refused:
        return found | {"ok": False, "says": f"not refused, and {family.refused[check]!r} was to be said"}
    return found | {"ok": _close(*found["first"])} if check in family.drifts else found


def _failed(error: Exception, wanted: str | None, home: str) -> Answer:
    """Return what an error says: the family is refused where forge ends with one that names what is wanted."""
    says = f"{type(error).__name__}: {' '.join(str(error).replace(f'{home}/', '').split())[:400]}"
    refused = getattr(error, "exit_status", None) == 2
    return {"ok": refused and wanted is not None and wanted in says, "says": says, "refused": refused}


def main(arguments: Sequence[str]) -> None:
    """Print one answer."""
    print(json.dumps(answers(*arguments), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
