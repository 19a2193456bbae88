"""Files that are cut and flipped after a kill: nobody's address goes to another.

The files are those of a process that was killed by SIGKILL in the middle of its life:
database, log and the log's index. Damage comes to a copy, which is then opened as the
daemon does. Whatever can be read or not, no address that was promised to an owner goes
to another one, and none that cools, until a whole cooldown has passed.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import trio

from metis.clock import SystemClock
from metis.errors import PoolExhausted, StoreDamaged, StoreError, StoreIncompatible
from metis.model import Allocation, Family, Owner, Pod, Wanted
from metis.store import caution
from metis.store.reading import check_file
from metis.store.repair import repair
from metis.store.store import Store, open_store
from metis.store.violations import Kind
from tests.faults.counts import Counts
from tests.faults.damage_worker import COOLDOWN, IPV4, IPV6, OTHER
from tests.faults.promises import Promises
from tests.store.databases import owner

COUNT = 1_000
"""Damages of each kind in a full run."""

PAGE = 4096

BESIDE_OWNERS = {Kind.REFERENCE, Kind.TIME, Kind.WINDOW, Kind.FILLED, Kind.NOTE}
"""What may be wrong after an opening: nothing about who has which address."""

STRANGERS = 3
"""Owners who ask for an address of each block after the damage."""


@dataclass
class Killed:
    """What a killed process left: files, and promises."""

    directory: Path
    promises: Promises

    def copied_to(self, place: Path) -> Path:
        shutil.copytree(self.directory, place)
        return place / "metis.sqlite"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[Killed]:
    """Stores that were killed: with all in the log, with some and most in the file."""
    return [kill(tmp_path_factory.mktemp("killed"), number) for number in (0, 1, 3)]


def kill(directory: Path, foldings: int) -> Killed:
    promises = Promises()
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.faults.damage_worker"),
            *(str(directory / "metis.sqlite"), str(foldings)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "done\n":
                break
            verb, network, container, addresses, *end_ms = json.loads(line)
            who = owner(container, network)
            got = [Allocation(Family.of(one), one, "") for one in addresses]
            if verb == "ADD":
                promises.given(who, got)
            else:
                promises.taken(who, got, *end_ms)
        process.kill()
    assert {each.suffix for each in directory.iterdir()} >= {".sqlite", ".sqlite-wal"}
    return Killed(directory, promises)


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory: thousands of files are copied."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        yield Path(name) / "copy"


Damage = Callable[[Path, random.Random], str]
"""Does something to the files of a database, and says what."""


def part(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def cut_log(path: Path, chance: random.Random) -> str:
    log = part(path, "-wal")
    size = chance.randrange(log.stat().st_size)
    with log.open("r+b") as file:
        file.truncate(size)
    return f"log cut to {size}"


def cut_file(path: Path, chance: random.Random) -> str:
    size = chance.randrange(max(path.stat().st_size, 1))
    with path.open("r+b") as file:
        file.truncate(size)
    return f"file cut to {size}"


def flip(path: Path, chance: random.Random) -> str:
    """Some bits, bytes or a whole page, of one place in one of the two."""
    suffix = chance.choice(["", "-wal"])
    victim = part(path, suffix)
    content = bytearray(victim.read_bytes())
    if not content:
        return "nothing to flip"
    at = chance.randrange(len(content))
    kind = chance.choice(["bit", "byte", "bytes", "zeros", "page", "foreign page"])
    match kind:
        case "bit":
            content[at] ^= 1 << chance.randrange(8)
        case "byte":
            content[at] = chance.randrange(256)
        case "bytes":
            some = content[at : at + chance.randrange(2, 64)]
            content[at : at + len(some)] = chance.randbytes(len(some))
        case "zeros":
            some = content[at : at + 512]
            content[at : at + len(some)] = bytes(len(some))
        case "page":
            at -= at % PAGE
            some = content[at : at + PAGE]
            content[at : at + len(some)] = chance.randbytes(len(some))
        case "foreign page":
            at -= at % PAGE
            other = PAGE * chance.randrange(max(len(content) // PAGE, 1))
            page = content[other : other + PAGE]
            content[at : at + PAGE] = page + content[at + len(page) : at + PAGE]
    victim.write_bytes(content)
    return f"{kind} of {victim.name} at {at}"


def lose_a_file(path: Path, chance: random.Random) -> str:
    """Not all three: then nothing tells of there having been a database."""
    suffixes = chance.choice([("",), ("-wal",), ("", "-wal"), ("", "-shm")])
    for suffix in suffixes:
        part(path, suffix).unlink()
    return f"lost {suffixes}"


def empty_a_file(path: Path, chance: random.Random) -> str:
    suffix = chance.choice(["", "-wal"])
    part(path, suffix).write_bytes(chance.choice([b"", b" " * 4096, bytes(4096)]))
    return f"blank {suffix or 'file'}"


async def judged(
    path: Path, promises: Promises, what: str, counts: Counts, *, thorough: bool
) -> str:
    """Open a damaged database and ask for all that strangers can get.

    Returns:
      What became of it, in a word.
    """
    promises = copy.deepcopy(promises)
    became = ""
    # Whoever comes across damage opens the database once more, and thoroughly.
    for is_thorough in [True] if thorough else [False, True]:
        try:
            async with open_store(
                str(path), release_cooldown=COOLDOWN, thorough=is_thorough
            ) as store:
                await strangers(store, promises)
                is_cautious = await store._read(
                    lambda connection, now_ms: caution.until(connection) > now_ms
                )
            became = "cautious" if is_cautious else "harmless"
        except* StoreIncompatible:  # of another version, by what is left of its header
            became = "refused, and left as it is"
        except* StoreError:
            if is_thorough:
                raise
            counts.add(f"{what}: found by a call")
    if became.startswith("refused"):
        return became
    try:
        left = check_file(str(path), SystemClock()).violations
    except StoreDamaged:  # in what no call needs, such as a comment in the schema
        assert became == "harmless"
        return "harmless, and seen by metis check"
    if left:  # in what no rule of allocation looks at
        assert {one.kind for one in left} <= BESIDE_OWNERS
        await mend(path)
        assert not check_file(str(path), SystemClock()).violations
        counts.add(f"{what}: mended by metis repair")
    if any(".damaged-" in each.name for each in path.parent.iterdir()):
        return "healed"
    return became


async def mend(path: Path) -> None:
    work = partial(repair, cooldown_ms=round(COOLDOWN * 1000))
    async with open_store(str(path), release_cooldown=COOLDOWN) as store:
        await store._writer.write(work)


async def strangers(store: Store, promises: Promises) -> None:
    """They get no address that is somebody's, or cools."""
    theirs = {
        (who.network, address): who
        for who, addresses in promises.sure.items()
        for address in addresses
    }
    for network, wanted in (("default", IPV4), ("default", IPV6), ("other", OTHER)):
        for number in range(STRANGERS):
            who = owner(f"stranger{number}-{wanted.family}", network)
            got = await ask(store, who, wanted)
            for one in got:
                holder = theirs.get((network, one.address), who)
                assert holder == who, f"{one.address} is {holder}'s"
            promises.check_given(who, got, store.clock.now_ms())
    # Nor does anybody who asks again get what is another's.
    for who in list(promises.sure)[::7]:
        if not promises.sure[who] or who.container_id.startswith("stranger"):
            continue
        wanted = OTHER if who.network == "other" else IPV4
        for one in await ask(store, who, wanted):
            holder = theirs.get((who.network, one.address), who)
            assert holder == who, f"{who} has {one.address}, which is {holder}'s"


async def ask(store: Store, who: Owner, wanted: Wanted) -> tuple[Allocation, ...]:
    try:
        return await store.allocate(who, [wanted], Pod())
    except PoolExhausted:
        return ()


@pytest.mark.parametrize("thorough", [True, False])
@pytest.mark.parametrize("damage", [cut_log, flip, cut_file, lose_a_file, empty_a_file])
def test_after_damage_nobody_gets_an_address_of_another(
    killed: list[Killed],
    place: Path,
    counts: Counts,
    scaled: Callable[[int], int],
    seed: str,
    damage: Damage,
    thorough: bool,
) -> None:
    chance = random.Random(seed)  # noqa: S311  # damage, not a secret
    what = f"damage ({damage.__name__.replace('_', ' ')})"
    for number in range(scaled(COUNT) // 2):
        one = killed[number % len(killed)]
        path = one.copied_to(place)
        did = damage(path, chance)
        try:
            became = trio.run(
                partial(judged, path, one.promises, what, counts, thorough=thorough)
            )
        except BaseException as error:
            error.add_note(f"number {number}: {did}")
            raise
        counts.add(f"{what}: {became}")
        shutil.rmtree(place)
