"""How bytes travel where there is a choice: by descriptors over a transport (`direct`), or out of memory that is mapped."""

from kvferry.strategy.choose import Strategies
from kvferry.strategy.mapped import Mapped
from kvferry.strategy.movers import HostMover, Mover, Ticket
from kvferry.strategy.shared import SharedBytes

__all__ = ["HostMover", "Mapped", "Mover", "SharedBytes", "Strategies", "Ticket"]
