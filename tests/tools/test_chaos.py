"""The lane of random faults replaces its own section of docs/parity.md and nothing else."""

from chaos import with_section


def test_the_section_is_replaced():
    """A page without one gets it at its end; one that has it has the new one."""
    page = "# Measured parity\n\nText.\n"
    first = with_section(page, "## Random faults\n\nOne.\n")
    assert first == "# Measured parity\n\nText.\n\n## Random faults\n\nOne.\n"
    assert with_section(first, "## Random faults\n\nTwo.\n") == first.replace("One", "Two")
