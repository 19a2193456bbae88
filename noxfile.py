"""Sessions: lint, types, proto and tests by default; e2e, faults, bench by name."""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "proto", "tests"]
nox.options.reuse_existing_virtualenvs = True

PYPROJECT = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session, *groups: str, package: bool = True) -> None:
    """Install dependency groups, and the project itself, at the pinned versions."""
    wanted = nox.project.dependency_groups(PYPROJECT, *groups) if groups else ()
    session.install(
        *(["."] if package else []), *wanted, "--constraint", "constraints.txt"
    )


@nox.session
def lint(session: nox.Session) -> None:
    install(session, "lint", package=False)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    install(session, "types")
    session.run("mypy")


@nox.session
def proto(session: nox.Session) -> None:
    install(session, "proto", package=False)
    session.run("scripts/gen_proto.sh", "--check", external=True)


@nox.session
def tests(session: nox.Session) -> None:
    install(session, "tests")
    session.run("pytest", *session.posargs)


@nox.session
def e2e(session: nox.Session) -> None:
    """Real libcni, containerd and podman; needs root and their Debian packages."""
    install(session, "e2e")
    session.run("pytest", "--confcutdir=tests/e2e", "tests/e2e", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Everything breaks, and nothing is lost: a tenth of the counts, or --full.

    Needs root and util-linux for file systems of its own; less without.
    """
    install(session, "faults")
    session.run("pytest", "--confcutdir=tests/faults", "tests/faults", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Figures beside yardsticks; docs/performance.md says what and with which flags.

    Needs host-local for a part of them, and root for the profile.
    """
    install(session, "bench")
    session.run("python", "-m", "benchmarks", *session.posargs)
