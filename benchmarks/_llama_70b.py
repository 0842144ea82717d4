"""Names and shapes of a Llama 3.1 70B, and what a rank holds of it and of AdamW's state, without a tensor."""

from collections.abc import Iterator
from functools import cache

from forge_dist.checkpoints._plan import Piece

WIDTH, INNER, KEYS, VOCABULARY, LAYERS = 8192, 28672, 1024, 128256, 80


@cache
def shapes(layers: int = LAYERS) -> dict[str, list[int]]:
    """Return name → shape of every weight; 70.6 billion numbers at 80 layers."""
    found = {"model.embed_tokens.weight": [VOCABULARY, WIDTH]}
    for index in range(layers):
        layer = f"model.layers.{index}."
        found |= {f"{layer}self_attn.{name}_proj.weight": [WIDTH, WIDTH] for name in "qo"}
        found |= {f"{layer}self_attn.{name}_proj.weight": [KEYS, WIDTH] for name in "kv"}
        found |= {f"{layer}mlp.{name}_proj.weight": [INNER, WIDTH] for name in ("gate", "up")}
        found |= {f"{layer}mlp.down_proj.weight": [WIDTH, INNER]}
        found |= {f"{layer}{name}_layernorm.weight": [WIDTH] for name in ("input", "post_attention")}
    return found | {"model.norm.weight": [WIDTH], "lm_head.weight": [VOCABULARY, WIDTH]}


def pieces(rank: int, ranks: int, copies: int, layers: int = LAYERS) -> dict[str, Piece]:
    """Return what a rank holds, divided over `ranks // copies` ranks along the first dimension as FSDP does it."""
    return dict(_pieces(rank % (ranks // copies), ranks // copies, layers))


def _pieces(part: int, parts: int, layers: int) -> Iterator[tuple[str, Piece]]:
    for name, shape in shapes(layers).items():
        rows = -(-shape[0] // parts)
        mine = max(0, min(rows, shape[0] - part * rows))
        if mine:
            piece = Piece("F32", shape, [part * rows, *[0] * (len(shape) - 1)], [mine, *shape[1:]])
            for key in (f"model/{name}", f"optimizer/{name}/exp_avg", f"optimizer/{name}/exp_avg_sq"):
                yield key, piece
        yield f"optimizer/{name}/step", Piece("F32", [], [], [])
