"""The command group: what it lists and how it refuses."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import click
import pytest
import trio
from click.testing import CliRunner

import metis
from metis.cli.logs import JsonFormatter, TextFormatter
from metis.cli.main import cli
from metis.cli.options import Duration, run_reported
from tests.cli.conftest import run_metis


def test_every_command_has_a_line_in_the_help() -> None:
    done = CliRunner().invoke(cli, ["--help"])
    assert done.exit_code == 0
    for name in ("admin", "daemon", "demo", "health", "install"):
        assert f"  {name} " in done.output


@pytest.mark.parametrize(
    "path",
    [
        ("daemon",),
        ("health",),
        ("install",),
        ("demo",),
        ("reclaim",),
        ("admin", "cidr-blocks", "list"),
        ("admin", "ip-addresses", "list"),
    ],
)
def test_every_command_explains_itself(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, [*path, "--help"])
    assert done.exit_code == 0
    assert "Usage:" in done.output


def test_a_typo_in_a_command_is_named() -> None:
    done = run_metis("demon")
    assert done.returncode == 2
    assert "No such command 'demon'" in done.stderr


def test_the_version_is_the_package_s() -> None:
    assert CliRunner().invoke(cli, ["--version"]).output == (
        f"metis, version {metis.__version__}\n"
    )


@pytest.mark.parametrize(
    ("value", "seconds"), [("1m", 60.0), ("500ms", 0.5), ("0", 0.0), (2.5, 2.5)]
)
def test_durations_come_as_seconds(value: object, seconds: float) -> None:
    assert Duration().convert(value, None, None) == seconds


@pytest.mark.parametrize(
    "end", [SystemExit(1), KeyboardInterrupt(), BrokenPipeError(errno.EPIPE, "gone")]
)
def test_what_ends_a_command_comes_out_of_its_nurseries(end: BaseException) -> None:
    async def main() -> None:
        async with trio.open_nursery():
            raise end

    with pytest.raises(type(end)) as ended:
        run_reported(main)
    assert ended.value is end


def test_output_that_finds_no_space_is_told_in_one_line() -> None:
    async def main() -> None:
        async with trio.open_nursery():
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(click.ClickException, match="the output cannot be written: No"):
        run_reported(main)


def test_install_puts_the_plugin_where_it_was_told(tmp_path: Path) -> None:
    done = run_metis("install", "--cni-dir", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "bin" / "metis").stat().st_mode & 0o777 == 0o755
    done = run_metis("install", "--cni-dir", "")
    assert done.returncode == 2
    assert "it is empty: write a directory" in done.stderr
    done = run_metis("install", "--cni-dir", tmp_path / "bin" / "metis")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def record(message: str, **fields: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": "metis.x",
            "levelname": "INFO",
            "msg": message,
            "created": 0.25,
            "msecs": 250,
            **fields,
        }
    )


def test_a_text_line_quotes_what_would_break_it() -> None:
    line = TextFormatter().format(record("did it", a=1, b="two words", c='"', d=""))
    assert line == (
        '1970-01-01T00:00:00.250Z INFO metis.x did it a=1 b="two words" c="\\"" d=""'
    )


def test_a_json_line_holds_figures_of_any_type() -> None:
    line = JsonFormatter().format(record("did it", a=1, path=Path("/x")))
    assert line == (
        '{"time": "1970-01-01T00:00:00.250Z", "level": "info", "logger": "metis.x", '
        '"message": "did it", "a": 1, "path": "/x"}'
    )


def test_a_traceback_is_part_of_the_event() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        exc_info = (type(error), error, error.__traceback__)
    text = TextFormatter().format(record("failed", exc_info=exc_info))
    assert text.splitlines()[-1] == "ValueError: boom"
    assert '"exception": "Traceback' in JsonFormatter().format(
        record("failed", exc_info=exc_info)
    )
