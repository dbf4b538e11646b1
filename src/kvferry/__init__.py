"""KVFerry: carries a request's cache from prefill to decode workers, and proves it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvferry.logs import guard as _guard_logs

if TYPE_CHECKING:
    from kvferry.errors import (
        BindError,
        DecodeError,
        KVFerryError,
        ManifestError,
        MismatchError,
        ModelError,
        ProofError,
        SideError,
        UnshardableError,
    )
    from kvferry.manifest import (
        HOLE,
        Attention,
        Entries,
        GatedDelta,
        GroupSpec,
        Identity,
        LatentAttention,
        LayerSpec,
        Layout,
        LinearAttention,
        Mamba1,
        Mamba2,
        Manifest,
        OpaqueCells,
        OpaqueState,
        Rank,
        ShortConv,
        build_manifest,
        check_manifest,
        compare,
        decode,
        encode,
    )
    from kvferry.plan import Binder, Binding, Plan, Request, make_plan, make_plans, prove, routes
else:

    def __getattr__(name: str) -> Any:
        """Names are imported when they are used: the version, help and completion of the command line need none of them."""
        for home in ("kvferry.errors", "kvferry.manifest", "kvferry.plan") if name in __all__ else ():
            module = import_module(home)
            if hasattr(module, name):
                return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

_guard_logs()

__all__ = [
    "HOLE",
    "Attention",
    "BindError",
    "Binder",
    "Binding",
    "DecodeError",
    "Entries",
    "GatedDelta",
    "GroupSpec",
    "Identity",
    "KVFerryError",
    "LatentAttention",
    "LayerSpec",
    "Layout",
    "LinearAttention",
    "Mamba1",
    "Mamba2",
    "Manifest",
    "ManifestError",
    "MismatchError",
    "ModelError",
    "OpaqueCells",
    "OpaqueState",
    "Plan",
    "ProofError",
    "Rank",
    "Request",
    "ShortConv",
    "SideError",
    "UnshardableError",
    "build_manifest",
    "check_manifest",
    "compare",
    "decode",
    "encode",
    "make_plan",
    "make_plans",
    "prove",
    "routes",
]
