"""YAML of Axolotl, LLaMA-Factory or TRL → a recipe, and what was not carried over.

Names of the same meaning come from the table in `_elsewhere`; here is what takes more than a name. Each part takes the keys
that it reads out of a draft (`_draft`): the run's (`_run`), the data's (`_data`), the method's (`_objective`). What a file
leaves to its library and forge has otherwise is written out (`_defaults`).
"""

from forge.settings._convert._convert import Converted, convert, library_of, read_foreign

__all__ = ["Converted", "convert", "library_of", "read_foreign"]
