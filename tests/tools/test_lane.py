"""A lane that is interrupted goes on where it stopped; one that fails goes on too; other sources start anew."""

import pytest
from lane import Lane, page, table


def case(says, runs):
    def run():
        runs.append(says)
        return {"says": says}

    return run


def test_an_interrupted_lane_goes_on(tmp_path):
    """What was done is not done again, and its results are there."""
    runs = []

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Lane("l", home=tmp_path, sources="s").run({"a": case("a", runs), "b": interrupted, "c": case("c", runs)})
    again = Lane("l", home=tmp_path, sources="s")
    again.run({"a": case("a2", runs), "b": case("b", runs), "c": case("c", runs)})
    assert sorted(runs) == ["a", "b", "c"]
    assert {name: result["says"] for name, result in again.done.items()} == {"a": "a", "b": "b", "c": "c"}


@pytest.mark.parametrize("options", [{"sources": "other"}, {"sources": "s", "fresh": True}])
def test_other_sources_and_a_wish_start_anew(tmp_path, options):
    """A result of other sources is none of these."""
    runs = []
    for chosen in ({"sources": "s"}, options):
        Lane("l", home=tmp_path, **chosen).run({"a": case("a", runs)})
    assert runs == ["a", "a"]


def test_a_half_written_state_is_never_read(tmp_path):
    """The state is replaced, not written over."""
    Lane("l", home=tmp_path, sources="s").run({"a": case("a", [])})
    (tmp_path / "l.tmp").write_text("{")
    assert set(Lane("l", home=tmp_path, sources="s").done) == {"a"}


def test_several_at_a_time(tmp_path):
    """Every case runs once, whatever the number of workers."""
    runs = []
    names = [str(number) for number in range(20)]
    Lane("l", home=tmp_path, sources="s").run({name: case(name, runs) for name in names}, workers=4)
    assert sorted(runs) == sorted(names)


def test_a_page_says_where_it_comes_from(tmp_path):
    """Title, command, date, commit and machine stand above the result."""
    text = page("p", "A title", "hatch run p", table(["a", "b"], [["1", "2"]]), home=tmp_path).read_text()
    assert text.startswith("# A title\n\nWritten by `hatch run p` on 2")
    assert "of commit" in text
    assert "cores" in text
    assert text.endswith("| a | b |\n| --- | --- |\n| 1 | 2 |\n")
