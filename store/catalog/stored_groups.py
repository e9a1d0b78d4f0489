"""What the owner of a catalog does with stored groups: `catalog.stored`."""

from __future__ import annotations

from collections.abc import Sequence

from store.catalog import batches
from store.catalog import offline_groups as stored
from store.catalog.database import Database
from store.catalog.offline_groups import StoredGroup
from store.catalog.records import Batch


class StoredGroups:
    """Imported groups that are trained on. Each call is one transaction of the catalog it belongs
    to.

    catalog.stored.take(groups, detail="…")                 # once, after `import_groups`
    catalog.stored.claim(n_live=0, n_stored=8, uses=3, …)
    catalog.stored.batches_left(8, uses=3)
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def taken(self) -> bool:
        """Whether the run has its stored groups: they are chosen once."""
        with self._database.transaction() as tx:
            return stored.is_taken(tx)

    def take(self, groups: Sequence[StoredGroup], *, detail: str) -> None:
        """These imported, whole groups are trained on from now on, in this order; `detail` says in
        words which they are.
        """
        with self._database.transaction() as tx:
            stored.take(tx, groups, detail=detail)

    def claim(
        self, *, n_live: int, n_stored: int, uses: int, current_version: int, max_staleness: int
    ) -> Batch | None:
        """As `Catalog.claim`, of `n_live` groups, and then `n_stored` stored ones: the least used,
        `uses` times at most.
        """
        with self._database.transaction() as tx:
            return batches.claim(
                tx,
                n_groups=n_live,
                n_stored=n_stored,
                uses=uses,
                current_version=current_version,
                max_staleness=max_staleness,
            )

    def batches_left(self, n_groups: int, *, uses: int) -> int:
        """How many more batches can have `n_groups` stored groups."""
        with self._database.transaction() as tx:
            return stored.batches_left(tx, n_groups=n_groups, uses=uses)
