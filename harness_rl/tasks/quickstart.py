"""The quickstart's tasks: `python -m harness_rl.tasks.quickstart [FOLDER]` writes FOLDER/train and FOLDER/heldout.

Invariants: the same seed writes the same bytes on every machine; no word of a held-out task occurs in a training task; a verifier looks at
the outcome only, never at the command; its reward file exists whatever the agent did (a missing one would be no reward at all, not a 0).

Each task is one short sentence that one short shell command solves, in a plain Debian image with the task's files in /app. That is as
much as a model of 135M parameters can learn in minutes, and still asks for the right command with the right names in the right places.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness_rl.errors import UserError

DEFAULT_FOLDER = Path("examples/tasks/quickstart")
SEED = 0
TRAIN_TASKS = 60
HELDOUT_TASKS = 20
IMAGE = "debian:bookworm-slim"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Common words that the quickstart model's tokenizer holds as one token each, after a space and after a slash: commands stay short, and
# names are copied whole. One list per split.
TRAIN_WORDS = _words("""
apple bean corn rice wheat sugar salt bread milk pine rose grass leaf root lion bear wolf fox horse pig dog mouse rat bird owl river
lake ocean stone rock sand clay iron gold sun moon star planet cloud rain snow storm wind red blue green yellow purple brown house
castle tower bridge road farm market school church table chair clock window door king train ship boat bus plane
""")
HELDOUT_WORDS = _words("""
berry orange seed branch flower tree forest crow fish snake ant bee glass paper wood winter summer spring night black white gray amber
street museum station key lock box cup plate nail bucket brush button ring doctor teacher writer bell wheel engine anchor
""")


@dataclass(frozen=True)
class Draft:
    """A task before it is written to disk."""

    family: str
    slug: str
    """Unique within its split."""
    instruction: str
    files: dict[str, str]
    """What lies in /app at the start."""
    solution: str
    """One shell command."""
    goal: str
    """The verifier's own words for success."""
    check: str
    """A bash condition; see `_TEST` for the helpers."""
    expected: str | None = None
    """Written to tests/expected.txt."""


_TEST = """\
#!/bin/bash
# Reward 1 when {goal}, else 0. Only the outcome counts; blank space around a line does not.
PATH=/usr/sbin:/usr/bin:/sbin:/bin

# The text of a regular file (a link does not count), each line trimmed.
text() {{ [ -f "$1" ] && [ ! -L "$1" ] && head -c 65536 "$1" | tr -d '\\0' | sed 's/^[[:space:]]*//; s/[[:space:]]*$//'; }}
same() {{ [ -n "$(text "$1")" ] && [ "$(text "$1")" = "$(text /tests/expected.txt)" ]; }}
{helper}
reward=0
if {check}; then reward=1; fi
mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
"""

# A day of tolerance: the agent may write another time zone's date, or work at midnight. The year must stand in the line, with more: date(1)
# takes a bare number for a time of today.
_TODAY = """\
today() {
  local line when
  line=$(text "/app/$1") && [ "$(wc -l <<< "$line")" = 1 ] && [ ${#line} -ge 8 ] || return 1
  when=$(date -d "$line" +%s 2> /dev/null) && (( when > $(date +%s) - 172800 && when < $(date +%s) + 172800 )) || return 1
  [[ $line == *$(date -d "$line" +%Y)* ]]
}
"""

# The script runs where only the right file exists, with fresh content: printing the old content does not pass.
_RUNS = """\
runs() {
  local dir probe output
  [ -f "/app/$1" ] && [ ! -L "/app/$1" ] || return 1
  dir=$(mktemp -d) && probe="probe $RANDOM$RANDOM" && echo "$probe" > "$dir/$2" && cp -p "/app/$1" "$dir/" || return 1
  output=$(cd "$dir" && timeout -k 1 5 "./$1" < /dev/null 2>&1) && [ "$output" = "$probe" ]
}
"""

_HELPERS = {"today": _TODAY, "runs": _RUNS}

_TOML = """\
schema_version = "1.4"

[task]
name = "quickstart/{name}"
description = "{description}"

[metadata]
family = "{family}"

[agent]
timeout_sec = 180

[verifier]
timeout_sec = 60

[environment]
docker_image = "{image}"
workdir = "/app"
network_mode = "no-network"
build_timeout_sec = 120
cpus = 1
memory_mb = 512
storage_mb = 256
"""


def _lines(words: Iterable[str]) -> str:
    return "".join(f"{word}\n" for word in words)


def _write(rng: random.Random, words: Sequence[str]) -> Draft:
    name, other = rng.sample(words, 2)
    return Draft(
        family="write",
        slug=f"write-{name}",
        instruction=f"Write the date into {name}.txt.",
        files={f"{other}.txt": _lines([other])},
        solution=f"date > {name}.txt",
        goal=f"{name}.txt holds one line with today's date, its year in full",
        check=f"today {name}.txt",
    )


def _move(rng: random.Random, words: Sequence[str]) -> Draft:
    old, new, *content = rng.sample(words, rng.randint(4, 6))
    return Draft(
        family="move",
        slug=f"move-{old}-{new}",
        instruction=f"Rename {old}.txt to {new}.txt.",
        files={f"{old}.txt": _lines(content)},
        solution=f"mv {old}.txt {new}.txt",
        goal=f"{old}.txt is gone and {new}.txt holds what it held",
        check=f"[ ! -e /app/{old}.txt ] && same /app/{new}.txt",
        expected=_lines(content),
    )


def _count(rng: random.Random, words: Sequence[str]) -> Draft:
    source, target, *content = rng.sample(words, rng.randint(5, 14))
    return Draft(
        family="count",
        slug=f"count-{source}-{target}",
        instruction=f"Count the lines of {source}.txt into {target}.txt with wc.",
        files={f"{source}.txt": _lines(content)},
        solution=f"wc -l {source}.txt > {target}.txt",
        goal=f"{target}.txt holds the number of lines of {source}.txt, and at most that file's name besides",
        check=f'[[ "$(text /app/{target}.txt)" =~ ^{len(content)}( {source}.txt)?$ ]]',
    )


def _unique(rng: random.Random, words: Sequence[str]) -> Draft:
    source, target, *content = rng.sample(words, rng.randint(4, 6))
    content.sort()  # so that `sort -u` is right, too
    return Draft(
        family="transform",
        slug=f"uniq-{source}-{target}",
        instruction=f"Uniq the lines of {source}.txt into {target}.txt.",
        files={f"{source}.txt": _lines(word for index, word in enumerate(content) for _ in range(rng.randint(1, 3) if index else 2))},
        solution=f"uniq {source}.txt > {target}.txt",
        goal=f"{target}.txt holds each line of {source}.txt once",
        check=f"same /app/{target}.txt",
        expected=_lines(content),
    )


def _sort(rng: random.Random, words: Sequence[str]) -> Draft:
    source, target, *content = rng.sample(words, rng.randint(6, 8))
    content.sort(reverse=True)
    return Draft(
        family="transform",
        slug=f"sort-{source}-{target}",
        instruction=f"Sort {source}.txt into {target}.txt.",
        files={f"{source}.txt": _lines(content)},
        solution=f"sort {source}.txt > {target}.txt",
        goal=f"{target}.txt holds the lines of {source}.txt in alphabetical order",
        check=f"same /app/{target}.txt",
        expected=_lines(sorted(content)),
    )


def _fix(rng: random.Random, words: Sequence[str]) -> Draft:
    script, data, *content = rng.sample(words, 4)
    return Draft(
        family="fix",
        slug=f"fix-{script}-{data}",
        instruction=f"Make the failing {script}.sh executable.",
        files={f"{script}.sh": f"#!/bin/bash\nset -e\ncat {data}.txt\n", f"{data}.txt": _lines(content)},
        solution=f"chmod +x {script}.sh",
        goal=f"{script}.sh can be run and prints {data}.txt",
        check=f"runs {script}.sh {data}.txt",
    )


KINDS: tuple[Callable[[random.Random, Sequence[str]], Draft], ...] = (_write, _move, _count, _unique, _sort, _fix)


def draft_split(words: Sequence[str], count: int, seed: str) -> list[Draft]:
    """`count` different drafts from `words` alone, the kinds taking turns, so that any beginning of the list is a fair sample."""
    rng = random.Random(seed)  # a string seed is hashed with SHA-512: the same on every machine and Python
    drafts: dict[str, Draft] = {}
    while len(drafts) < count:
        draft = KINDS[len(drafts) % len(KINDS)](rng, words)
        drafts.setdefault(draft.slug, draft)
    return list(drafts.values())


def task_files(draft: Draft, name: str) -> dict[str, str]:
    """The files of one Harbor task whose folder is called `name`: path -> text."""
    helper = "".join(text for name, text in _HELPERS.items() if f"{name} " in draft.check)
    texts = {
        "instruction.md": draft.instruction + "\n",
        "task.toml": _TOML.format(name=name, description=draft.instruction, family=draft.family, image=IMAGE),
        "solution/solve.sh": f"#!/bin/bash\n{draft.solution}\n",
        "tests/test.sh": _TEST.format(goal=draft.goal, check=draft.check, helper=helper),
        **{f"environment/{name}": text for name, text in draft.files.items()},
    }
    if draft.expected is not None:
        texts["tests/expected.txt"] = draft.expected
    return texts


def generate(folder: Path, train: int = TRAIN_TASKS, heldout: int = HELDOUT_TASKS, seed: int = SEED) -> dict[str, int]:
    """Write both splits under `folder` and return their sizes. A split that is there already, whole and the same, is not touched: a run
    may be using it. Another one of ours is replaced; anything else is left alone (UserError)."""
    sizes = {}
    for split, words, count in (("train", TRAIN_WORDS, train), ("heldout", HELDOUT_WORDS, heldout)):
        files: dict[str, str] = {}
        for number, draft in enumerate(draft_split(words, count, f"{seed}/{split}"), 1):
            name = f"{number:02d}-{draft.slug}"
            files |= {f"{name}/{path}": text for path, text in task_files(draft, name).items()}
        _write_split(folder / split, files)
        sizes[split] = count
    return sizes


def _write_split(target: Path, files: dict[str, str]) -> None:
    if target.exists():
        found = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
        if found == {name: text.encode() for name, text in files.items()}:
            return
        foreign = sorted(path.name for path in target.iterdir() if not (path / "task.toml").is_file())
        if foreign:
            raise UserError(f"tasks: {target} holds {foreign[0]}, which is no task of ours; give another folder")
        shutil.rmtree(target)
    for name, text in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        path.chmod(0o755 if path.name in ("solve.sh", "test.sh") else 0o644)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness_rl.tasks.quickstart", description="Write the quickstart's tasks.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--train", type=int, default=TRAIN_TASKS)
    parser.add_argument("--heldout", type=int, default=HELDOUT_TASKS)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args(argv)
    try:
        sizes = generate(args.folder, args.train, args.heldout, args.seed)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{args.folder}: " + ", ".join(f"{size} {split} tasks" for split, size in sizes.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
