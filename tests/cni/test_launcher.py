"""The launchers: what they hand on, and what they say when something is gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metis.cni.launcher import (
    MAX_SHEBANG_BYTES,
    bundled_launcher,
    launcher,
    start_module,
)

RELAY = """\
import json, sys
def main(name, socket_path, search_path):
    flags = [sys.flags.isolated, sys.flags.no_site]
    print(json.dumps([name, socket_path, search_path, sys.argv, flags]))
    return 7
"""

SEARCH_PATH = ["/a path", "/it's", '/"b"', "/$HOME"]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], env={}, capture_output=True, text=True, check=False
    )


def failure(program: Path) -> Any:
    """The error object that is all that a broken program says."""
    done = run(program)
    assert (done.returncode, done.stderr) == (1, "")
    answer = json.loads(done.stdout)
    assert answer["code"] == 999
    assert "`metis install` repairs that" in answer["details"]
    return answer


@pytest.mark.parametrize(
    "name", ["plain", "blank in it", "quote's blank", "both \"of' them", "dollar $HOME"]
)
def test_the_relay_is_told_everything_whatever_the_paths_look_like(
    name: str, tmp_path: Path
) -> None:
    directory = tmp_path / name
    directory.mkdir()
    python = written(directory / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    relay = written(directory / "relay.py", RELAY)
    program = written(
        tmp_path / "ipam-of-ours",
        launcher(str(python), str(relay), f"/{name}/sock", SEARCH_PATH),
    )
    done = run(program, "--flag", "a b")
    assert (done.returncode, done.stderr) == (7, "")
    assert json.loads(done.stdout) == [
        str(program),
        f"/{name}/sock",
        SEARCH_PATH,
        [str(program), "--flag", "a b"],
        [1, 1],
    ]


def test_a_relay_is_started_from_its_byte_code(tmp_path: Path) -> None:
    relay = written(tmp_path / "relay.py", RELAY)
    program = written(
        tmp_path / "metis", launcher(sys.executable, str(relay), "/s", [])
    )
    assert run(program).returncode == 7
    assert len(list((tmp_path / "__pycache__").iterdir())) == 1


@pytest.mark.parametrize("gone", ["python", "relay.py"])
def test_what_is_gone_is_told_in_the_form_of_cni(gone: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    relay = written(tmp_path / "relay.py", RELAY)
    program = written(tmp_path / "metis", launcher(str(python), str(relay), "/s", []))
    assert run(program).returncode == 7
    (tmp_path / gone).unlink()
    assert str(tmp_path / gone) in failure(program)["details"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def main(:", "SyntaxError: invalid syntax"),
        (
            "raise ImportError('\"half\" \\\\ of it \\n ü')",
            "ImportError: 'half' / of it",
        ),
        ("import absent", "ModuleNotFoundError: No module named 'absent'"),
        ("pass", "AttributeError: module 'metis.cni.relay' has no attribute 'main'"),
        ("raise SystemExit", "SystemExit: "),
    ],
)
def test_a_broken_package_is_told_in_the_form_of_cni(
    source: str, said: str, tmp_path: Path
) -> None:
    relay = written(tmp_path / "relay.py", source)
    program = written(
        tmp_path / "metis", launcher(sys.executable, str(relay), "/s", [])
    )
    assert failure(program)["details"].startswith(said)


def test_damaged_byte_code_is_told_in_the_form_of_cni(tmp_path: Path) -> None:
    relay = written(tmp_path / "relay.py", RELAY)
    program = written(
        tmp_path / "metis", launcher(sys.executable, str(relay), "/s", [])
    )
    run(program)
    (cached,) = (tmp_path / "__pycache__").iterdir()
    cached.write_bytes(cached.read_bytes()[:40])
    failure(program)


def test_the_kernel_reads_the_whole_of_a_bundled_launcher() -> None:
    line = bundled_launcher("/opt/cni/metis/0.1.0-abcdef/python").splitlines()[0]
    assert line == "#!/opt/cni/metis/0.1.0-abcdef/python -IScimport metis_start"

    longest = "/" + "d" * (MAX_SHEBANG_BYTES - len("#!/ -IScimport metis_start"))
    assert len(bundled_launcher(longest).splitlines()[0]) == MAX_SHEBANG_BYTES
    with pytest.raises(ValueError, match=r"has 103 bytes, and no more than 102 fit"):
        bundled_launcher(f"{longest}d")


@pytest.mark.parametrize("blank", [" ", "\t", "\n"])
def test_an_interpreter_that_no_first_line_can_name_is_refused(blank: str) -> None:
    with pytest.raises(ValueError, match="has a blank"):
        bundled_launcher(f"/opt/my{blank}cni/python")


def test_a_tree_s_start_finds_its_modules_wherever_the_tree_is() -> None:
    text = start_module("/run/it's.sock", "lib/relay.pyc", ["lib/a", "modules"])
    assert "sys.prefix + '/lib/relay.pyc'" in text
    assert "[sys.prefix + '/lib/a', sys.prefix + '/modules']" in text
    assert '"/run/it\'s.sock"' in text
    compile(text, "start", "exec")
