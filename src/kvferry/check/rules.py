"""What can be told from the command lines of two engines alone; each rule looks at one thing and says what cures it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kvferry.check.cures import CURES
from kvferry.check.flags import CHOICES, Flags
from kvferry.check.shapes import FORMATS, attention_backend, dtype_of
from kvferry.engines.vllm.layouts import CERTIFICATES
from kvferry.engines.vllm.options import Options, option_troubles, read_options
from kvferry.engines.vllm.refusals import PORT, unserved
from kvferry.errors import SessionError
from kvferry.findings import Finding, Severity, errors
from kvferry.models.fields import CACHE_DTYPES
from kvferry.session.key import is_loopback, loopback, read_keys, split_address

CONNECTOR: Final = "KVFerryConnector"
MODULE: Final = "kvferry.engines.vllm"
ROLES: Final = {"prefill": ("kv_producer", "kv_both"), "decode": ("kv_consumer", "kv_both")}
STOCK: Final = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
API_PORT: Final = 8000
SNAPSHOT: Final = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)/snapshots/([^/]+)$")
"""A checkpoint in the cache of a hub."""
BACKENDS: Final = frozenset(one.backend for one in CERTIFICATES)
FABRICS: Final = frozenset({"rc", "ud", "dc", "ib", "gga", "srd"})
"""Transports of UCX that read the memory of other machines without their help."""


@dataclass(frozen=True)
class Seen:
    """One engine: `side` is prefill or decode, `device` what its caches lie on. Files that it names are looked at unless the
    engine runs `elsewhere`. Of a release of vLLM that is not `known`, words may be new."""

    side: str
    flags: Flags
    device: str
    elsewhere: bool = False
    known: bool = True

    @property
    def options(self) -> Options | None:
        """None where they are refused."""
        try:
            return read_options(self.flags.options)
        except SessionError:
            return None


def of_one(seen: Seen) -> Iterator[Finding]:
    """What is wrong with one engine, whoever it is to work with."""
    yield from seen.flags.troubles
    yield from _words(seen)
    if seen.flags.unread:
        cure = "nothing, unless one of them changes what a cache holds"
        yield Finding("not-looked-at", f"not looked at: {', '.join(seen.flags.unread)}", cure, Severity.NOTE)
    found = [*_connector(seen.flags)]
    yield from found
    yield from _memory(seen)
    if errors(found):
        return
    yield from _role(seen)
    yield from unserved(_configuration(seen), seen.device)
    extra = (seen.flags.ferry or {}).get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        yield Finding(
            "option-value", f"kv_connector_extra_config is {extra!r}", "make it an object with options, or leave it out"
        )
    yield from option_troubles(seen.flags.options)
    yield from _addresses(seen)
    yield from _key(seen)
    yield from _ucx(seen)
    yield from _policy(seen)


def _words(seen: Seen) -> Iterator[Finding]:
    """Words that vLLM would not take; another release may have more of them."""
    severity = Severity.ERROR if seen.known else Severity.WARNING
    for name, words in CHOICES.items():
        said = seen.flags.word(name, "auto")
        if said not in words:
            shown = f"--{name.replace('_', '-')}"
            yield Finding("flag-value", f"{shown} is {said!r}", f"give it one of {', '.join(words)}", severity)
    backend = attention_backend(seen.flags)
    near = difflib.get_close_matches(backend, BACKENDS, 1, 0.87)
    if near and backend not in BACKENDS:
        yield Finding("flag-value", f"there is no attention backend {backend}", f"did you mean {near[0]}?", severity)


def _connector(flags: Flags) -> Iterator[Finding]:
    named = [str(one.get("kv_connector", "")) for one in flags.connectors]
    if not any(named):
        yield Finding(
            "no-connector", "no --kv-transfer-config names a connector", f"add --kv-transfer-config '{_example('kv_both')}'"
        )
        return
    if flags.ferry is None:
        moving = "; docs/migrating.md goes through its options one by one" if set(named) & set(STOCK) else ""
        near = difflib.get_close_matches(CONNECTOR, named, 1, 0.7)
        seen = f"the connector is {', '.join(named)}, not {CONNECTOR}" + (f" ({near[0]} is nearly its name)" if near else "")
        yield Finding("other-connector", seen, f"name {CONNECTOR} on both sides{moving}")
        return
    if named[0] != CONNECTOR:
        seen = f"of several connectors {named[0]} comes first, and vLLM hands the first one's cards to all of them"
        yield Finding("connector-order", seen, f"name {CONNECTOR} first")
    module = flags.ferry.get("kv_connector_module_path")
    if module not in (None, MODULE):
        seen = f"kv_connector_module_path is {module!r}, where {CONNECTOR} is not"
        yield Finding("connector-module", seen, f"write {MODULE}, or leave it out where kvferry is installed as a package")
    if any(name in flags.environment for name in ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")):
        cure = "say where to listen with listen and advertise in kv_connector_extra_config, and unset them"
        yield Finding(
            "nixl-variables", "VLLM_NIXL_SIDE_CHANNEL_* is set, which only vLLM's own connector reads", cure, Severity.WARNING
        )


def _example(role: str) -> str:
    return f'{{"kv_connector": "{CONNECTOR}", "kv_connector_module_path": "{MODULE}", "kv_role": "{role}"}}'


def _role(seen: Seen) -> Iterator[Finding]:
    wanted = ROLES[seen.side]
    if seen.flags.role not in wanted:
        said = f"kv_role is {seen.flags.role}" if seen.flags.role else "no kv_role is given"
        yield Finding(
            "role",
            f"{said}, and this engine is to {seen.side}",
            f"make it {wanted[0]}, or kv_both for an engine that does both",
        )


def _configuration(seen: Seen) -> Any:
    """What vLLM would make of the flags, as far as `unserved` looks at it."""
    transfer: Mapping[str, Any] = seen.flags.ferry or {}
    outer: Mapping[str, Any] = seen.flags.transfer or {}
    port = transfer.get("kv_port", outer.get("kv_port", PORT))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=seen.flags.number("decode_context_parallel_size"),
            prefill_context_parallel_size=seen.flags.number("prefill_context_parallel_size"),
        ),
        kv_transfer_config=SimpleNamespace(
            kv_buffer_device=transfer.get("kv_buffer_device", seen.device),
            enable_permute_local_kv=bool(transfer.get("enable_permute_local_kv", False)),
            kv_port=port,
        ),
        model_config=SimpleNamespace(enable_sleep_mode=seen.flags.switch("enable_sleep_mode")),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=seen.flags.switch("enable_return_routed_experts")),
    )


def _addresses(seen: Seen) -> Iterator[Finding]:
    options = seen.options
    if options is None or not options.answers(seen.side == "prefill" or seen.flags.role == "kv_both"):
        return
    port = split_address(options.listen)[1]
    try:
        options.advertised(port or 1)
    except SessionError as error:
        yield Finding(
            "advertise", str(error).partition(": ")[0], "set advertise to the host's name or number, as others reach it"
        )
    count = max(1, seen.flags.number("data_parallel_size"))
    if port and port <= seen.flags.number("port", API_PORT) < port + count:
        said = f"ports {port} to {port + count - 1}" if count > 1 else f"port {port}"
        cure = "give listen another port, or 0 for a free one"
        yield Finding("same-port", f"listen takes {said}, which is where the engine's API is", cure)


def _key(seen: Seen) -> Iterator[Finding]:
    options = seen.options
    if options is None or not options.key_file or seen.elsewhere:
        return
    try:
        read_keys(options.key_file)
    except SessionError as error:
        cure = "make one with: head -c 32 /dev/urandom | base64 > FILE, and copy it to all sides (--elsewhere if it is there)"
        yield Finding("key-file", str(error).partition("; make one")[0], cure)


def _ucx(seen: Seen) -> Iterator[Finding]:
    options = seen.options
    if options is None or options.backend != "UCX":
        return
    settings = {**options.nixl.ucx, **{k: v for k, v in seen.flags.environment.items() if k.startswith("UCX_")}}
    if not _reads_directly(settings.get("UCX_TLS", "all").lower(), seen.device):
        said = f"UCX_TLS={settings['UCX_TLS']} has no way to read {seen.device} memory directly: reads are emulated"
        cure = "unset UCX_TLS, or allow sm and cma on one machine, rc between machines, and cuda_ipc for device memory"
        yield Finding("ucx-tls", said, cure, Severity.WARNING)
    if settings.get("UCX_NET_DEVICES") == "lo" and not is_loopback(options.advertise or split_address(options.listen)[0]):
        cure = "unset UCX_NET_DEVICES, or name the devices that lead to the other machine"
        yield Finding("ucx-devices", "UCX_NET_DEVICES=lo, but this engine is to be reached from other machines", cure)


def _reads_directly(allowed: str, device: str) -> bool:
    words = {word.strip() for word in allowed.removeprefix("^").split(",")}
    kinds = {word.partition("_")[0] for word in words}
    near = {"cuda", "cuda_ipc"} if device == "cuda" else {"sm", "shm", "cma", "xpmem", "posix", "sysv", "mm"}
    if allowed.startswith("^"):
        return not near & words
    return bool({"all", *near, *FABRICS} & (words | (kinds - {"cuda"})))


def _memory(seen: Seen) -> Iterator[Finding]:
    said = ",".join(seen.flags.environment.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if seen.device == "cuda" and "expandable_segments:true" in said.lower():
        cure = "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
        yield Finding(
            "expandable-segments",
            "caches in expandable segments cannot be registered, and vLLM starts no connector beside them",
            cure,
        )
    if seen.device == "cpu" and seen.flags.environment.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind":
        cure = "start both with VLLM_CPU_OMP_THREADS_BIND=nobind and OMP_NUM_THREADS set to their share of the cores"
        said = (
            "vLLM pins its threads to cores, and two engines on one machine get the same ones: requests take ten times longer"
        )
        yield Finding("thread-binding", said, cure, Severity.WARNING)


def _policy(seen: Seen) -> Iterator[Finding]:
    if seen.side == "decode" and (seen.flags.transfer or {}).get("kv_load_failure_policy", "fail") != "recompute":
        cure = 'add "kv_load_failure_policy": "recompute" to its --kv-transfer-config'
        yield Finding(
            "load-failure-policy", "what cannot be loaded fails the request, which is vLLM's default", cure, Severity.WARNING
        )


def of_two(prefill: Seen, decode: Seen) -> Iterator[Finding]:
    """What is wrong between two engines, as far as their flags tell."""
    there, here = prefill.options, decode.options
    if there is not None and here is not None:
        yield from _keys(prefill, decode, there, here)
        yield from _ports(prefill, decode, there, here)
        yield from _peers(prefill, there, here)
    if "engine_id" in (prefill.flags.transfer or {}) and _same(prefill, decode, "engine_id"):
        yield Finding("engine-id", "both engines have the same engine_id", "leave engine_id out, or make it unique")
    yield from _prompts(prefill.flags, decode.flags)
    yield from _weights(prefill, decode, there, here)


def _same(prefill: Seen, decode: Seen, name: str) -> bool:
    return (prefill.flags.transfer or {}).get(name) == (decode.flags.transfer or {}).get(name)


def _keys(prefill: Seen, decode: Seen, there: Options, here: Options) -> Iterator[Finding]:
    if bool(there.key_file) != bool(here.key_file):
        has, lacks = ("prefill", "decode") if there.key_file else ("decode", "prefill")
        seen = f"the {has} engine has a key_file, the {lacks} engine none: they will not hear each other"
        yield Finding("key-on-one-side", seen, "give both the same key, or neither where one user runs both on one machine")
    elif there.key_file and not prefill.elsewhere and not decode.elsewhere:
        try:
            known = read_keys(there.key_file).first in read_keys(here.key_file).all
        except SessionError:
            return
        if not known:
            seen = f"the keys in {there.key_file} and {here.key_file} differ: the engines will not hear each other"
            yield Finding("keys-differ", seen, "copy one key file to both sides")


def _ports(prefill: Seen, decode: Seen, there: Options, here: Options) -> Iterator[Finding]:
    """Two engines on one machine: as far as can be told, if they are reached at the same host."""
    hosts = [options.advertise or split_address(options.listen)[0] for options in (there, here)]
    if hosts[0] != hosts[1]:
        return
    ports = [split_address(options.listen)[1] for options in (there, here)]
    if ports[0] and ports[0] == ports[1] and here.answers(decode.flags.role == "kv_both"):
        yield Finding(
            "same-port", f"both engines listen on port {ports[0]} of {hosts[0]}", "give each its own port, or 0 for a free one"
        )
    apis = [seen.flags.number("port", API_PORT) for seen in (prefill, decode)]
    if apis[0] == apis[1] and is_loopback(hosts[0]):
        cure = "give each its own --port where they share a machine"
        yield Finding("same-api-port", f"both engines serve their API on port {apis[0]}", cure, Severity.WARNING)


def _peers(prefill: Seen, there: Options, here: Options) -> Iterator[Finding]:
    host, port = split_address(there.listen)
    host = there.advertise or host
    count = max(1, prefill.flags.number("data_parallel_size"))
    known = {(loopback(host) or host, port + i) for i in range(count)}
    named = [split_address(peer) for peer in here.peers]
    if port and named and not any((loopback(at) or at, number) in known for at, number in named):
        seen = f"the decode engine meets {', '.join(here.peers)} at its start, and the prefill engine is at {host}:{port}"
        yield Finding("peers", seen, "name the prefill engine's address in peers, or leave peers out", Severity.WARNING)


def _prompts(there: Flags, here: Flags) -> Iterator[Finding]:
    longest = [flags.number("max_model_len", 0) for flags in (there, here)]
    if all(longest) and longest[1] < longest[0]:
        seen = f"prompts of up to {longest[0]:,} tokens are prefilled, and the decode engine takes {longest[1]:,}"
        yield Finding("max-model-len", seen, "give both sides the same --max-model-len", Severity.WARNING)
    if there.switch("enable_lora") != here.switch("enable_lora"):
        has = "prefill" if there.switch("enable_lora") else "decode"
        yield Finding("adapters", f"only the {has} engine has --enable-lora", "give both the same adapters, or neither any")
    caches = [flags.word("mm_processor_cache_gb") for flags in (there, here)]
    if caches[1] in ("0", "0.0") and caches[0] not in ("0", "0.0"):
        seen = "the decode engine has no processor cache, so that it knows media by other names than the prefill engine"
        yield Finding(
            "media-cache", seen, "leave --mm-processor-cache-gb out on both sides, or make it 0 on both", Severity.WARNING
        )
    if there.word("quantization") != here.word("quantization"):
        seen = f"--quantization {there.word('quantization') or 'none'} there, {here.word('quantization') or 'none'} here"
        cure = "give both the same, or mind that text is continued by other numbers than it was begun with"
        yield Finding("quantization", seen, cure, Severity.WARNING)


def _weights(prefill: Seen, decode: Seen, there: Options | None, here: Options | None) -> Iterator[Finding]:
    """Engines compare what they are called, or a digest of what they load."""
    named = [options.weights if options is not None else "" for options in (there, here)]
    cure = "serve the same checkpoint on both sides, or set weights to the same name on both if they are"
    if any(named):
        if named[0] != named[1]:
            yield Finding("weights", f"weights is {named[0] or 'not set'} there, {named[1] or 'not set'} here", cure)
        return
    ours = [Checkpoint.of(seen) for seen in (prefill, decode)]
    if ours[0].dummy != ours[1].dummy:
        yield Finding("weights", "one side makes its weights up (--load-format dummy), the other does not", cure)
        return
    if ours[0] == ours[1]:
        return
    if not (prefill.elsewhere or decode.elsewhere or ours[0].dummy):
        digests = [_digest(seen.flags.model) for seen in (prefill, decode)]
        if all(digests):
            if digests[0] != digests[1]:
                seen = f"the weights of {ours[0]} and of {ours[1]} differ ({digests[0]} and {digests[1]})"
                yield Finding("weights", seen, cure)
            return
    seen = f"{ours[0]} there, {ours[1]} here"
    if ours[0].last != ours[1].last:
        yield Finding("weights-named", f"{seen}: they are not one model", cure)
    elif ours[0].revision != ours[1].revision and ours[0].revision and ours[1].revision:
        yield Finding("weights-named", f"{seen}: their revisions differ", cure)
    else:
        yield Finding(
            "weights-named", f"{seen}: whether their weights are the same cannot be told here", cure, Severity.WARNING
        )


def _digest(model: str) -> str:
    """Of the weights in a folder of this machine; empty if they are not there."""
    from kvferry.engines.vllm.weights import digest_of

    try:
        return digest_of(Path(model)) if Path(model).exists() else ""
    except (OSError, SessionError, ValueError, KeyError, TypeError, AttributeError):
        return ""


@dataclass(frozen=True)
class Checkpoint:
    """What a command names as its weights. A folder has no revision, but one in the cache of a hub says it in its path."""

    model: str
    revision: str
    dummy: bool

    @classmethod
    def of(cls, seen: Seen) -> Checkpoint:
        model, dummy = seen.flags.model.rstrip("/"), seen.flags.word("load_format") == "dummy"
        downloaded = SNAPSHOT.search(model)
        if downloaded is not None:
            return cls(f"{downloaded[1]}/{downloaded[2]}", downloaded[3], dummy)
        a_folder = model.startswith(("/", ".", "~")) or model.count("/") != 1
        return cls(model, seen.flags.word("revision") or ("" if a_folder else "main"), dummy)

    @property
    def last(self) -> str:
        """The model's own name."""
        return self.model.rpartition("/")[2].lower()

    def __str__(self) -> str:
        return f"{self.model}@{self.revision}" if self.revision not in ("", "main") else self.model


def of_flags(prefill: Seen, decode: Seen, dtypes: Sequence[str]) -> Iterator[Finding]:
    """What flags alone tell of two caches that cannot be shaped; `dtypes` are those of their configurations, if known."""
    own = [dtype_of(seen.flags.word("dtype")) or dtype for seen, dtype in zip((prefill, decode), dtypes, strict=True)]
    forms = [_form(seen.flags, dtype) for seen, dtype in zip((prefill, decode), own, strict=True)]
    if all(own) and own[0] != own[1]:
        yield Finding("cache-dtype", f"the model's dtype is {own[0]} there, {own[1]} here", CURES["cache-dtype"])
    elif forms[0] != forms[1] and (all(forms) or any(form and form not in CACHE_DTYPES for form in forms)):
        shown = [form or "the model's dtype" for form in forms]
        yield Finding("cache-dtype", f"the cache is kept in {shown[0]} there, in {shown[1]} here", CURES["cache-dtype"])
    for flag, name in (("mamba_cache_dtype", "conv-dtype"), ("mamba_ssm_cache_dtype", "ssm-dtype")):
        said = [dtype_of(seen.flags.word(flag)) for seen in (prefill, decode)]
        if all(said) and said[0] != said[1]:
            yield Finding(name, f"--{flag.replace('_', '-')} is {said[0]} there, {said[1]} here", CURES[name])
    if prefill.flags.values.get("hf_overrides") != decode.flags.values.get("hf_overrides"):
        yield Finding("model", "--hf-overrides differs between the two sides", "give both sides the same")


def _form(flags: Flags, own: str) -> str:
    """What a cache is kept in; empty if that is the model's dtype, which is not known."""
    said = flags.word("kv_cache_dtype", "auto")
    return own if said == "auto" else FORMATS.get(said, said)
