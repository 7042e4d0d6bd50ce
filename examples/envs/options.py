"""The flags that the examples share: where a game's server is, what is trained, and where the engine runs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness_rl import GRPOTrainer, openenv_server

CPU_FLAGS = {"model": "smollm2-135m", "max_steps": 10, "num_generations": 8, "per_device_batch_size": 32, "learning_rate": 3e-5}
"""Defaults of the flags with `--cpu`."""
CPU: dict[str, Any] = {
    "loss_type": "grpo",
    "save_strategy": "no",
    "rollout": {"max_output_tokens_per_call": 40},
    "engine": {"max_model_len": 1024, "max_num_seqs": 32},
    "warmup": {"enabled": True, "batch": 4, "check_from": 8, "check_tasks": 32, "target_low": 0.2, "target_high": 0.5},
}
"""With `--cpu`, in the names of GRPOConfig, what every game shares."""
SHORT: dict[str, Any] = {
    "run": {"short": True},
    "warmup": {"demonstrations": 12, "check_from": 12, "check_tasks": 4, "target_low": 0.0},
}
"""With `--short`, what is less still: a warm start that ends after twelve games, whatever was learned."""


def add_training(parser: argparse.ArgumentParser, name: str, *, counted: bool = True, **defaults: Any) -> None:
    """`defaults` are of these flags, by their long names. `counted`: the script makes as many rows as it is asked for."""
    parser.add_argument("--model", "--model-id", help="model folder, hub id or a name of `harness-rl models`")
    parser.add_argument("--output-dir", default=f"runs/{name}")
    if counted:
        parser.add_argument("--dataset-size", type=int, default=64, help="rows; each is a game of its own")
        parser.add_argument("--held-out", type=int, default=0, metavar="GAMES", help="play so many other games before and after training")
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--num-generations", type=int, help="games of each row, compared with each other")
    parser.add_argument("--per-device-batch-size", type=int, help="games a step, times --gradient-accumulation-steps")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="two cores, no GPU: a model of 135M, short games, a warm start on played ones")
    parser.add_argument("--short", action="store_true", help="--cpu with a shorter warm start and two small steps: does all of it work?")
    parser.add_argument("--control", action="store_true", help="shuffle the advantages: nothing can be learned")
    parser.add_argument("--evaluate", type=int, metavar="GAMES", help="play so many games, sampled and greedy, instead of training")
    parser.add_argument("--vllm-mode", choices=["colocate", "server"], default="colocate", help="launch the engine, or connect to one")
    parser.add_argument("--vllm-server-url", default="http://localhost:8000", help="with --vllm-mode server")
    parser.set_defaults(**{"model": "Qwen/Qwen3-1.7B", "max_steps": 150, "num_generations": 8, "learning_rate": 1e-6, **defaults})


def read(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, **cpu: Any) -> argparse.Namespace:
    """The flags. `cpu` are the example's defaults with `--cpu`, before those that all share."""
    first, _ = parser.parse_known_args(arguments)
    if first.cpu or first.short:
        parser.set_defaults(**CPU_FLAGS | cpu | {"cpu": True})
    return parser.parse_args(arguments)


def held_out(options: argparse.Namespace, rows: Callable[[int], list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
    """Rows after those that are trained, `--held-out` of them (`rows(count)` may make several of each)."""
    others = rows(options.dataset_size + options.held_out)[len(rows(options.dataset_size)) :]
    return others[: options.held_out] or None


def add_server(parser: argparse.ArgumentParser, image: str) -> None:
    """Of a script with one server."""
    modes = ["local", "space", "docker-local", "docker-image", "docker-hub"]
    parser.add_argument("--env-mode", choices=modes, help="local: a process of this script's (the default where no URL is given)")
    parser.add_argument("--env-url", help="of a server that runs already")
    parser.add_argument("--env-host", help="the same, or with docker-local the host of a container that runs already")
    parser.add_argument("--env-port", type=int, default=8001, help="with docker-local")
    parser.add_argument("--env-image", default=image, help="with docker-image and docker-hub")


@contextlib.contextmanager
def server(options: argparse.Namespace, app: str, **env: str) -> Iterator[str]:
    """The URL of the server that the flags ask for, for as long as the block lasts."""
    url = options.env_url or (options.env_host if "://" in (options.env_host or "") else None)
    mode = options.env_mode or ("space" if url else "local")
    if mode == "docker-local":
        url = url or f"http://{options.env_host or '127.0.0.1'}:{options.env_port}"
    if mode in ("space", "docker-local"):
        where: dict[str, Any] = {"url": url or f"http://{options.env_host}"}
    elif mode == "local":
        where = {"app": app}
    else:
        where = {"image": options.env_image}
    with openenv_server(**where, sessions=games_at_once(options) + 4, env=env) as found:
        yield found


def run(options: argparse.Namespace, trainer: GRPOTrainer) -> None:
    """Train, or measure: each of the first `--evaluate` rows once with sampling, and once without."""
    if options.evaluate is None:
        trainer.train()
        return
    found = trainer.evaluate(list(trainer.train_dataset or ())[: options.evaluate], samples=1)
    for name, value in found.items():
        print(f"{name} {value:.3f}")


def games_at_once(options: argparse.Namespace) -> int:
    return int(options.per_device_batch_size * options.gradient_accumulation_steps)


def training(
    options: argparse.Namespace, cpu: Mapping[str, Any] | None = None, short: Mapping[str, Any] | None = None, **own: Any
) -> dict[str, Any]:
    """What the flags say, in the names of GRPOConfig. `own` are the example's settings; with `--cpu`, those of `cpu` stand before them,
    and with `--short` those of `short` before both; what a flag of its own says (`--no-warm-start`, `--held-out`, `--control`) stands
    before all of them."""
    settings = {
        "output_dir": options.output_dir,
        "seed": options.seed,
        "max_steps": options.max_steps,
        "num_generations": options.num_generations,
        "per_device_train_batch_size": options.per_device_batch_size,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "vllm_mode": options.vllm_mode,
        "vllm_server_base_url": options.vllm_server_url if options.vllm_mode == "server" else None,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    layers = [own]
    if options.cpu:
        layers += [CPU, cpu or {}]
    if options.short:
        layers += [SHORT, short or {}]
    if options.control:
        layers.append({"rollout": {"shuffle_advantages": True}})
    if getattr(options, "warm_start", None) is not None:
        layers.append({"warmup": {"enabled": options.warm_start}})
    if getattr(options, "held_out", 0):
        layers.append({"eval_strategy": "steps", "eval_on_start": True, "eval": {"samples": 1}})
    for layer in layers:
        for name, value in layer.items():
            settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    return settings
