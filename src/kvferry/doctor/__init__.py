"""This machine before it serves: facts, rules over them, and a small measured transfer for each path."""

from kvferry.doctor.machine import Machine, look
from kvferry.doctor.paths import Measured, measure
from kvferry.doctor.rules import examine

__all__ = ["Machine", "Measured", "examine", "look", "measure"]
