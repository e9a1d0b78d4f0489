"""Find which groups of this run the trajectories in its files are of, for a rebuild.

groups = new_groups(tx, played)    # with the split, ordinal and round of each, if they are found

A group's uid is a hash of its address: uid(run_id, "train", 17, None) for training group 17. So the
addresses are tried, from those that are likely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from store.catalog.adopt import FoundGroup
from store.catalog.groups import uids_of_address
from store.catalog.records import HELDOUT, IMPORTED, TRAIN
from store.catalog.transaction import Transaction
from store.maintenance.segment_rows import Played

ORDINALS_TRIED = 100_000  # beyond the largest known one: groups opened since the backup
ROUNDS_TRIED = 1_000  # policy versions beyond the newest known one that may have been evaluated
ADDRESSES_TRIED = 10_000_000  # before groups count as imported; it takes about half a minute
# A round is played with newer weights than those of its version while its groups wait for a worker.
# That takes some learner steps; a hundred are tried before the version that played.
ROUNDS_BEFORE = 100

Address = tuple[str, int, int | None]  # a group's split, ordinal and evaluation round


def new_groups(tx: Transaction, played: Sequence[Played]) -> list[FoundGroup]:
    """Return the groups of the files that the backup does not know."""
    known = {row["group_uid"] for row in tx.rows("SELECT group_uid FROM grp")}
    members: dict[bytes, list[Played]] = {}
    for trajectory in played:
        if trajectory.meta.group_uid not in known:
            members.setdefault(trajectory.meta.group_uid, []).append(trajectory)
    addresses = dict(_addresses(tx, members))
    sizes = {split: _usual_size(tx, split=split, members=members) for split in (TRAIN, HELDOUT)}
    query = "SELECT coalesce(max(ordinal), -1) + 1 AS n FROM grp WHERE split = :split"
    n_imported = tx.rows(query, split=IMPORTED)[0]["n"]
    found = []
    for group_uid, held in members.items():
        # A uid that this run never makes was imported. Only the members in the files are expected.
        split, ordinal, round_ = addresses.get(group_uid, (IMPORTED, n_imported, None))
        n_imported += split == IMPORTED
        largest = max(trajectory.meta.member for trajectory in held) + 1
        found.append(
            FoundGroup(
                group_uid=group_uid,
                split=split,
                ordinal=ordinal,
                task_id=held[0].task_id,
                size=max(largest, sizes.get(split, 0)),
                evaluated_version=round_,
            )
        )
    return found


def _usual_size(tx: Transaction, *, split: str, members: Mapping[bytes, Sequence[Played]]) -> int:
    """Return the most frequent group size of a split, or the largest in the files."""
    query = "SELECT size FROM grp WHERE split = :split GROUP BY size ORDER BY count(*) DESC LIMIT 1"
    row = tx.row(query, split=split)
    if row is not None:
        return int(row["size"])
    held = [trajectory for group in members.values() for trajectory in group]
    return max((one.meta.member + 1 for one in held if one.split == split), default=1)


def _addresses(
    tx: Transaction, members: Mapping[bytes, Sequence[Played]]
) -> Iterator[tuple[bytes, Address]]:
    """Yield the address of each group of this run that is found."""
    rows = tx.rows("SELECT group_uid FROM grp WHERE split = :split", split=IMPORTED)
    foreign = {row["group_uid"] for row in rows}
    of_split: dict[str, dict[bytes, Sequence[Played]]] = {TRAIN: {}, HELDOUT: {}, IMPORTED: {}}
    for group_uid, held in members.items():
        of_split.setdefault(held[0].split, {})[group_uid] = held
    foreign.update(of_split[IMPORTED])
    yield from _train_addresses(tx, set(of_split[TRAIN]), foreign=foreign)
    yield from _heldout_addresses(tx, of_split[HELDOUT], foreign=foreign)


def _train_addresses(
    tx: Transaction, left: set[bytes], *, foreign: Collection[bytes]
) -> Iterator[tuple[bytes, Address]]:
    """Yield the groups of `left` whose ordinal is found."""
    query = "SELECT coalesce(max(ordinal), 0) AS n FROM grp WHERE split = :split"
    newest = tx.rows(query, split=TRAIN)[0]["n"]
    first, end = max(0, newest - ORDINALS_TRIED), newest + ORDINALS_TRIED
    # Without a backup the newest is not known: go on behind the last that was found. Retention may
    # have removed the files of any number of groups before the first.
    n_tried, most = 0, ORDINALS_TRIED if newest else ADDRESSES_TRIED
    while left and n_tried < most:
        addresses = ((TRAIN, ordinal, None) for ordinal in range(first, end))
        found = list(_matched(tx, addresses, left=left, foreign=foreign))
        yield from found
        n_tried = 0 if found else n_tried + end - first
        last = max((ordinal for _, (_, ordinal, _) in found), default=end - 1)
        first, end = end, last + 1 + ORDINALS_TRIED


def _heldout_addresses(
    tx: Transaction, members: Mapping[bytes, Sequence[Played]], *, foreign: Collection[bytes]
) -> Iterator[tuple[bytes, Address]]:
    """Yield the held-out groups whose ordinal and round are found."""
    left = set(members)
    query = "SELECT evaluated_version FROM grp WHERE split = :split"
    rounds = Counter(row["evaluated_version"] for row in tx.rows(query, split=HELDOUT))
    newest = tx.rows("SELECT coalesce(max(version), 0) AS n FROM version")[0]["n"]
    versions = {*rounds, *_around(max([newest, *rounds]), n=ROUNDS_TRIED)}
    versions.update(row["version"] for row in tx.rows("SELECT version FROM version"))
    played_by = {one.meta.version_min for held in members.values() for one in held}
    for version in sorted(played_by)[-ADDRESSES_TRIED // ROUNDS_BEFORE :]:
        versions.update(range(max(0, version - ROUNDS_BEFORE), version + 1))
    first, end = 0, max(2 * max(rounds.values(), default=0), ORDINALS_TRIED // ROUNDS_TRIED)
    while left:
        in_rounds = (
            (HELDOUT, ordinal, version)
            for version in sorted(versions, reverse=True)
            for ordinal in range(first, end)
        )
        limited = islice(in_rounds, ADDRESSES_TRIED)
        found = list(_matched(tx, limited, left=left, foreign=foreign))
        yield from found
        if not found:
            break
        first, end = end, 2 * end


def _around(newest: int, *, n: int) -> range:
    """Return the `n` numbers before `newest` and the `n` from it on. The backup may be forged."""
    return range(max(0, newest - n), newest + n)


def _matched(
    tx: Transaction, addresses: Iterable[Address], *, left: set[bytes], foreign: Collection[bytes]
) -> Iterator[tuple[bytes, Address]]:
    """Yield the groups of `left` that have one of the addresses. `foreign` groups are imported."""
    for address in addresses if left else ():
        for group_uid in uids_of_address(tx.run_id, *address):
            if group_uid in left:
                left.remove(group_uid)
                yield group_uid, address
            if group_uid not in foreign:
                break
        if not left:
            return
