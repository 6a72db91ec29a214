"""The typed configuration: one field per knob, its default and its meaning on the field.

`config_loading.py` builds a `CiterConfig` from a YAML file and `section.key=value` overrides; every job, the command
line and `run.yaml` use this schema, and `docs/configuration.md` is generated from it. Unknown keys are refused and
all values are frozen: a function never defaults a value that the configuration holds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from citer_ray.config_remote import RemoteConfig
from citer_ray.config_section import Fraction, Positive, Section
from citer_ray.config_serve import ServeConfig
from citer_ray.prompts import PromptFormat


class ModelConfig(Section):
    """One model of the pair."""

    path: str = Field(description="Hub name, local folder, or `embedded:slm` / `embedded:llm`.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights' dtype; `auto` is the checkpoint's own on GPU and float32 on CPU."
    )
    device: str = Field("auto", description="`auto` (CUDA if there is one), `cpu`, or a torch device such as `cuda:0`.")
    max_model_len: Positive | None = Field(None, description="Context length in tokens; null takes the model's own.")
    trust_remote_code: bool = Field(False, description="Run code that the checkpoint brings. Off unless you trust it.")


class PairConfig(Section):
    """The SLM and the LLM; they share a tokenizer and vocabulary ids."""

    slm: ModelConfig = Field(description="The small language model; the router reads its hidden states.")
    llm: ModelConfig = Field(description="The large language model.")
    handoff_token: str | int | None = Field(
        None,
        description="Reserved token (string or id) that means `handoff` inside vLLM; null picks an unused one.",
    )


Source = Annotated[str, Field(min_length=1)]
Sources = Source | Annotated[tuple[Source, ...], Field(min_length=1)]


class DataConfig(Section):
    """Where examples come from: a JSONL or Parquet file (path or URI), `hub:NAME[:CONFIG]`, or `embedded:SPLIT[:N]`.

    A list of sources is a mixture: they take turns.
    """

    collect: Sources = Field(
        description="Source of the examples that are labelled, or several; each needs a reference."
    )
    validation: Sources | None = Field(
        None, description="Source on which thresholds are chosen, or several; null holds out a part of `collect`."
    )
    test: Sources | None = Field(
        None, description="Source of the reported numbers, or several; null leaves evaluation out."
    )
    task: Literal["choice", "math"] | None = Field(None, description="How to grade; null takes it from each row.")
    collect_split: str = Field("train", description="Split of a hub data set for `collect`.")
    validation_split: str = Field("validation", description="Split of a hub data set for `validation`.")
    test_split: str = Field("test", description="Split of a hub data set for `test`.")
    collect_limit: Positive | None = Field(
        None, description="Take at most this many examples for labels, of all sources."
    )
    validation_limit: Positive | None = Field(None, description="Take at most this many validation examples.")
    test_limit: Positive | None = Field(None, description="Take at most this many test examples.")
    validation_fraction: Fraction = Field(
        0.1, description="Part of `collect` held out by example id where `validation` is null."
    )
    families: tuple[str, ...] | None = Field(
        None, description="Embedded problems only: label these template families and no others."
    )
    on_bad_row: Literal["quarantine", "raise"] = Field(
        "quarantine", description="Set bad rows aside with a reason, or stop at the first."
    )


class VllmConfig(Section):
    """vLLM's settings of one model; only for `engine.kind: vllm`."""

    tensor_parallel_size: Positive = Field(1, description="Devices that share each layer.")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="KV cache in GiB; null takes what vLLM finds on a GPU, and 2 GiB on a CPU."
    )
    enforce_eager: bool = Field(False, description="No compilation and no CUDA graphs: starts faster, runs slower.")
    visit_hold: float = Field(
        0.0,
        ge=0,
        description="Delayed batching of the LLM's visits: how long one waits for others, in passes; 0 starts at once.",
    )


class EngineConfig(Section):
    """How models run."""

    kind: Literal["transformers", "vllm"] = Field(
        "transformers", description="`transformers` is exact and needs no more; `vllm` is for production."
    )
    factory: str | None = Field(
        None,
        description="An engine of your own: import path `package.module:function` of a function that takes the role "
        "(`slm` or `llm`) and the `EngineSpec`, and returns an `Engine`; it wins over `kind`.",
    )
    max_rows: Positive = Field(256, description="Sessions whose KV caches are held at once; more wait their turn.")
    max_pass_tokens: Positive = Field(8192, description="Padded tokens of one forward pass.")
    slm: VllmConfig = Field(VllmConfig(), description="vLLM's settings of the SLM.")
    llm: VllmConfig = Field(VllmConfig(), description="vLLM's settings of the LLM.")
    remote: RemoteConfig = Field(RemoteConfig(), description="The LLM on another server, whatever `kind` is.")
    torch_threads: Positive | None = Field(
        None, description="Torch threads of a worker process; null is its `num_cpus`, at least 1."
    )


class Replicas(Section):
    """One pool of workers."""

    count: Positive = Field(1, description="Workers in the pool.")
    num_cpus: float = Field(1.0, ge=0, description="CPUs of one worker.")
    num_gpus: float = Field(0.0, ge=0, description="GPUs of one worker; fractions share one.")


class CollectConfig(Section):
    """How tokens are labelled (design: labels; CITER section 3)."""

    examples_per_chunk: Positive = Field(
        32,
        description="Examples that are labelled, written and resumed together. Part of the labels' digest.",
    )
    shortcut: bool = Field(
        True,
        description="Take a greedy token that equals the reference as the label; false decides by rollouts.",
    )
    state_fraction: Fraction = Field(
        1.0,
        description="With `shortcut: false`: the part of all positions that rollouts decide; others get no label.",
    )
    both_wrong: Literal["rollout", "slm"] = Field(
        "rollout",
        description="Label of states where both are wrong: by rollout, or always the SLM (CITER-S).",
    )
    branches: Literal["none", "both_wrong", "mismatches"] = Field(
        "none",
        description="Roll out the SLM-first and the LLM-first branch where both are wrong, or at every state where "
        "the SLM is wrong; label 0 iff only the LLM-first one is right.",
    )
    llm_price: float = Field(
        0.0,
        ge=0,
        description="With branches and several rollouts: gain in accuracy that an LLM token must bring.",
    )
    rollouts_per_state: Positive = Field(1, description="More than 1 samples; the label becomes a fraction.")
    temperature: float = Field(
        0.7, gt=0, description="Sampling temperature of rollouts where `rollouts_per_state` is above 1."
    )
    max_new_tokens: Positive = Field(256, description="Limit of a rollout, in tokens.")
    thresholds: tuple[float, ...] = Field(
        (0.9, 0.97),
        description="Threshold of the rollout policy in round 2, 3, ...; the last one is kept on.",
    )
    rollouts_in_flight: Positive = Field(256, description="Rollouts that one worker decodes at once.")
    slm: Replicas = Field(Replicas(), description="Workers of the SLM's forward pass.")
    llm: Replicas = Field(Replicas(), description="Workers of the LLM's forward pass.")
    rollouts: Replicas = Field(Replicas(), description="Workers that decode rollouts (the SLM, and the LLM if routed).")

    @model_validator(mode="after")
    def _consistent(self) -> CollectConfig:
        if self.both_wrong == "slm" and self.branches != "none":
            raise ValueError("both_wrong: slm takes no rollouts, so branches must be none; set one of the two")
        if not self.shortcut and self.both_wrong == "slm":
            raise ValueError("shortcut: false decides by rollouts, so both_wrong must be rollout")
        if any(not threshold >= 0 for threshold in self.thresholds) or not self.thresholds:
            raise ValueError("thresholds must hold at least one number, all >= 0")
        return self


Feature = Literal["hidden", "top_logits", "token_embedding"]


class RouterConfig(Section):
    """The router: an MLP from the SLM's hidden state to p_slm (CITER, appendix; sizes as in the released code)."""

    features: tuple[Feature, ...] = Field(
        ("hidden",),
        min_length=1,
        description="What the router reads of the SLM, in this order: its hidden state, its largest logits, the "
        "embedding of its greedy token; the last needs `engine.kind: transformers`.",
    )
    top_logits: Positive = Field(32, description="How many logits `top_logits` reads, largest first.")
    widths: tuple[float, ...] = Field((2.0, 1.0), description="Hidden layers' widths, as multiples of the input's.")
    batch_norm: bool = Field(True, description="Batch norm after the first linear layer.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout after every hidden layer.")


class FitConfig(Section):
    """How the router is fitted."""

    objective: Literal["preference", "dpo", "marginal"] = Field(
        "preference",
        description="Cross-entropy of the preference, its DPO-style form with a reference margin, or Co-LLM's marginal "
        "likelihood of the reference token over who writes it.",
    )
    dpo_beta: float = Field(1.0, gt=0, description="Inverse temperature of the DPO-style objective.")
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="`balanced` gives both labels the same total weight."
    )
    learning_rate: float = Field(1e-3, gt=0, description="AdamW's peak learning rate.")
    weight_decay: float = Field(1e-2, ge=0, description="AdamW's weight decay.")
    batch_size: int = Field(1024, ge=2, description="Positions in a batch, over all workers.")
    max_epochs: Positive = Field(30, description="Limit of passes over the labels.")
    patience: Positive = Field(5, description="Epochs without a better validation loss before stopping.")
    validation_fraction: float = Field(
        0.1, gt=0, lt=1, description="Part of the labelled examples (never of tokens) for early stopping."
    )
    workers: Positive = Field(1, description="Data-parallel Ray Train workers.")
    num_cpus: float = Field(1.0, gt=0, description="CPUs of one worker.")
    use_gpu: bool = Field(False, description="One GPU for each worker.")


class IterateConfig(Section):
    """Rounds of collect, fit, evaluate."""

    max_rounds: Positive = Field(3, description="Rounds at most.")
    min_area_gain: float = Field(
        0.0,
        description="Stop when a round's validation frontier gains less area than this over the best so far.",
    )
    citer_s: bool = Field(True, description="Also fit CITER-S (no long-term reward) for comparison.")


class BaselineConfig(Section):
    """The router of a method that CITER is compared with, and how it is fitted."""

    router: RouterConfig = Field(RouterConfig(), description="The router's shape.")
    fit: FitConfig = Field(FitConfig(), description="Its training; workers and devices are those of `fit`.")


class BaselinesConfig(Section):
    """Methods whose routers are fitted by the evaluation (docs/evaluation.md)."""

    examples: Positive = Field(600, description="Examples of `data.collect` that their labels are made from, at most.")
    routellm: BaselineConfig = Field(
        BaselineConfig(
            router=RouterConfig(widths=(), batch_norm=False),
            fit=FitConfig(batch_size=64, max_epochs=100, patience=20, learning_rate=3e-3),
        ),
        description="RouteLLM-style: who answers a whole query, from the prompt's hidden state.",
    )
    collm: BaselineConfig = Field(
        BaselineConfig(
            router=RouterConfig(widths=(), batch_norm=False), fit=FitConfig(objective="marginal", learning_rate=3e-3)
        ),
        description="Co-LLM: a linear deferral head on the frozen SLM, by marginal likelihood.",
    )
    r2r: BaselineConfig = Field(
        BaselineConfig(router=RouterConfig(features=("hidden", "top_logits", "token_embedding"))),
        description="R2R-style: does the SLM's token change the outcome.",
    )


class EvaluateConfig(Section):
    """Accuracy against cost."""

    methods: tuple[str, ...] = Field(
        ("slm", "llm", "random", "confidence", "citer_s", "citer", "oracle"),
        description="Methods in the report, or `all` (docs/evaluation.md names them).",
    )
    llm_shares: tuple[Fraction, ...] = Field(
        (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
        description="LLM shares that each method's knob aims at, through the validation split.",
    )
    quantiles: tuple[Fraction, ...] = Field(
        (0.1, 0.25, 0.5, 0.75),
        description="What knobs of other methods aim at: the part of queries that a query router or a cascade gives to "
        "the LLM, the part of differing draft tokens that a speculative rule rejects.",
    )
    draft_length: Positive = Field(4, description="Tokens of a draft, for speculative methods with another knob.")
    draft_lengths: tuple[Positive, ...] = Field(
        (1, 2, 4, 8), description="Draft lengths of speculative decoding, whose knob it is."
    )
    timed_examples: int = Field(
        6, ge=0, description="Test examples that are decoded one at a time for wall times, with one setting a method."
    )
    shown_examples: int = Field(24, ge=0, description="Responses that the page of what the router learned shows.")
    max_new_tokens: Positive = Field(256, description="Limit of a response, in tokens.")
    responses_in_flight: Positive = Field(256, description="Responses that one worker decodes at once.")
    bootstrap_samples: Positive = Field(1000, description="Resamples of the examples for the intervals.")
    workers: Replicas = Field(Replicas(), description="Workers; each holds both models.")


class TrackingConfig(Section):
    """MLflow."""

    enabled: bool = Field(True, description="Track rounds in MLflow.")
    uri: str | None = Field(
        None,
        description="Tracking URI; null takes MLFLOW_TRACKING_URI, else sqlite in `OUTPUT_DIR/../mlflow.db`.",
    )
    experiment: str | None = Field(None, description="Experiment name; null takes the run's name.")
    registered_model: str | None = Field(None, description="Registry name of the router; null takes the run's name.")


class RayConfig(Section):
    """How the job finds Ray."""

    address: str | None = Field(
        None, description="Cluster address; null takes RAY_ADDRESS, else starts Ray on this machine."
    )
    num_cpus: Positive | None = Field(None, description="CPUs of a Ray started here; null takes all.")


class CiterConfig(Section):
    """Everything that a run depends on."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run and its MLflow experiment.")
    output_dir: str = Field(
        description="Folder of labels, routers, reports, `run.yaml` and `provenance.json`: a path, or `s3://bucket/folder`."
    )
    seed: int = Field(0, description="Seed of everything random.")
    pair: PairConfig = Field(description="The models.")
    data: DataConfig = Field(description="The examples.")
    prompt: PromptFormat = Field(PromptFormat(), description="How an example becomes a prompt.")
    engine: EngineConfig = Field(EngineConfig(), description="How models run.")
    collect: CollectConfig = Field(CollectConfig(), description="Labels.")
    router: RouterConfig = Field(RouterConfig(), description="The router's shape.")
    fit: FitConfig = Field(FitConfig(), description="The router's training.")
    iterate: IterateConfig = Field(IterateConfig(), description="Rounds.")
    evaluate: EvaluateConfig = Field(EvaluateConfig(), description="Evaluation.")
    baselines: BaselinesConfig = Field(BaselinesConfig(), description="Routers of other methods.")
    serve: ServeConfig = Field(ServeConfig(), description="Serving.")
    tracking: TrackingConfig = Field(TrackingConfig(), description="MLflow.")
    ray: RayConfig = Field(RayConfig(), description="Ray.")
