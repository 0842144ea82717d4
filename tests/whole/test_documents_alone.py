"""Models that cannot keep packed documents apart train on each alone, with the losses of the reference."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forge
import forge_algos
import forge_data
import forge_dist

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import three_steps, tiny
from .conftest import write_rows
from .three_steps import figures, oracle, rows
from .verbs import run_verb, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable

PACKED = {
    "gemma2: capped scores",
    "gpt-oss: sinks, and a mask made without positions",
    "llama4: chunked attention",
    "opt: positions from the mask",
}
"""Those that document attention or eager keeps apart."""
LEAKING = sorted(tiny.OTHER_CONFIGS.keys() - PACKED)
QWEN = "qwen3.5: a state, and an error of transformers"
BY_LAYERS = {"lfm2: a convolution", QWEN}
"""Those packed, of which only the layers with a state or a convolution run documents apart."""
MAMBA, BLOOM = "mamba2: a state", "bloom: distances over the whole row"
SETTINGS: dict[str, Any] = {**three_steps.SETTINGS, "validation_split": 0.2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ci_keeps([BLOOM, QWEN], LEAKING))
def test_losses_are_those_of_one_document_at_a_time(name: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Losses and gradient norms of three steps are the reference's; the log and config.yaml say that documents ran alone."""
    run, model = tmp_path / "run", saved(name)
    forge.sft(model_path=str(model), data_path=str(rows(tmp_path)), ckpt_output_dir=str(run), **SETTINGS)
    expected = oracle(run, tiny.plain(str(model)), held_out=0.2)
    assert figures(run, "loss") == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    log = (run / "log.txt").read_text()
    if name in BY_LAYERS:
        assert "apart; 1 layer with a state or a convolution, run document by document" in log
        return
    assert "documents are run alone" in log
    assert re.search(r"packing: \d+ forwards of the decoder for \d+ micro-batches, 1\.\d\d places a token", log)
    assert "packing: 'off'  # chosen" in (run / "config.yaml").read_text().replace('"', "'")


@pytest.mark.slow
@pytest.mark.parametrize("name", ci_keeps([BLOOM], sorted({*LEAKING} - BY_LAYERS)))
def test_a_packed_row_is_refused_where_it_is_asked_for(name: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """packing=on says why it cannot be, and what can be; nothing is written."""
    run = tmp_path / "run"
    with pytest.raises(Exception, match=r"packing=on: .*packing=auto") as raised:
        forge.sft(
            model_path=str(saved(name)), data_path=str(rows(tmp_path)), ckpt_output_dir=str(run), packing="on", **SETTINGS
        )
    assert raised.value.exit_status == 2  # type: ignore[attr-defined]
    assert "another attention" not in str(raised.value)  # one remedy, which works
    assert ".." not in str(raised.value)
    assert not run.exists()


@pytest.mark.slow
def test_what_packing_will_be_is_known_before_data_are_read(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small random model of the same configuration shows it: the log says so first, and packing=on reads no row."""
    given = {"model_path": str(saved(BLOOM)), "data_path": str(rows(tmp_path)), **SETTINGS}
    forge.sft(**given, ckpt_output_dir=str(tmp_path / "run"))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert 0 < log.index("as a small random model of this configuration shows") < log.index("read 13 rows")

    def prepare(*_: Any, **__: Any) -> None:
        raise AssertionError("rows were read")

    monkeypatch.setattr(forge_data, "prepare", prepare)
    with pytest.raises(forge_algos.PackedBatchError, match=r"packing=on: BloomForCausalLM"):
        forge.sft(**given, ckpt_output_dir=str(tmp_path / "other"), packing="on")


@pytest.mark.slow
def test_a_model_that_cannot_run_alone_either(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names both reasons, and nothing is written."""
    monkeypatch.setattr("forge_algos.isolation._alone._is_exact", lambda *_: False)
    with pytest.raises(
        forge_algos.PackedBatchError, match=r"keep packed documents apart.*cannot run alone either.*plain forward"
    ):
        forge.sft(
            model_path=str(saved(MAMBA)), data_path=str(rows(tmp_path)), ckpt_output_dir=str(tmp_path / "run"), **SETTINGS
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_model_that_was_refused_is_freed(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded in another way the one before is gone: there is memory for one."""
    keep, draft, seen = forge_algos.keep_documents_apart, forge_dist.draft_model, []
    small: weakref.WeakSet[Any] = weakref.WeakSet()

    def watched(model: Any, **how: Any) -> Any:
        # A small random model, which is tried first, takes no memory to speak of.
        if model not in small:
            assert [earlier() for earlier in seen] == [None] * len(seen)
            seen.append(weakref.ref(model))
        return keep(model, **how)

    def drafted(*given: Any, **how: Any) -> Any:
        made = draft(*given, **how)
        small.add(made)
        return made

    monkeypatch.setattr(forge_algos, "keep_documents_apart", watched)
    monkeypatch.setattr(forge_dist, "draft_model", drafted)
    forge.sft(model_path=str(saved(BLOOM)), data_path=str(rows(tmp_path)), ckpt_output_dir=str(tmp_path / "run"), **SETTINGS)
    assert len(seen) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    ci_keeps(
        ["sft", "dpo", "grpo"],
        ["sft", "osft", "pretrain", "distill", "dpo", "kto", "reward", "ppo", "grpo"],
    ),
)
def test_every_verb_has_the_same_losses_packed_or_not(verb: str, model_dir: Path, tmp_path: Path) -> None:
    """A model that can be packed gives the same steps with packing=off."""
    found = {}
    for packing in ("on", "off"):
        run = tmp_path / packing
        settings = settings_of(verb, model_dir, tmp_path) | {"packing": packing, "ckpt_output_dir": str(run)}
        eval_after = run_verb(verb, settings, str(tmp_path))["eval_after"]
        found[packing] = figures(run, "loss"), figures(run, "grad_norm"), eval_after
    on, off = found["on"], found["off"]
    assert len(on[0]) == 4
    # The loss of a rollout's first step is zero but for rounding.
    assert off[0] == pytest.approx(on[0], rel=1e-5, abs=1e-6)
    assert off[1] == pytest.approx(on[1], rel=1e-4)
    assert off[2] == pytest.approx(on[2], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("teacher", "student"),
    ci_keeps([(BLOOM, "llama-untied")], [(BLOOM, "llama-untied"), ("llama-untied", MAMBA)]),
)
def test_a_teacher_of_another_family(teacher: str, student: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """A teacher that cannot be packed, or that has no attention of the student's kind, runs its rows as it can."""
    result = forge.distill(
        model_path=str(saved(student)),
        teacher_path=str(saved(teacher)),
        data_path=str(rows(tmp_path)),
        ckpt_output_dir=str(tmp_path / "run"),
        **SETTINGS,
    )
    assert result.steps == 3
    kl = figures(tmp_path / "run", "loss")
    assert kl[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ci_keeps(["lora"], ["lora", "osft"]))
def test_adapters(adapter: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Adapters are attached around documents that run alone, are exported and loaded back, and the run is resumed."""
    given = {"model_path": str(saved(BLOOM)), "data_path": str(rows(tmp_path)), "adapter": adapter, **SETTINGS}
    given |= {"lora_r": 4} if adapter == "lora" else {"unfreeze_rank_ratio": 0.5}
    whole = forge.sft(ckpt_output_dir=str(tmp_path / "whole"), **given)
    forge.sft(
        ckpt_output_dir=str(tmp_path / "parts"),
        **(given | {"max_steps": 1, "full_state_every_steps": 1, "keep_full_state": True}),
    )
    again = forge.sft(ckpt_output_dir=str(tmp_path / "parts"), **(given | {"full_state_every_steps": 1}))
    assert again.loss == pytest.approx(whole.loss, rel=1e-6)
    assert figures(tmp_path / "parts", "loss") == pytest.approx(figures(tmp_path / "whole", "loss"), rel=1e-6)


def run_in_small_forwards(verb: str, settings: dict[str, Any], path: str) -> dict[str, Any]:
    """Run a verb with forwards of few documents, so that ranks need different numbers of them."""
    from forge_algos.isolation import _rows

    _rows._SMALL = 1
    return run_verb(verb, settings, path)


CUTS = [("fsdp2", 2), ("fsdp2", 4), ("ddp", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world_size", "name"),
    # Mamba 2 reads the weight of its convolution without calling it, which ZeRO-3 does not gather then.
    ci_keeps(
        [("fsdp2", 2, BLOOM)],
        [
            *((strategy, ranks, name) for name in (MAMBA, QWEN) for strategy, ranks in CUTS),
            *((strategy, 2, BLOOM) for strategy in ("fsdp2", "zero3")),
        ],
    ),
)
def test_ranks_with_unequal_numbers_of_documents(
    strategy: str, world_size: int, name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where every forward is collective, a rank with one document makes as many as one with seven, and losses are equal."""
    lengths = [50, 4, 7, 3, 9, 5, 11, 6, 45, 8, 2, 10]
    data = write_rows(
        tmp_path / "rows.jsonl",
        [{"input_ids": s.input_ids, "labels": s.labels} for s in (tiny.sample(S, S) for S in lengths)],
    )
    given = {
        **{name: value for name, value in SETTINGS.items() if name != "validation_split"},
        "model_path": str(saved(name)),
        "data_path": str(data),
        "effective_batch_size": 12,
    }
    run_verb("sft", given | {"ckpt_output_dir": str(tmp_path / "one")})
    divided = given | {"ckpt_output_dir": str(tmp_path / "many"), "strategy": strategy}
    run_on_ranks(run_in_small_forwards, world_size, "sft", divided, str(tmp_path), joined=False)
    assert figures(tmp_path / "many", "loss") == pytest.approx(figures(tmp_path / "one", "loss"), rel=1e-5)
    assert figures(tmp_path / "many", "grad_norm") == pytest.approx(figures(tmp_path / "one", "grad_norm"), rel=1e-4)
