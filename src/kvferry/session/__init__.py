"""When a transfer may happen: references, leases, greetings, loads. Never which bytes."""

from kvferry.session.consumer import Answer, Consumer, PeerKey, key_of
from kvferry.session.courier import Courier
from kvferry.session.crossing import Load, Outcome
from kvferry.session.ferry import Ferry
from kvferry.session.key import Key, Keys, keys_of, own_keys, read_keys
from kvferry.session.listener import Listener
from kvferry.session.meeting import Meeting, meet
from kvferry.session.messages import Card, Found, Hello, Refusal, Release, Renew, Seek, Welcome
from kvferry.session.producer import Closing, Ending, FullError, Producer
from kvferry.session.reference import Lease, Reference, digest, from_params, to_params
from kvferry.session.wire import seek
from kvferry.session.words import Words

__all__ = [
    "Answer",
    "Card",
    "Closing",
    "Consumer",
    "Courier",
    "Ending",
    "Ferry",
    "Found",
    "FullError",
    "Hello",
    "Key",
    "Keys",
    "Lease",
    "Listener",
    "Load",
    "Meeting",
    "Outcome",
    "PeerKey",
    "Producer",
    "Reference",
    "Refusal",
    "Release",
    "Renew",
    "Seek",
    "Welcome",
    "Words",
    "digest",
    "from_params",
    "key_of",
    "keys_of",
    "meet",
    "own_keys",
    "read_keys",
    "seek",
    "to_params",
]
