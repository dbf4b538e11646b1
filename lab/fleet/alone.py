"""One API server that imports vLLM itself. The processes that it spawns import this module first, under another name, and are
patched as it is."""

from __future__ import annotations

import sys

from kvferry.up.device import Device
from lab.fleet import patches
from lab.fleet.launch import serve

if __name__ in ("__main__", "__mp_main__"):
    patches.apply(Device(sys.argv[1]))
    patches.apply_ordered()

if __name__ == "__main__":
    serve(sys.argv[2:])
