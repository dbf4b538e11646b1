"""End a UCX process of one's own on loopback with thirteen bytes, and print what each id did. Needs NIXL."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys

MAGIC = 0xCAFEBABE12345678
LISTEN = """
import time
try:
    from nixl._api import nixl_agent, nixl_agent_config
except ModuleNotFoundError:
    from nixl_cu12._api import nixl_agent, nixl_agent_config
agent = nixl_agent("victim", nixl_agent_config(backends=["UCX"]))
print("up", flush=True)
time.sleep(60)
"""
WAIT_S = 1.0


def port_of(process: int) -> int:
    own = {os.readlink(f"/proc/{process}/fd/{name}") for name in os.listdir(f"/proc/{process}/fd")}
    with open(f"/proc/{process}/net/tcp", encoding="ascii") as table:
        for words in map(str.split, list(table)[1:]):
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                return int(words[1].rpartition(":")[2], 16)
    raise SystemExit("the process listens on no port")


def tried(number: int) -> str:
    quiet = {**os.environ, "UCX_NET_DEVICES": "lo"}
    victim = subprocess.Popen([sys.executable, "-c", LISTEN], env=quiet, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        if victim.stdout is None or b"up\n" not in iter(victim.stdout.readline, b""):
            raise SystemExit("NIXL did not start")
        with socket.create_connection(("127.0.0.1", port_of(victim.pid))) as one:
            one.sendall(struct.pack("<QBI", MAGIC, number, 0))
            try:
                code = victim.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                return "lives"
        return f"ended by signal {-code}" if code < 0 else f"ended with {code}"
    finally:
        victim.kill()
        victim.wait()


if __name__ == "__main__":
    for number in range(32):
        print(number, tried(number), flush=True)
