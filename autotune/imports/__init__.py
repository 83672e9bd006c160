"""Import: what was measured elsewhere, from files of other tools into our words. Reading only; storage keeps it."""

from autotune.imports.assembly import Stated
from autotune.imports.reading import FileContent, Format, Imported, batch_of, beginnings, read_log, read_table

__all__ = ["FileContent", "Format", "Imported", "Stated", "batch_of", "beginnings", "read_log", "read_table"]
