"""Weights → singular vectors: accuracy, determinism, cache files, division over ranks."""

import os

import pytest
import torch
from hypothesis import given, strategies as st

from forge_algos import AdapterError
from forge_algos.adaptations.base._adaptation import OneRank
from forge_algos.adaptations.osft import _bases as _osft_bases
from forge_algos.adaptations.osft._bases import bases_of, decompose, walk_bases

from ....ranks import run_on_ranks

ONE = OneRank()


def matrix(N, M, *, seed=0, decades=1.5):
    """A float32[N, M] with singular values that fall by `decades`, in random directions."""
    random, d = torch.Generator().manual_seed(seed), min(N, M)
    U, V = (torch.linalg.qr(torch.randn(n, d, generator=random, dtype=torch.float64)).Q for n in (N, M))
    return (U * torch.logspace(0, -decades, d, dtype=torch.float64) @ V.T).float()


def off_orthonormal(U):
    """The largest entry of UᵀU − 1."""
    return float((U.double().T @ U.double() - torch.eye(U.shape[1])).abs().max()) if U.shape[1] else 0.0


@given(
    N=st.integers(1, 40),
    M=st.integers(1, 40),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    rank=st.sampled_from([0, 1, 2, 40]),
    decades=st.sampled_from([0, 1.5, 3.9, 4.1, 7, 30]),
)
def test_exact_is_the_decomposition(N, M, seed, dtype, rank, decades):
    """U S Vh is W to float32's rounding, as measured here and as reported in `error`.
    U and Vh are orthonormal and S is LAPACK's, also of low ranks, of 0, and of singular values that are lost in rounding.
    """
    W = matrix(N, M, seed=seed, decades=decades)
    W = (W[:, :rank] @ W[:rank] if rank < min(N, M) else W).to(dtype)
    found = decompose(W, protected=0, svd="exact")
    d, size = min(N, M), float(W.double().norm())
    assert (found.U.shape, found.S.shape, found.Vh.shape) == ((N, d), (d,), (d, M))
    assert {found.U.dtype, found.S.dtype, found.Vh.dtype} == {torch.float32}
    off = float((found.U.double() * found.S.double() @ found.Vh.double() - W.double()).norm())
    assert off <= 1e-6 * size
    assert found.error * size == pytest.approx(off, rel=1e-6)
    assert max(off_orthonormal(found.U), off_orthonormal(found.Vh.T)) < 1e-6
    torch.testing.assert_close(found.S.double(), torch.linalg.svdvals(W.double()), rtol=1e-6, atol=1e-7 * size)
    assert (found.S.diff() <= 0).all()


def test_the_same_matrix_gives_the_same_bytes():
    """Bases do not depend on memory layout, dtype of the values or random state."""
    W = matrix(40, 24).bfloat16()
    ways = [W, W.T.contiguous().T, W.float(), torch.cat([W, W], 1)[:, :24]]
    for svd in ("exact", "randomized"):
        prints = set()
        for way in ways:
            torch.randn(3)
            prints.add(decompose(way, protected=3, svd=svd).fingerprint)
        assert len(prints) == 1
    assert decompose(W.float() * 1.01, protected=3, svd="exact").fingerprint not in prints


def test_signs_are_fixed():
    """The largest entry of each column of U is positive, which fixes the sign of each pair."""
    found = decompose(matrix(30, 30), protected=0, svd="exact")
    assert (found.U.gather(0, found.U.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize(("N", "M"), [(160, 160), (160, 256), (256, 160)])
def test_randomized_finds_the_protected_directions(N, M):
    """k triplets have residuals below 1e-3 of σ_k, as bounded in `error`.
    They are orthonormal, with the exact singular values.
    """
    W, k = matrix(N, M, decades=3), 8
    found, true = decompose(W, protected=k, svd="randomized"), decompose(W, protected=k, svd="exact")
    assert found.note == ""
    assert (found.U.shape, found.Vh.shape) == ((N, k), (k, M))
    wide = W.double()
    U, S, Vh = found.U.double(), found.S.double(), found.Vh.double()
    residual = max(float((wide @ Vh.T - U * S).norm()), float((wide.T @ U - Vh.T * S).norm()))
    assert residual <= 1.001e-3 * float(S[-1])
    assert found.error == pytest.approx(residual / float(wide.norm()), rel=1e-3)
    assert max(off_orthonormal(found.U), off_orthonormal(found.Vh.T)) < 1e-6
    torch.testing.assert_close(found.S, true.S[:k], rtol=1e-5, atol=0)
    # The same subspaces: nothing of the true ones is outside of those found, but what the residual allows beside the gap.
    assert float((true.U[:, : k - 2].T @ found.U).norm()) == pytest.approx((k - 2) ** 0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("W", "protected", "note"),
    [
        (matrix(64, 48), 20, "exact, because 20 of 48 directions are too many"),
        (matrix(200, 128, decades=0.05), 20, "exact, because 64 directions from a random start left a residual of"),
        (torch.zeros(96, 96), 12, "exact, because 48 directions from a random start left a residual of inf"),
    ],
)
def test_randomized_falls_back_with_a_reason(W, protected, note):
    """Where half of all directions do not converge, the exact result and a note are returned."""
    found = decompose(W, protected=protected, svd="randomized")
    assert found.note.startswith(note)
    assert found.fingerprint == decompose(W, protected=protected, svd="exact").fingerprint


def test_a_weight_with_nan_is_named():
    """NaN and infinity have no singular vectors: refused by the weight's name."""
    W = matrix(8, 8)
    W[3, 4] = float("nan")
    with pytest.raises(AdapterError, match=r"a\.b holds NaN"):
        bases_of({"a.b": W}, {"a.b": 2}, svd="exact", cache=None, ranks=ONE)
    with pytest.raises(AdapterError, match="NaN"):
        decompose(W, protected=2, svd="exact")


@pytest.fixture
def counted(monkeypatch):
    """The list of `protected` of each decomposition that was computed."""
    found = []

    def decompose(*args, **kwargs):
        found.append(kwargs["protected"])
        return original(*args, **kwargs)

    original = _osft_bases.decompose
    monkeypatch.setattr(_osft_bases, "decompose", decompose)
    return found


def same(ours, theirs):
    return all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in ("U", "S", "Vh"))


def test_cached_bases_are_not_computed_again(tmp_path, counted):
    """The same matrices are decomposed once, under any name.
    Exact bases serve any number of directions, randomised ones the number that they were computed for.
    """
    weights = {"q": matrix(40, 40), "up": matrix(60, 40)}
    cache = tmp_path / "osft" / "bases"
    first = bases_of(weights, {"q": 30, "up": 30}, svd="exact", cache=cache, ranks=ONE)
    assert list(first) == ["q", "up"]
    again = bases_of({"other": weights["q"], "up": weights["up"]}, {"other": 5, "up": 0}, svd="exact", cache=cache, ranks=ONE)
    assert len(counted) == 2
    assert same(first["q"], again["other"])
    assert (first["up"].fingerprint, first["up"].error) == (again["up"].fingerprint, again["up"].error)
    for protected in (3, 4, 4):
        bases_of({"q": weights["q"]}, {"q": protected}, svd="randomized", cache=cache, ranks=ONE)
    bases_of({"q": weights["q"].double()}, {"q": 3}, svd="exact", cache=cache, ranks=ONE)
    bases_of({"q": weights["q"] + 1e-7}, {"q": 3}, svd="exact", cache=cache, ranks=ONE)
    bases_of({"q": weights["q"].reshape(20, 80)}, {"q": 3}, svd="exact", cache=cache, ranks=ONE)
    assert len(counted) == 2 + 2 + 3
    assert sorted(path.suffix for path in cache.iterdir()) == [".safetensors"] * 7


def torn(path, _other):
    path.write_bytes(path.read_bytes()[:-100])


def altered(path, _other):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def another_matrix(path, other):
    path.write_bytes(other.read_bytes())


def altered_header(path, _other):
    content = path.read_bytes()
    at = content.index(b'"error":"') + len(b'"error":"')
    path.write_bytes(content[:at] + b"9" + content[at + 1 :])


def emptied(path, _other):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (torn, "is not whole"),
        (emptied, "is not whole"),
        (altered, "was altered"),
        (altered_header, "was altered"),
        (another_matrix, "belongs to another"),
    ],
)
def test_a_bad_file_is_computed_again(tmp_path, counted, damage, word):
    """A torn, altered or renamed file is never used.
    It is computed again, the note has the reason, and the file is good afterwards.
    """
    W = matrix(12, 8)
    first = bases_of({"q": W}, {"q": 3}, svd="exact", cache=tmp_path, ranks=ONE)["q"]
    (path,) = tmp_path.iterdir()
    bases_of({"q": W + 1}, {"q": 3}, svd="exact", cache=tmp_path, ranks=ONE)
    (other,) = (found for found in tmp_path.iterdir() if found != path)
    damage(path, other)
    anew = bases_of({"q": W}, {"q": 3}, svd="exact", cache=tmp_path, ranks=ONE)["q"]
    assert len(counted) == 3
    assert word in anew.note
    assert "computed anew" in anew.note
    assert same(first, anew)
    third = bases_of({"q": W}, {"q": 3}, svd="exact", cache=tmp_path, ranks=ONE)["q"]
    assert (len(counted), third.note) == (3, "")


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    """The error names the directory and the setting to change."""
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterError, match=r"cannot be kept in .*file.*osft_cache"):
        bases_of({"q": matrix(8, 8)}, {"q": 3}, svd="exact", cache=tmp_path / "file", ranks=ONE)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    """A disk that is full during fsync leaves neither the file nor a part of it."""

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AdapterError, match="No space left"):
        bases_of({"q": matrix(8, 8)}, {"q": 3}, svd="exact", cache=tmp_path, ranks=ONE)
    assert not list(tmp_path.iterdir())


def test_the_largest_come_first():
    """Bases are computed from the largest matrix down, so that ranks have similar work.
    The dict has the order of the weights.
    """
    weights = {"k": matrix(4, 8), "up": matrix(16, 8), "q": matrix(8, 8)}
    asked = dict.fromkeys(weights, 1)
    assert [name for name, _ in walk_bases(weights, asked, svd="exact", cache=None, ranks=ONE)] == ["up", "q", "k"]
    assert list(bases_of(weights, asked, svd="exact", cache=None, ranks=ONE)) == list(weights)


WEIGHTS = {
    f"layers.{i}.{name}": shape for i in range(2) for name, shape in {"q": (16, 16), "k": (8, 16), "up": (24, 16)}.items()
}


def on_rank(ranks, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks.world_size,))
    plain = {name: matrix(*shape, seed=i) for i, (name, shape) in enumerate(WEIGHTS.items())}
    divided = {name: torch.nn.Parameter(distribute_tensor(W, mesh, [Shard(0)])) for name, W in plain.items()}
    asked, computed = dict.fromkeys(plain, 3), []
    original = _osft_bases.decompose
    _osft_bases.decompose = lambda *args, **kwargs: computed.append(1) or original(*args, **kwargs)
    results = []
    try:
        for weights, cache in [(plain, None), (divided, folder), (divided, folder), (divided, folder / str(ranks.rank))]:
            computed.clear()
            found = bases_of(weights, asked, svd="exact", cache=cache, ranks=ranks)
            results.append(({name: (b.U, b.S, b.Vh, b.fingerprint, b.error) for name, b in found.items()}, len(computed)))
        errors = []
        plain["layers.1.q"][0, 0] = float("inf")
        try:
            bases_of(plain, asked, svd="exact", cache=None, ranks=ranks)
        except AdapterError as error:
            errors.append(str(error))
    finally:
        _osft_bases.decompose = original
    return results, errors, len(list(folder.glob("*.safetensors")))


@pytest.mark.slow
@pytest.mark.together
def test_ranks_share_the_work(tmp_path):
    """Two ranks compute half each and end with what one process has.
    Of whole and divided weights; with no cache, one that both see, or one of each: the same bits on both ranks. A bad weight
    stops both ranks.
    """
    pytest.importorskip("forge_dist", reason="joins the ranks")
    first, second = run_on_ranks(on_rank, 2, tmp_path)
    plain = {name: matrix(*shape, seed=i) for i, (name, shape) in enumerate(WEIGHTS.items())}
    alone = bases_of(plain, dict.fromkeys(plain, 3), svd="exact", cache=None, ranks=ONE)
    for (results, errors, files), (others, _, _) in ((first, second), (second, first)):
        assert [count for _, count in results] == [3, 3, 0, 3]
        assert errors == ["layers.1.q holds NaN or infinity; it has no singular vectors. Look at the model's files"]
        assert files == 6
        for (found, _), (other, _) in zip(results, others, strict=True):
            assert list(found) == list(plain)
            for name, (U, S, Vh, fingerprint, error) in found.items():
                # The same bits on both ranks; another process rounds in an order of its own.
                assert all(torch.equal(mine, theirs) for mine, theirs in zip((U, S, Vh), other[name][:3], strict=True))
                for mine, theirs in ((U, alone[name].U), (S, alone[name].S), (Vh, alone[name].Vh)):
                    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
                assert fingerprint == other[name][3] == alone[name].fingerprint
                assert error == other[name][4] == pytest.approx(alone[name].error, rel=1e-2)
