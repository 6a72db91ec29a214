"""`citer decode` and `citer chat`: routed responses in the terminal, every token coloured by its writer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from citer_ray.config_loading import load_config
from citer_ray.decoding import Request, Trace
from citer_ray.decoding import decode as decode_response
from citer_ray.errors import ConfigError
from citer_ray.examples import Example
from citer_ray.policy import AlwaysLlm, AlwaysSlm, Policy, Threshold, Writer
from citer_ray.storage import storage_path

Config = Annotated[Path, typer.Option("--config", "-c", help="Configuration file.")]
RouterFolder = Annotated[str | None, typer.Option("--router", help="Folder of a router, or its URI.")]
ThresholdOption = Annotated[float | None, typer.Option(min=0, help="The LLM writes where p_slm is below it.")]
ShareOption = Annotated[float | None, typer.Option("--llm-share", min=0, max=1, help="LLM share to aim at.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="A setting that wins: section.key=value.")]
ModelOption = Annotated[str, typer.Option("--model", help="routed, slm or llm.")]

_STYLES = {Writer.SLM: "", Writer.LLM: "bold black on bright_yellow"}


class Responder:
    """Both models and a policy, for one prompt after the other."""

    def __init__(
        self,
        config_path: Path,
        overrides: list[str] | None,
        router: Path | None,
        threshold: float | None,
        llm_share: float | None,
        model: str,
    ) -> None:
        from citer_ray.engines.build import build_engine
        from citer_ray.preparation import engine_spec, prepare
        from citer_ray.router_artifact import load_router

        if model not in ("routed", "slm", "llm"):
            raise ConfigError(f"--model is {model!r}; it must be routed, slm or llm")
        config = load_config(config_path, overrides or [])
        self._prepared = prepare(config)
        self._policy: Policy = AlwaysSlm() if model == "slm" else AlwaysLlm()
        if model == "routed":
            if router is None:
                raise ConfigError("a routed response needs --router FOLDER (or use --model slm or llm)")
            _, metadata = load_router(router, slm_fingerprint=self._prepared.fingerprint.slm)
            if llm_share is not None:
                threshold = metadata.calibration.threshold_for(llm_share)
            self._policy = Threshold("router", metadata.threshold if threshold is None else threshold)
        spec = engine_spec(self._prepared)
        self._slm = build_engine("slm", spec, router=router)
        self._llm = build_engine("llm", spec)
        self._runner = asyncio.Runner()

    def respond(self, question: str) -> tuple[Trace, Any]:
        """The trace of a response, and the tokenizer to read it with."""
        config = self._prepared.config
        example = Example(id="prompt", prompt=question, answer="-", task="math")
        ids = config.prompt.encode_prompt(example, self._prepared.tokenizer)
        room = self._prepared.max_model_len - len(ids)
        if room < 1:
            raise ConfigError(f"the prompt has {len(ids)} tokens, the pair takes {self._prepared.max_model_len}")
        request = Request(ids, self._policy, min(config.evaluate.max_new_tokens, room))
        return self._runner.run(decode_response(self._slm, self._llm, request)), self._prepared.tokenizer


def coloured(trace: Trace, tokenizer: Any) -> Text:
    """The response with the LLM's tokens highlighted; characters that span tokens stay whole."""
    text, shown = Text(), ""
    for end, writer in enumerate(trace.writers, 1):
        whole = str(tokenizer.decode(trace.token_ids[:end], skip_special_tokens=True))
        if whole.endswith("\N{REPLACEMENT CHARACTER}"):
            continue  # inside a character of several tokens
        text.append(whole[len(shown) :], style=_STYLES[writer])
        shown = whole
    return text


def summary(trace: Trace) -> str:
    """One line: tokens, LLM share, visits."""
    return (
        f"{len(trace.token_ids)} tokens, {trace.num_llm_tokens} by the LLM ({trace.llm_share:.1%}), "
        f"{trace.visits} visit{'' if trace.visits == 1 else 's'}, ended by {trace.finish}"
    )


def _folder(router: str | None) -> Path | None:
    return None if router is None else storage_path(router)


def decode(
    prompt: Annotated[str, typer.Argument(help="The question.")],
    config: Config,
    overrides: Overrides = None,
    router: RouterFolder = None,
    threshold: ThresholdOption = None,
    llm_share: ShareOption = None,
    model: ModelOption = "routed",
) -> None:
    """Answer one question; the LLM's tokens are highlighted."""
    console = Console()
    trace, tokenizer = Responder(config, overrides, _folder(router), threshold, llm_share, model).respond(prompt)
    console.print(coloured(trace, tokenizer))
    console.print(summary(trace), style="dim")


def chat(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file; both models here.")] = None,
    overrides: Overrides = None,
    router: RouterFolder = None,
    threshold: ThresholdOption = None,
    llm_share: ShareOption = None,
    model: ModelOption = "routed",
    slm: Annotated[
        str | None, typer.Option("--slm", help="Edge mode: folder or hub name of the SLM, run here.")
    ] = None,
    llm_url: Annotated[str | None, typer.Option("--llm-url", help="Edge mode: URL of the LLM's server (vLLM).")] = None,
    llm: Annotated[str | None, typer.Option("--llm", help="Edge mode: the LLM's config.json, for gigabytes.")] = None,
    llm_model: Annotated[str | None, typer.Option("--llm-model", help="Edge mode: its name on the server.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Edge mode: tokens of an answer.")] = 512,
    on_llm_unavailable: Annotated[
        str, typer.Option("--on-llm-unavailable", help="Edge mode: error, or slm to go on with the SLM alone.")
    ] = "error",
) -> None:
    """Answer questions from the terminal, one a line; an empty line or Ctrl-D ends.

    Either --config, or edge mode: --slm runs here and --llm-url is a server whose key is in CITER_LLM_API_KEY.
    """
    console = Console()
    if slm is not None and llm_url is not None and config is None:
        from citer_ray.cli.edge_chat import EdgeSettings, chat_loop

        settings = EdgeSettings(
            slm, llm_url, llm, llm_model, _folder(router), threshold, llm_share, model, max_tokens, on_llm_unavailable
        )
        chat_loop(settings, console)
        return
    if config is None or slm is not None or llm_url is not None:
        raise ConfigError("citer chat needs either --config FILE, or both --slm PATH and --llm-url URL")
    responder = Responder(config, overrides, _folder(router), threshold, llm_share, model)
    while True:
        try:
            question = console.input("[bold]> [/bold]").strip()
        except EOFError:
            return
        if not question:
            return
        trace, tokenizer = responder.respond(question)
        console.print(coloured(trace, tokenizer))
        console.print(summary(trace), style="dim")
