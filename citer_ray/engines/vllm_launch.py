"""Starting a vLLM engine: its options, checks that need no weights, and the CPU cores that it may use.

`VLLMEngine` calls `check` first, so that a wrong router, vocabulary or architecture costs a second and one
line, and then `launch`. On a CPU two engines must not share cores (their threads spin against each other):
`split_cores` divides what this process may use, and `launch` binds one engine to its part.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal

from citer_ray.engines.vllm_architectures import ARCHITECTURES, ROUTED, SCORED
from citer_ray.engines.vllm_placement import split_evenly, usable_cores
from citer_ray.engines.vllm_settings import CONFIG_KEY, ModelSettings
from citer_ray.errors import ConfigError, PairError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_PROCESSORS = [
    # In this order: what is handed off must not be sampled.
    "citer_ray.engines.vllm_handoff:HandoffLogitsProcessor",
    "citer_ray.engines.vllm_sampling:SeededSamplingProcessor",
]
_ENVIRONMENT_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding inside vLLM, for comparison; greedy and without a router.

    Attributes:
        method: `draft_model` (the SLM proposes) or `ngram` (the context's own repetitions do).
        model: the draft model's folder or hub name; None with `ngram`.
        num_tokens: tokens proposed a step.
    """

    method: Literal["draft_model", "ngram"]
    model: str | None = None
    num_tokens: int = 4

    def to_config(self) -> dict[str, Any]:
        """vLLM's `speculative_config`."""
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.num_tokens}
        if self.method == "ngram":
            return config | {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        return config | {"model": self.model}


@dataclass(frozen=True, slots=True)
class VLLMOptions:
    """How a vLLM engine runs; what is not here goes into `extra`.

    Attributes:
        dtype: weights' dtype; `auto` is the checkpoint's own.
        max_model_len: longest context in tokens; None takes the model's own.
        max_num_seqs: sessions that hold a KV cache at once; idle ones are set aside when more come.
        kv_cache_gib: size of the KV cache; None lets vLLM take what `gpu_memory_utilization` leaves.
        block_size: tokens of one KV block; None takes vLLM's default.
        tensor_parallel_size: devices that share each layer.
        enforce_eager: no compilation and no CUDA graphs: starts faster, runs slower.
        visit_hold: passes for which visits wait for more visits at most (`visit_gate.py`); 0 starts each at once.
        prefix_caching: reuse the KV blocks of earlier contexts that begin alike.
        cores: CPU cores of this engine (CPU only); None leaves the choice to vLLM. See `vllm_placement.py`.
        devices: GPUs of this engine, by the names of `CUDA_VISIBLE_DEVICES`; None takes what the process sees.
        gpu_memory: part of each GPU's memory; None takes vLLM's default.
        speculation: how the LLM speculates, or None.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: run code that the checkpoint brings.
        extra: further arguments of vLLM's `AsyncEngineArgs`, by name.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    kv_cache_gib: float | None = None
    block_size: int | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    visit_hold: float = 0.0
    prefix_caching: bool = True
    cores: tuple[int, ...] | None = None
    devices: tuple[str, ...] | None = None
    gpu_memory: float | None = None
    speculation: Speculation | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


def split_cores(slm_share: float = 0.5) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Disjoint cores for the SLM's and the LLM's engine on one CPU machine.

    Args:
        slm_share: part of the cores that the SLM gets; each engine gets at least one.

    Raises:
        ConfigError: this process may use a single core only.
    """
    cores = usable_cores()
    if len(cores) < 2:
        raise ConfigError("two vLLM engines on a CPU need two cores or more; run them on machines of their own")
    return split_evenly(cores, slm_share)


def check(model: str, settings: ModelSettings, options: VLLMOptions, slm_fingerprint: str | None) -> str | None:
    """Everything that can be wrong before the model's weights are read.

    Returns:
        The model's architecture if it has a routed version; None where a stock class has to do.

    Raises:
        ConfigError: vLLM or its plugin is missing, or an option does not fit the model.
        PairError: the vocabulary, the handoff id, the architecture or the router does not fit.
        DataError: the router's artifact is damaged.
    """
    _check_installed()
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            model, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"cannot read the config of model {model!r}: {reason}; give a model folder or hub name"
        ) from error
    text = config.get_text_config(decoder=True)
    _check_vocabulary(model, settings, int(text.vocab_size))
    limit = getattr(text, "max_position_embeddings", None)
    if options.max_model_len is not None and limit is not None and options.max_model_len > limit:
        raise ConfigError(f"max_model_len is {options.max_model_len}, but {model} takes {limit}; lower it")
    if settings.router is not None:
        from citer_ray.features import feature_width
        from citer_ray.router_artifact import load_router, read_metadata

        read = feature_width(
            read_metadata(settings.router).architecture, int(text.hidden_size), settings.shared_vocab_size
        )
        _, metadata = load_router(settings.router, slm_fingerprint=slm_fingerprint, hidden_size=read)
        if "token_embedding" in metadata.architecture.features:
            raise PairError(
                f"the router {settings.router} reads token_embedding, which vLLM's engine does not give it; fit one "
                "with router.features: [hidden, top_logits], or set engine.kind: transformers"
            )
    speculation = options.speculation
    if speculation is not None and settings.router is not None:
        raise ConfigError("vLLM cannot route and speculate in one engine; leave out the router or the speculation")
    if speculation is not None and speculation.method == "draft_model" and speculation.model is None:
        raise ConfigError("speculation with a draft model needs `model`; give the SLM's folder or hub name")
    architecture = str((config.architectures or ["none"])[0])
    if architecture in ARCHITECTURES:
        return architecture
    if speculation is not None:
        raise PairError(f"{architecture} is not in citer_ray/engines/vllm_architectures.py; speculation needs it")
    if settings.router is not None:
        raise PairError(
            f"{architecture} has no routed version, so {model} cannot be the SLM in vLLM; take one of "
            f"{routed_names()}, or add a line to citer_ray/engines/vllm_architectures.py"
        )
    return None


def routed_names() -> str:
    """The architectures that can be the SLM, for messages."""
    return ", ".join(sorted(ARCHITECTURES))


def _check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed; pip install 'citer-ray[gpu]' or 'citer-ray[cpu]'")
    plugins = entry_points(group="vllm.general_plugins")
    if not any(plugin.value == "citer_ray.engines.vllm_plugin:register" for plugin in plugins):
        raise ConfigError(
            "vLLM cannot find citer_ray's plugin: install the package (pip install -e .), do not only run it"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "citer_ray" not in allowed.split(","):
        raise ConfigError("VLLM_PLUGINS leaves out citer_ray; add it, or unset the variable")


def _check_vocabulary(model: str, settings: ModelSettings, num_rows: int) -> None:
    if not 1 <= settings.shared_vocab_size <= num_rows:
        raise PairError(
            f"shared_vocab_size is {settings.shared_vocab_size}, but {model} has {num_rows} ids; take the "
            "smaller vocabulary of the pair"
        )
    handoff = settings.handoff_token_id
    if settings.router is not None and handoff is None:
        raise PairError("a router needs a handoff token id; set pair.handoff_token to an unused id of the vocabulary")
    if handoff is not None and not 0 <= handoff < num_rows:
        raise PairError(f"the handoff token id {handoff} is not in 0..{num_rows - 1}, the ids of {model}")


def launch_decoder(
    model: str, settings: ModelSettings, options: VLLMOptions, architecture: str | None, stats: Any
) -> AsyncLLM:
    """Start vLLM's processes for decoding and load the weights; blocks until it is ready.

    Args:
        model: folder or hub name.
        settings: constants that the plugged-in code reads.
        options: see `VLLMOptions`.
        architecture: what `check` returned.
        stats: a vLLM stat logger factory.
    """
    arguments = _arguments(model, settings, options, None if architecture is None else ROUTED + architecture)
    if options.speculation is None:
        arguments["logits_processors"] = _PROCESSORS
    else:  # vLLM takes one of the two; the model class masks what must not be written
        arguments["speculative_config"] = options.speculation.to_config()
    return _launch(arguments | dict(options.extra), options, [stats])


def launch_scorer(model: str, settings: ModelSettings, options: VLLMOptions, architecture: str) -> AsyncLLM:
    """Start vLLM's processes for `vllm_scored.py`; otherwise as `launch_decoder`."""
    arguments = _arguments(model, settings, options, SCORED + architecture)
    return _launch(arguments | {"runner": "pooling"} | dict(options.extra), options, [])


def _arguments(model: str, settings: ModelSettings, options: VLLMOptions, name: str | None) -> dict[str, Any]:
    overrides: dict[str, Any] = {CONFIG_KEY: settings.to_config()}
    if name is not None:
        overrides["architectures"] = [name]
    arguments: dict[str, Any] = {
        "model": model,
        "revision": options.revision,
        "trust_remote_code": options.trust_remote_code,
        "skip_tokenizer_init": True,  # engines speak token ids only
        "generation_config": "vllm",  # no sampling defaults from the checkpoint
        "hf_overrides": overrides,
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": options.prefix_caching,
        "max_model_len": options.max_model_len,
        "block_size": options.block_size,
        "gpu_memory_utilization": options.gpu_memory,
    }
    if options.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gib * 2**30)
    return {key: value for key, value in arguments.items() if value is not None}


def _launch(arguments: dict[str, Any], options: VLLMOptions, stats: list[Any]) -> AsyncLLM:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if _runs_in_core_process(options):
        # On a CPU vLLM puts the one worker into a process of its own, because only there it can set OpenMP's
        # variables. They are set before its core process starts, too: no messages between two processes at each
        # pass, and one process less to start.
        arguments = {"distributed_executor_backend": UniProcExecutor, **arguments}
    with _environment(options):
        try:
            _inspect_here(arguments["hf_overrides"].get("architectures", []))
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=stats)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            model = arguments["model"]
            raise ConfigError(f"vLLM could not start {model!r}: {reason}; its log above has the cause") from error


def _inspect_here(names: Sequence[str]) -> None:
    """Spare a start on a CPU the process, and the seconds, in which vLLM imports a class to look at it.

    On a GPU vLLM's way is right: importing a model file here could initialise CUDA before vLLM forks.
    """
    from vllm import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    if not current_platform.is_cpu():
        return
    from citer_ray.engines import vllm_routed, vllm_scored

    load_general_plugins()  # registers names; what follows must come after it
    for name in names:
        module = vllm_routed if name.startswith(ROUTED) else vllm_scored
        ModelRegistry.register_model(name, getattr(module, name))


def _runs_in_core_process(options: VLLMOptions) -> bool:
    """Whether the model runs in vLLM's core process: bound to cores, and not spread over several workers."""
    return options.cores is not None and options.tensor_parallel_size == 1


@contextmanager
def _environment(options: VLLMOptions) -> Iterator[None]:
    """Variables that vLLM's new processes inherit; this process gets its own values back."""
    wanted = {
        # The processors speak the interface of model runner V1, which has every feature used here.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if options.cores is not None:
        cores = ",".join(map(str, options.cores))
        wanted |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "KMP_BLOCKTIME": "0"}
        if _runs_in_core_process(options):
            number = str(len(options.cores))
            wanted |= {"OMP_NUM_THREADS": number, "OMP_PLACES": f"{{{cores}}}", "OMP_PROC_BIND": "true"}
    if options.devices is not None:
        wanted["CUDA_VISIBLE_DEVICES"] = ",".join(options.devices)
    if options.enforce_eager:
        # vLLM compiles a helper of its log-probabilities even so, at the first token that asks for one.
        wanted["TORCH_COMPILE_DISABLE"] = "1"
    with _ENVIRONMENT_LOCK:
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
