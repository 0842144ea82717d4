"""GGUF files: what stands in them, and the proof that they are the model."""

import os

import numpy as np
import pytest
import torch
import transformers

from forge_dist import ExportError, ModelError, check_gguf, export_gguf, refuse_gguf
from forge_dist.gguf._architectures import ARCHITECTURES
from forge_dist.gguf._layout import gguf_tensors, model_fields

from ..gguf_models import CHATML, MODELS, SIZES, model_of, tokenizer_of

gguf = pytest.importorskip("gguf", reason="gguf is an extra of forge-dist: pip install 'forge-dist[gguf]'")
pytest.importorskip("accelerate", reason="transformers reads GGUF files only where accelerate is")

ROWS = [[5, 6, 7, 8, 9, 10, 11], [3, 60, 2, 59, 1, 58, 0, 57, 33, 21, 20, 300, 200], [42, 17]]


def written(path, name="llama-tied", dtype="float32", tokenizer=None):
    """A model, its file, and what both were made with."""
    given = {"tokenizer": tokenizer or tokenizer_of(), "dtype": dtype, "name": "tiny"}
    model = model_of(name)
    return model, export_gguf(model, path / "model.gguf", **given), given


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_reads_back(tmp_path, name):
    """Every tensor by its bits, and the logits exactly: rows of rotated heads, biases, norms of queries, scaled rotary
    embeddings.
    """
    model, file, given = written(tmp_path, name)
    told = []
    found = check_gguf(model, file, ROWS, **given, doing=told.append)
    assert told == ["loading model.gguf with transformers", "comparing the logits of model.gguf with those of the model"]
    assert found.difference == found.exact == 0.0
    assert found.tensors == len(gguf.GGUFReader(file).tensors)


@pytest.mark.parametrize(("dtype", "most"), [("float16", 1e-2), ("bfloat16", 5e-2), ("q8_0", 5e-2)])
def test_types_that_round(tmp_path, dtype, most):
    """Matrices are of the type that was asked for, vectors float32; rounding shows in the logits and nowhere else."""
    model, file, given = written(tmp_path, "qwen2", dtype)
    found = check_gguf(model, file, ROWS, **given)
    assert 0 < found.difference < most
    assert found.exact == 0.0
    kinds = {tensor.tensor_type.name: len(tensor.shape) for tensor in gguf.GGUFReader(file).tensors}
    assert kinds == {"F32": 1, {"float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype]: 2}


@pytest.mark.parametrize("dtype", ["q5_1", "q5_0", "q4_1", "q4_0"])
def test_types_of_few_bits(tmp_path, dtype):
    """Each matrix is of the type but for the embedding, which is q8_0; the reloaded values are the file's."""
    model, file, given = written(tmp_path, "qwen2", dtype)
    found = check_gguf(model, file, ROWS, **given)
    assert found.matrices == {"q8_0": 1, dtype: 14}
    assert found.exact == 0.0 < found.difference < found.tolerance == 2.0
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert (kinds["token_embd.weight"], kinds["blk.1.attn_q.weight"]) == ("Q8_0", dtype.upper())


def test_rounding_may_choose_other_experts(tmp_path):
    """A router's choice is another one by a last bit, and moves the logits far: the file holds the model all the same."""
    model, tokenizer = model_of("gpt_oss", seed=3), tokenizer_of("qwen2")
    rows = [torch.randint(3, 380, (60,), generator=torch.Generator().manual_seed(3)).tolist() for _ in range(2)]
    given = {"tokenizer": tokenizer, "dtype": "q8_0", "name": "tiny"}
    file = export_gguf(model, tmp_path / "m.gguf", **given)
    found = check_gguf(model, file, rows, **given)
    assert found.exact == 0.0
    assert 0.3 < found.difference < found.tolerance


def test_mxfp4_is_for_experts(tmp_path):
    """Experts are mxfp4 and the other matrices q8_0; a model without any is refused before a file is there."""
    model, file, given = written(tmp_path, "qwen3_moe", "mxfp4")
    # Of two layers gates, ups and downs; queries, keys, values and outputs, and the embedding; routers.
    assert check_gguf(model, file, ROWS, **given).matrices == {"mxfp4": 6, "q8_0": 9, "float32": 2}
    file.unlink()
    with pytest.raises(ModelError, match="mxfp4 is the type of experts, and this llama model has none"):
        written(tmp_path, dtype="mxfp4")
    assert not list(tmp_path.iterdir())


def test_rows_that_no_block_divides_are_halves(tmp_path):
    """Of q8_0, rows that are no multiple of 32 long are written as float16."""
    config = MODELS["qwen2"](400)
    config.intermediate_size = 80
    model = transformers.Qwen2ForCausalLM(config)
    given = {"tokenizer": tokenizer_of(), "dtype": "q8_0", "name": "tiny"}
    found = check_gguf(model, export_gguf(model, tmp_path / "m.gguf", **given), ROWS, **given)
    assert found.halves == 2  # of two layers
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")


def test_no_matrix_for_blocks_is_refused(tmp_path):
    """A model of which nothing can be q8_0 gives no file that only says so."""
    config = MODELS["llama-tied"](400)
    config.hidden_size, config.head_dim, config.intermediate_size = 40, 10, 72
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(ModelError, match="no matrix of this model can be q8_0.*take dtype=float16"):
        export_gguf(model, tmp_path / "m.gguf", tokenizer=tokenizer_of(), dtype="q8_0", name="tiny")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MODELS)
def test_what_can_be_written_is_not_refused_beforehand(tmp_path, name):
    """Nor is a base with fewer rows than the tokenizer has ids, where an adapter has those of new tokens."""
    MODELS[name](400).save_pretrained(tmp_path)
    given = {"tokenizer": tokenizer_of(), "dtype": "q8_0", "where": tmp_path / "m.gguf"}
    refuse_gguf(str(tmp_path), **given)
    few = len(given["tokenizer"]) - 1
    MODELS[name](few).save_pretrained(tmp_path)
    refuse_gguf(str(tmp_path), **given, adapter=True)
    with pytest.raises(ModelError, match=f"m.gguf: the tokenizer has the id {few}, and the model {few} embeddings"):
        refuse_gguf(str(tmp_path), **given)
    with pytest.raises(ModelError, match="ForSequenceClassification"):
        refuse_gguf(str(tmp_path), **given, task="reward")


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_window_that_no_layer_has_cuts_no_context(tmp_path, name):
    """Qwen's configurations keep a window for layers from max_window_layers on, which may be none."""
    for first, length in ((2, 256), (1, 128)):
        config = type(MODELS[name](400))(
            **SIZES, vocab_size=400, use_sliding_window=True, sliding_window=128, max_window_layers=first
        )
        assert model_fields(config, ARCHITECTURES[name])[f"{name}.context_length"] == length


def test_rows_are_compared_within_a_window(tmp_path):
    """Of a window shorter than the rows only what lies in it: beyond, readers compute something else."""
    config = MODELS["mistral"](400)
    config.sliding_window = 4
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).eval()
    given = {"tokenizer": tokenizer_of(), "dtype": "float32", "name": "tiny"}
    assert check_gguf(model, export_gguf(model, tmp_path / "m.gguf", **given), ROWS, **given).exact < 1e-5


def test_what_the_fields_say(tmp_path):
    """The model, the tokenizer and its template stand under the keys that readers look for."""
    _, file, _ = written(tmp_path, "mistral", tokenizer=tokenizer_of("llama-bpe", begins=True))
    found = {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}
    assert found["general.architecture"] == "llama"
    assert found["general.name"] == "tiny"
    # Beyond its window of 128 Mistral looks away, which readers do not.
    assert found["llama.context_length"] == 128
    assert (found["llama.attention.head_count"], found["llama.attention.head_count_kv"]) == (4, 2)
    assert found["tokenizer.ggml.pre"] == "llama-bpe"
    assert len(found["tokenizer.ggml.tokens"]) == found["llama.vocab_size"] == 400
    assert found["tokenizer.ggml.tokens"][-1] == "[PAD399]"
    assert found["tokenizer.ggml.token_type"][:3] == [3, 3, 3]
    assert found["tokenizer.ggml.token_type"][-1] == 5
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert (found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.add_eos_token"]) == (True, False)
    assert found["tokenizer.chat_template"] == CHATML


def test_tied_weights_stand_once(tmp_path):
    """The head is there where it is a weight of its own."""
    for name, tied in (("llama-tied", True), ("llama3", False)):
        (tmp_path / name).mkdir()
        _, file, _ = written(tmp_path / name, name)
        assert ("output.weight" in {tensor.name for tensor in gguf.GGUFReader(file).tensors}) is not tied


@pytest.mark.parametrize("name", MODELS)
def test_tensors_of_a_file_are_the_models_own_memory(tmp_path, name):
    """Whatever their order there: a model is not in memory twice while it is written."""
    model = model_of(name)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    arch = ARCHITECTURES[model.config.model_type]
    parts = [tensor.part for tensor in gguf_tensors(model, arch, tmp_path).values()]
    assert {part.untyped_storage().data_ptr() for part in parts} <= own


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_can_be_put_back(tmp_path, name):
    """The tensors of a file fill another model to the bit, though rows of rotated heads are in another order there, experts
    divided, and norms more by 1 (which rounds them).
    """
    model, other = model_of(name), model_of(name, seed=1)
    arch = ARCHITECTURES[model.config.model_type]
    there = gguf_tensors(model, arch, tmp_path)
    for key, tensor in gguf_tensors(other, arch, tmp_path).items():
        tensor.fill(there[key].values().clone())
    found = other.state_dict()
    for key, tensor in model.state_dict().items():
        rounded = arch.norms_from_zero and key.endswith("norm.weight")
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=2**-23 if rounded else 0)
    query = model.state_dict().get("model.layers.0.self_attn.q_proj.weight")
    assert query is None or torch.equal(there["blk.0.attn_q.weight"].values(), query) is not arch.neighbours


def test_a_byte_that_differs_is_found(tmp_path):
    """The last byte of the last tensor, changed on the disk, is one too many; so is another field."""
    model, file, given = written(tmp_path)
    with pytest.raises(ExportError, match=r"field general\.name is tiny instead of other"):
        check_gguf(model, file, ROWS, **(given | {"name": "other"}))
    last = gguf.GGUFReader(file).tensors[-1]
    content = bytearray(file.read_bytes())
    content[last.data_offset] ^= 1
    file.write_bytes(content)
    with pytest.raises(ExportError, match=f"the tensor {last.name} is not the one in memory"):
        check_gguf(model, file, ROWS, **given)
    file.write_bytes(content[:100])
    with pytest.raises(ExportError, match="cannot be read back"):
        check_gguf(model, file, ROWS, **given)


def test_rows_in_the_wrong_order_are_found(tmp_path, monkeypatch):
    """A file whose writer and whose own reader agree on a wrong order computes something else in
    transformers: that is found.
    """
    monkeypatch.setattr("forge_dist.gguf._layout._rotated_heads", lambda *_: 0)
    model, file, given = written(tmp_path)
    with pytest.raises(ExportError, match=r"loads a tensor blk\.0\.attn_[qk]\.weight that is not the one in the file"):
        check_gguf(model, file, ROWS, **given)


def test_a_file_of_the_same_name_elsewhere_is_not_read(tmp_path, monkeypatch):
    """transformers takes a GGUF file of the working directory before that of the folder it is given; this does not."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    written(here, "qwen2")
    monkeypatch.chdir(here)
    model, file, given = written(there)
    assert check_gguf(model, file, ROWS, **given).difference == 0.0


def test_nothing_is_written_over(tmp_path):
    """A file that is there stays."""
    model, file, given = written(tmp_path)
    before = os.stat(file)
    with pytest.raises(ExportError, match="exists already"):
        export_gguf(model, file, **given)
    assert os.stat(file).st_mtime_ns == before.st_mtime_ns


def gpt_oss(sizes, **yarn):
    """A model with YaRN's numbers."""
    rotary = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64, **yarn}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **experts, head_dim=8, rope_parameters=rotary))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda c: transformers.CohereForCausalLM(transformers.CohereConfig(**c)),
            "known are .* llama, mistral, qwen2, qwen3, ",
        ),
        (lambda c: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**c)), "known are causal"),
        (lambda c: transformers.LlamaForCausalLM(transformers.LlamaConfig(**c, attention_bias=True)), "attention_bias"),
        (lambda c: transformers.LlamaForCausalLM(transformers.LlamaConfig(**c, hidden_act="gelu")), "hidden_act='gelu'"),
        (lambda c: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**c, head_dim=16)), "head_dim=16 of this qwen2"),
        (
            lambda c: transformers.Qwen3ForCausalLM(
                transformers.Qwen3Config(**c, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
            ),
            "rope_type='linear'",
        ),
        (
            lambda c: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**c, head_dim=8, query_pre_attn_scalar=9)),
            "query_pre_attn_scalar=9 of this gemma3_text",
        ),
        (
            lambda c: transformers.Gemma2ForCausalLM(
                transformers.Gemma2Config(**c, query_pre_attn_scalar=256, attn_logit_softcapping=None)
            ),
            "attn_logit_softcapping=None of this gemma2",
        ),
        (
            lambda c: transformers.Gemma3ForCausalLM(
                transformers.Gemma3TextConfig(**c, head_dim=8, query_pre_attn_scalar=8, use_bidirectional_attention=True)
            ),
            "use_bidirectional_attention=True",
        ),
        (
            lambda c: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**c, layer_types=["full_attention"])),
            "layer_types=",
        ),
        (lambda c: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**c)), "norm_topk_prob=False of this qwen3_"),
        (
            lambda c: transformers.Qwen3MoeForCausalLM(
                transformers.Qwen3MoeConfig(**c, norm_topk_prob=True, decoder_sparse_step=2)
            ),
            "decoder_sparse_step=2",
        ),
        (lambda c: gpt_oss(c), "truncate=True of this gpt_oss"),
        (lambda c: gpt_oss(c, truncate=False, mscale=1.0, mscale_all_dim=0.5), "mscale=1.0 of this gpt_oss"),
        (
            lambda c: transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**c, no_rope_layer_interval=1)),
            r"no_rope_layers=\[0\]",
        ),
        (
            lambda c: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**c, tie_word_embeddings=True)),
            "tie_word_embeddings",
        ),
    ],
)
def test_what_gguf_cannot_say_is_refused_by_name(tmp_path, make, match):
    """Architectures that are not known, and settings that a reader would not find; nothing is written."""
    sizes = {"vocab_size": 400, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = make(sizes | {"num_key_value_heads": 1, "pad_token_id": 2})
    with pytest.raises(ModelError, match=match):
        export_gguf(model, tmp_path / "m.gguf", tokenizer=tokenizer_of(), dtype="float32", name="tiny")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "dtype", "why"),
    [(float("nan"), "q4_0", "number that is NaN"), (-7e4, "q4_1", "number of 70000, which q4_1 cannot hold: .*bfloat16")],
)
def test_numbers_that_a_type_cannot_hold(tmp_path, number, dtype, why):
    """They are named with their tensor, and half of a file is not left."""
    model = model_of("qwen2")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = number
    with pytest.raises(ModelError, match=rf"m.gguf: the tensor blk.0.ffn_up.weight has a {why}"):
        export_gguf(model, tmp_path / "m.gguf", tokenizer=tokenizer_of(), dtype=dtype, name="tiny")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ends", "eot", "eom"), [([1, 2], 2, None), (2, 2, None), (1, None, None), ([2, 1, 7], 2, 7), (None, None, None)]
)
def test_several_ends_of_an_answer(tmp_path, ends, eot, eom):
    """A model that ends a turn, a call of a tool and a text with different tokens says each; 1 is the tokenizer's own."""
    model = model_of("llama-tied")
    model.generation_config.eos_token_id = ends
    export_gguf(model, tmp_path / "m.gguf", tokenizer=tokenizer_of(), dtype="float32", name="tiny")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    found = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    assert [field and field.contents() for field in found] == [eot, eom]


def test_chat_templates_by_name(tmp_path):
    """Those of a tokenizer that has several stand under their names, as the gguf library writes them."""
    model, tokenizer = model_of("llama-tied"), tokenizer_of()
    default = tokenizer.chat_template
    tokenizer.chat_template = {"default": default, "tool_use": "tools" + default, "r-a.g": "rag"}
    given = {"tokenizer": tokenizer, "dtype": "float32", "name": "tiny"}
    file = export_gguf(model, tmp_path / "m.gguf", **given)
    check_gguf(model, file, ROWS, **given)
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_chat_template([{"name": name, "template": text} for name, text in tokenizer.chat_template.items()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = [
        {key: field.contents() for key, field in gguf.GGUFReader(each).fields.items() if "chat_template" in key}
        for each in (file, tmp_path / "theirs.gguf")
    ]
    assert len(found[0]) == 4
    assert sorted(found[1].pop("tokenizer.chat_templates")) == found[0].pop("tokenizer.chat_templates")
    assert found[0] == found[1]


def test_q8_0_is_what_the_gguf_library_makes(tmp_path):
    """Blocks of 32 numbers: the library's own rounding, to the byte, of a tensor that needs no other order."""
    model, file, _ = written(tmp_path, "qwen2", "q8_0")
    weight = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    found = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.1.ffn_up.weight")
    values = gguf.dequantize(found.data, found.tensor_type)
    assert np.abs(values - weight).max() <= np.abs(weight).max() / 127


SHORT = {"qwen2_moe", "phi3-long"}
"""Models of which every field is tried in CI; the others in the lane."""

NOT_FELT = {"context_length", "attention.value_length", "rope.dimension_count", "rope.scaling.original_context_length"}
"""Fields in which a reader finds nothing that changes the logits of short rows."""


@pytest.mark.parametrize("name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.lane) for name in MODELS])
def test_a_field_with_another_value_is_found(tmp_path, monkeypatch, name):
    """Where writer and check agree on it, the logits say so, or the file does not load: nothing else does for each field."""
    model = model_of(name)
    given = {"tokenizer": tokenizer_of(), "dtype": "float32", "name": "tiny"}
    arch = ARCHITECTURES[model.config.model_type]
    right = model_fields(model.config, arch)
    found, numbers = set(), {key: value for key, value in right.items() if isinstance(value, int | float)}
    for key, value in numbers.items():
        wrong = right | {key: value * 2 if isinstance(value, int) else value * 1.5 + 0.01}
        monkeypatch.setattr("forge_dist.gguf._export.model_fields", lambda *_, wrong=wrong: wrong)
        file = tmp_path / f"{key}.gguf"
        try:
            check_gguf(model, export_gguf(model, file, **given), ROWS, **given)
        except (ExportError, RuntimeError):  # the latter where sizes contradict each other in the model's forward
            found.add(key)
        file.unlink()
    unfelt = NOT_FELT | ({"feed_forward_length"} if "expert_count" in arch.integers else set()) | set(arch.constants)
    missed = {key.removeprefix(f"{arch.name}.") for key in numbers.keys() - found}
    assert missed <= unfelt
