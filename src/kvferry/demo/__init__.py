"""A crossing to look at: two processes, different layouts, every byte compared."""

from kvferry.demo.crossing import Log, Voyage, sail

__all__ = ["Log", "Voyage", "sail"]
