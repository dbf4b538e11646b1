"""The copying kernel as it is compiled for an H200, which needs none: prints one line of JSON per form of the widest unit."""

from __future__ import annotations

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvferry.strategy import kernel
from kvferry.strategy.moves import ROWS, UNITS

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(columns: int) -> str:
    form = {"UNIT": UNITS[0], "WIDTH": 8, "COLUMNS": columns, "ROWS": ROWS[columns]}
    constants = {"KIND": kernel.KINDS[8], **form}
    numbers = {"at": "i32", "jobs": "i32"}
    names = kernel.move.arg_names
    signature = {name: "constexpr" if name in constants else numbers.get(name, "*i64") for name in names}
    source = ASTSource(kernel.move, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    return str(triton.compile(source, target=HOPPER, options={"num_warps": kernel.WARPS}).asm["ptx"])


if __name__ == "__main__":
    for columns in ROWS:
        text = compiled(columns)
        fetches = re.findall(r"ld\.global\S*evict_first\S*", text)
        stores = re.findall(r"st\.global\S*", text)
        print(json.dumps({"columns": columns, "fetches": fetches, "stores": stores}), flush=True)
