"""The Dockerfile subset: done as Docker does it, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness_rl.sandboxes.dockerfile import Copy, Recipe, Run, parse
from harness_rl.sandboxes.errors import SandboxBuildFailedError
from harness_rl.sandboxes.images import check_definition
from harness_rl.sandboxes.rootfs import KNOWN_IMAGES

FROM = "FROM debian:bookworm-slim\n"


def read(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    return parse(path, KNOWN_IMAGES)


def test_supported_instructions(tmp_path: Path) -> None:
    recipe = read(
        tmp_path,
        "# a comment\n" + FROM + 'ENV A=1 B="two words"\nENV PATH=/opt/bin:$PATH\nENV OLD form of env\nWORKDIR /app\nWORKDIR sub\n'
        'RUN echo ${A:-none} && \\\n    # inside\n    echo done\nRUN ["/bin/echo", "x"]\n'
        "COPY a.txt b.txt ./\nADD data/ /srv/\nCOPY one /srv/two\n",
    )
    assert recipe.workdir == "/app/sub"
    assert recipe.env["B"] == "two words" and recipe.env["OLD"] == "form of env"
    assert recipe.env["PATH"].startswith("/opt/bin:/usr/local/sbin:")
    made, below, first, second, copied, added, renamed = recipe.steps
    assert isinstance(made, Run) and isinstance(below, Run) and (made.argv[-1], below.argv[-1]) == ("/app", "/app/sub")
    assert (
        isinstance(first, Run)
        and first.cwd == "/app/sub"
        and first.argv[:2] == ("/bin/sh", "-c")
        and first.argv[2].split()[-2:] == ["echo", "done"]
    )
    assert isinstance(second, Run) and second.argv == ("/bin/echo", "x")
    assert copied == Copy(("a.txt", "b.txt"), "/app/sub/") and added == Copy(("data/",), "/srv/") and renamed == Copy(("one",), "/srv/two")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN true\n", r"Dockerfile:1: RUN: the first instruction must be FROM"),
        ("FROM ubuntu:24.04\n", r"Dockerfile:1: FROM: unknown base image 'ubuntu:24.04'"),
        (FROM + FROM, r"Dockerfile:2: FROM: multi-stage"),
        ("FROM debian:bookworm AS build\n", r"unknown base image"),
        (FROM + "USER agent\n", r"Dockerfile:2: USER: is not supported"),
        (FROM + 'ENTRYPOINT ["x"]\n', r"ENTRYPOINT"),
        (FROM + "HEALTHCHECK CMD true\n", r"HEALTHCHECK"),
        (FROM + "VOLUME /data\n", r"VOLUME"),
        (FROM + "ARG X=1\n", r"ARG"),
        (FROM + "RUN --mount=type=cache true\n", r"--mount=type=cache is not supported"),
        (FROM + "RUN cat <<EOF\nhello\nEOF\n", r"here-documents"),
        (FROM + "COPY --from=build /a /b\n", r"--from is not supported"),
        (FROM + "COPY --chown=1:1 a b\n", r"--chown"),
        (FROM + "COPY ../secret /x\n", r"outside the task's environment folder"),
        (FROM + "ADD https://example.org/x /x\n", r"not a file of the task"),
        (FROM + "ADD a.tar.gz /x\n", r"unpacking a.tar.gz"),
        (FROM + "ENV broken\n", r"not NAME=value"),
        ("", r"no FROM"),
    ],
)
def test_everything_else_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SandboxBuildFailedError, match=message):
        read(tmp_path, text)


def test_images_and_compose(tmp_path: Path) -> None:
    assert check_definition(tmp_path, "debian:bookworm").steps == ()
    with pytest.raises(SandboxBuildFailedError, match=r"docker_image 'alpine' is not available"):
        check_definition(tmp_path, "alpine")
    (tmp_path / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(SandboxBuildFailedError, match="Docker Compose"):
        check_definition(tmp_path, None)
