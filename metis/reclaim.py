"""Addresses of owners that are gone though nobody deleted them, taken back.

A round reads what is held, looks at the node (`metis.evidence`), and judges each
owner (`metis.verdicts`). It acts with more care than a verdict needs:

  Two strikes: an owner goes when two rounds, at least an interval apart, have found
  it gone, and each between them. It must be the same allocation all the while: a
  repeated ADD, or any sign of life, and it starts anew. Strikes are kept in memory
  alone, so a daemon that has just started takes nothing in its first rounds.

  A limit: where more addresses than that are to go at once, none does, and it says
  so. Nodes do not lose a hundred containers in silence; evidence may well lie.

  All or nothing: an owner with several addresses goes with all of them, when the
  evidence is there for each, and if it still holds them as it did when it was
  judged (`metis.store.reclaiming`).

What goes rests for the cooldown, whoever waits for an address is told, the history
has the evidence, and the log a line. Rounds are the daemon's: a plugin in direct
mode runs none.

May touch: the store, the engine's lines, Trio's clock.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import trio

from metis.engine import COLLECTED_AT_ONCE, Engine
from metis.errors import StoreError
from metis.model import Holding, Owner
from metis.store.store import Store
from metis.verdicts import Evidence, Verdict, judge

log = logging.getLogger("metis.reclaim")

Look = Callable[[Collection[Holding]], Awaitable[Evidence]]
"""How evidence is taken about the owners of these holdings; `Lookout.look`."""

READ_AT_ONCE = 2000
"""Addresses that are read, looked at and judged before the next ones: all of a node.
Of a hundred thousand, all at once would take 200 MB."""

JUDGED_AT_ONCE = 500
"""Owners that are judged before other tasks have their turn: a few milliseconds."""

NAMED = 5
"""Owners that a message about many names."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How careful reclaim is.

    Attributes:
      interval: between two rounds, and the least between two strikes, in seconds.
      grace: how long an owner is left alone after it asked, in seconds.
      limit: most addresses that may go in a round.
    """

    interval: float
    grace: float
    limit: int


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about the owner of one address, and done about it.

    Attributes:
      holding: the address and its owner.
      verdict: whether the owner is gone, and why.
      strikes: in how many rounds in a row it was found gone, this one included; a
        dry run is no round.
      wait_ms: until a round may take the address back; 0 when now, or never.
      released: whether it was taken back.
    """

    holding: Holding
    verdict: Verdict
    strikes: int = 0
    wait_ms: int = 0
    released: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a round: a finding for each address that is held.

    `held_back` tells why nothing went though something was to; empty otherwise.
    """

    findings: Sequence[Finding]
    held_back: str = ""


@dataclass(frozen=True, slots=True)
class _Case:
    """One owner: all that it holds, the verdict on it, and as of when (stored time)."""

    holdings: tuple[Holding, ...]
    verdict: Verdict
    taken_ms: int

    @property
    def owner(self) -> Owner:
        return self.holdings[0].owner


@dataclass(frozen=True, slots=True)
class _Strike:
    """Since when, and in how many rounds, an owner is gone with what it holds."""

    holdings: tuple[Holding, ...]
    since_ms: int
    rounds: int


class Reclaimer:
    """Takes back what owners hold that are gone, round by round.

    Args:
      engine: knows who waits for an address.
      store: knows who holds one.
      rules: how careful to be.
      look: takes the evidence.
    """

    def __init__(self, engine: Engine, store: Store, rules: Rules, look: Look) -> None:
        self._engine = engine
        self._store = store
        self._rules = rules
        self._look = look
        self._strikes: dict[Owner, _Strike] = {}
        self._one_at_a_time = trio.Lock()

    async def run(self) -> None:
        """Make a round every interval, the first after one; failures are logged."""
        while True:
            await trio.sleep(self._rules.interval)
            try:
                await self._make_round(None, only_gone=True)
            except StoreError as error:
                log.warning("a round of reclaim failed, the next will try: %s", error)

    async def explain(self, limit: int | None = None) -> Report:
        """What a round would find now. Changes nothing, no strikes either.

        Args:
          limit: as for `make_round`.

        Raises:
          StoreError: the database failed.
        """
        async with self._one_at_a_time:
            cases = await self._judge()
            held_back = self._excess(self._due(cases), limit)
            return Report(self._findings(cases), held_back)

    async def make_round(self, limit: int | None = None) -> Report:
        """Look at the node once, and take back what has its two strikes.

        Args:
          limit: most addresses that may go, in place of that of the rules.

        Raises:
          StoreError: the database failed; what was taken back before stays so, and
            all else has its chance in the next round.
        """
        return await self._make_round(limit)

    async def _make_round(
        self, limit: int | None, *, only_gone: bool = False
    ) -> Report:
        """Do what `make_round` says; with `only_gone` no others are in the report."""
        async with self._one_at_a_time:
            cases = await self._judge(only_gone=only_gone)
            self._strikes = {
                case.owner: self._strike(case) for case in cases if case.verdict.gone
            }
            first = sum(strike.rounds == 1 for strike in self._strikes.values())
            if first:
                log.info("owners are gone, for the first time", extra={"owners": first})
            due = self._due(cases)
            held_back = self._excess(due, limit)
            if held_back:
                log.warning("%s", held_back)
                return Report(self._findings(cases), held_back)
            findings = self._findings(cases)
            taken = await self._take_back(due)
        went = {case.owner for case in due}
        return Report([_outcome(finding, went, taken) for finding in findings])

    async def _judge(self, *, only_gone: bool = False) -> list[_Case]:
        """The verdict on every owner, or on those that are gone."""
        cases: list[_Case] = []
        after = None
        while True:
            holdings, after = await self._store.holdings(after, READ_AT_ONCE)
            # After it was read, so that whoever holds something is older.
            evidence = await self._look(holdings)
            cases += await self._cases(holdings, evidence, only_gone=only_gone)
            if after is None:
                return cases

    async def _cases(
        self, holdings: Iterable[Holding], evidence: Evidence, *, only_gone: bool
    ) -> list[_Case]:
        grace_ms = round(self._rules.grace * 1000)
        cases: list[_Case] = []
        groups = itertools.groupby(holdings, key=lambda one: one.owner)
        for number, (_, group) in enumerate(groups):
            if number % JUDGED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
            its = tuple(group)
            verdicts = [judge(holding, evidence, grace_ms) for holding in its]
            # One that is kept keeps all; they are of one interface.
            verdict = min(verdicts, key=lambda one: one.gone)
            if verdict.gone or not only_gone:
                cases.append(_Case(its, verdict, evidence.taken_ms))
        return cases

    def _strike(self, case: _Case) -> _Strike:
        """The strike of an owner that is gone: one more, or the first."""
        had = self._standing(case)
        if had is None:
            return _Strike(case.holdings, case.taken_ms, 1)
        return replace(had, rounds=had.rounds + 1)

    def _standing(self, case: _Case) -> _Strike | None:
        """The strike that an owner has, for exactly what it holds now."""
        had = self._strikes.get(case.owner)
        return had if had is not None and had.holdings == case.holdings else None

    def _due(self, cases: Iterable[_Case]) -> list[_Case]:
        """Those who were gone an interval ago, too."""
        interval_ms = round(self._rules.interval * 1000)
        due = []
        for case in cases:
            had = self._standing(case)
            if not case.verdict.gone or had is None:
                continue
            if case.taken_ms - had.since_ms >= max(interval_ms, 1):
                due.append(case)
        return due

    def _excess(self, due: Sequence[_Case], limit: int | None) -> str:
        """Why nothing may go, or nothing."""
        most = self._rules.limit if limit is None else limit
        number = sum(len(case.holdings) for case in due)
        if number <= most:
            return ""
        names = ", ".join(case.owner.container_id for case in due[:NAMED])
        more = f" and {len(due) - NAMED} more" if len(due) > NAMED else ""
        return (
            f"{number} addresses of {len(due)} owners that are gone would be taken "
            f"back at once, the limit is {most}: nothing is ({names}{more}). If they "
            f"are gone indeed, 'metis reclaim --limit {number}' lets them go"
        )

    def _findings(self, cases: Iterable[_Case]) -> list[Finding]:
        interval_ms = round(self._rules.interval * 1000)
        findings = []
        for case in cases:
            had = self._standing(case)
            if not case.verdict.gone:
                strikes, wait_ms = 0, 0
            elif had is None:
                strikes, wait_ms = 0, interval_ms
            else:
                strikes = had.rounds
                wait_ms = max(had.since_ms + interval_ms - case.taken_ms, 0)
            findings += [
                Finding(holding, case.verdict, strikes, wait_ms)
                for holding in case.holdings
            ]
        return findings

    async def _take_back(self, due: Sequence[_Case]) -> set[Holding]:
        """Take back what is due, in steps; returns what went."""
        reasons = {case.owner: case.verdict.reason for case in due}
        taken: set[Holding] = set()
        for start in range(0, len(due), COLLECTED_AT_ONCE):
            some = due[start : start + COLLECTED_AT_ONCE]
            went = await self._store.reclaim(
                [(case.holdings, case.verdict.reason) for case in some]
            )
            for case in some:
                self._strikes.pop(case.owner, None)
            for network, family in {(one.owner.network, one.family) for one in went}:
                self._engine.announce(network, family)
            for holding in went:
                _tell(holding, reasons[holding.owner])
            taken |= set(went)
        return taken


def _outcome(finding: Finding, went: set[Owner], taken: set[Holding]) -> Finding:
    """A finding, with what became of it."""
    if finding.holding in taken:
        return replace(finding, released=True)
    if finding.holding.owner in went:
        again = Verdict(False, "it asked for the address again in this very moment")
        return replace(finding, verdict=again, strikes=0)
    return finding


def _tell(holding: Holding, reason: str) -> None:
    owner, pod = holding.owner, holding.pod
    log.warning(
        "an address was taken back from an owner that is gone",
        extra={
            "address": holding.address,
            "network": owner.network,
            "container": owner.container_id,
            "interface": owner.interface_name,
            "pod": f"{pod.namespace}/{pod.name}" if pod.name else "",
            "reason": reason,
        },
    )
