"""Would two engines serve together? Rules over flags, cards and manifests; every finding with a name and a cure."""

from kvferry.check.cards import Asked, Engine, Pair, ask_all, check_engines
from kvferry.check.flags import Flags, read_command
from kvferry.check.offline import Outlook, check_commands

__all__ = [
    "Asked",
    "Engine",
    "Flags",
    "Outlook",
    "Pair",
    "ask_all",
    "check_commands",
    "check_engines",
    "read_command",
]
