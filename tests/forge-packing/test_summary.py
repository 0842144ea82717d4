"""summary: a few lines whose numbers can be checked by hand."""

from forge_packing import plan


def test_one_rank():
    """Samples, steps, epochs, tokens, micro-batches against the bound, fill."""
    made = plan([6, 6, 6, 2], batch_size=3, max_tokens=10, shuffle=False, loss_counts=[5, 5, 0, 0], epochs=2)
    assert made.summary().splitlines() == [
        "samples        8 (4 in the data), in the order of the data",
        "steps          4 of at most 3 samples, 2 epochs",
        "tokens         40, a step 2 to 18",
        "loss tokens    20, a step 0 to 10; steps with none: 2",
        "micro-batches  8 on 1 rank, lower bound 6; at most 3 a step",
        "fill           50.0% of 10 tokens",
    ]


def test_several_ranks():
    """The bound is for one rank, rounded up where the ranks are; empty micro-batches count as room not filled."""
    made = plan([6, 6, 6], batch_size=3, max_tokens=10, world_size=2, seed=4)
    assert made.summary().splitlines() == [
        "samples        3 (3 in the data), shuffled by seed 4",
        "steps          1 of at most 3 samples, 1 epoch",
        "tokens         18, a step 18 to 18",
        "micro-batches  2 on each of 2 ranks, lower bound 1; at most 2 a step",
        "fill           45.0% of 10 tokens",
    ]
