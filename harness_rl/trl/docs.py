"""`python -m harness_rl.trl.docs > docs/trl.md`: the table of fields.py for people. A test holds that file to it."""

from __future__ import annotations

from collections.abc import Iterable

from harness_rl.trl.fields import ARGUMENTS, ASYNC, COMMON, GRPO, Field

HEAD = """# TRL's names

Written by `python -m harness_rl.trl.docs`. Every field of TRL 1.16's `GRPOConfig` and `AsyncGRPOConfig` and every argument of their
trainers is one of these:

- **mapped** to a setting of the run config (`section.key`, see `harness_rl/config.py`);
- **honoured** as the text says;
- **accepted**: it has no effect here, and one logged line says why;
- **refused**: a value other than TRL's default is an error that says what to do instead.

A field that is left out means TRL's default where it changes what is learned. Where it only changes speed, memory or logging, it means
ours.
Both configs take sections of the run config beside TRL's names: `GRPOConfig(max_steps=20, engine={"max_model_len": 4096})`.
"""


def render() -> str:
    parts = [HEAD]
    for title, fields in (
        ("Both configs", COMMON),
        ("GRPOConfig (AsyncGRPOConfig takes them too)", GRPO),
        ("AsyncGRPOConfig", ASYNC),
        ("Arguments of the trainers", ARGUMENTS),
    ):
        parts.append(f"## {title}\n\n| name | TRL's default | here |  |\n| --- | --- | --- | --- |\n" + "".join(_rows(fields.values())))
    return "\n".join(parts)


def _rows(fields: Iterable[Field]) -> Iterable[str]:
    for field in fields:
        text = f"`{field.text}`" if field.how == "mapped" else field.text.replace("|", "\\|")
        yield f"| `{field.name}` | `{field.default!r}` | {field.how} | {text} |\n"


if __name__ == "__main__":
    print(render(), end="")
