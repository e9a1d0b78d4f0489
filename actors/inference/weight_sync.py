"""Keep one engine on the newest announced weights, and record each load in the store.

    sync = WeightSync(engine, layout, coordinator, limits_loads=True, is_broadcast=False, ...)
    await sync.sync(version)     # returns with that version or a newer one, or refuses it
    sync.version                 # is older while the learner has not written the files yet

Events, with a JSON object as detail; "digest" is of the bytes that the engine read:

    weights loaded    {"version": 7, "digest": "ab12...", "received": false, "pause_ms": 21.3, ...}
    weights refused   {"version": 7, "published": "ab12...", "serving": 6, "reason": "..."}
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict

from actors.inference.vllm_policy import VLLMPolicy
from actors.inference.weight_load import WeightLoad
from coordinator import CoordinatorClient
from store import RunLayout, StoreError, VersionRecord, local_directory

LOADED, REFUSED = "weights loaded", "weights refused"
NO_VERSION = -1  # the engine starts with the base model, which has no version yet
# Files may arrive late on a shared disk, but damaged ones should not be read again all the time.
RETRY_S = 5.0


class Superseded(Exception):
    """A newer version was announced while this engine waited to load an older one."""

    def __init__(self, newest: VersionRecord) -> None:
        super().__init__(newest)
        self.newest = newest


class WeightSync:
    """Load announced versions, one at a time. Waits for the storage and for the engine.

    With `limits_loads` only a few engines of the run load files at a time. A version is skipped if
    a newer one was announced while the engine waited for its turn. With `is_broadcast` the engine
    joins the address from which the learner sends weights; without, all weights come as files.
    """

    def __init__(
        self,
        engine: VLLMPolicy,
        layout: RunLayout,
        coordinator: CoordinatorClient,
        *,
        limits_loads: bool,
        is_broadcast: bool,
        max_staleness: int,
    ) -> None:
        self.version = NO_VERSION  # the newest version that was loaded
        self._engine = engine
        self._layout = layout
        self._max_staleness = max_staleness
        self._coordinator = coordinator
        self._limits_loads, self._is_broadcast = limits_loads, is_broadcast
        self._has_joined = False  # the engine receives what the learner sends
        self._one_load = asyncio.Lock()
        # False after a version was skipped: else an engine that always finds a newer one when its
        # turn comes would never load any.
        self._may_skip = True
        self._refused = NO_VERSION
        self._refused_at_s = 0.0

    async def sync(self, version: VersionRecord) -> None:
        """Make the engine serve `version` or a newer one; generation pauses for the copy only.

        Returns at once, with the engine on its old version, if the version was not sent to this
        engine and its files are not written yet.

        Missing or damaged weights leave the engine on its old version, until the next version comes
        or another try succeeds. Raises StoreError if the old version is too old to be trained on,
        and EngineLostError if the engine is gone.
        """
        while version.version > self.version:
            async with self._one_load:
                if version.version <= self.version or self._was_refused_lately(version):
                    return
                try:
                    if not await self._load(version):
                        return
                except Superseded as superseded:
                    self._may_skip = False
                    version = superseded.newest
                except StoreError as error:
                    newest = await self._coordinator.newest_version()
                    if newest is None or newest == version:
                        await self._refuse(version, error)
                        return
                    # The learner removed the files because it has written newer ones.
                    version = newest

    async def _load(self, version: VersionRecord) -> bool:
        """Load a version, and return True; False if it is not there yet."""
        load, fetch_ms = None, 0.0
        if self._has_joined:
            # Without the lock: the weights are in this engine's memory, so it pauses only briefly.
            load = await self._engine.load_received(version=version.version, digest=version.digest)
        if load is None:
            if not await self._coordinator.is_written(version.version):
                return False
            load, fetch_ms = await self._load_files(version)
        self.version, self._may_skip = version.version, True
        detail = {"version": version.version, "digest": load.file_digest, "received": load.received}
        phases = {"fetch_ms": fetch_ms, **asdict(load)}
        for name, value in phases.items():
            if name.endswith("_ms"):
                detail[name] = round(value, 1)
        await self._coordinator.record(LOADED, json.dumps(detail))
        address = await self._coordinator.rendezvous() if self._is_broadcast else None
        if address is not None:
            await self._engine.join_broadcast(address)
            self._has_joined = True
        return True

    async def _load_files(self, version: VersionRecord) -> tuple[WeightLoad, float]:
        """Load the version's files; return also the milliseconds that fetching them took."""
        started_s = time.perf_counter()
        directory = await asyncio.to_thread(local_directory, self._layout, version.path)
        fetch_ms = (time.perf_counter() - started_s) * 1e3
        async with self._locked(version):
            load = await self._engine.load_weights(
                version=version.version, path=directory, digest=version.digest
            )
        return load, fetch_ms

    @asynccontextmanager
    async def _locked(self, version: VersionRecord) -> AsyncIterator[None]:
        """Hold the lock on weight updates. Raises Superseded if the wait for it was too long."""
        async with self._coordinator.weight_update() if self._limits_loads else nullcontext():
            newest = await self._coordinator.newest_version() if self._may_skip else None
            if (
                newest is not None
                and newest.version > version.version
                and await self._coordinator.is_written(newest.version)
            ):
                raise Superseded(newest)
            yield

    async def _refuse(self, version: VersionRecord, error: StoreError) -> None:
        is_first = version.version != self._refused
        self._refused, self._refused_at_s = version.version, time.monotonic()
        if is_first:
            detail = {
                "version": version.version,
                "published": version.digest,
                "serving": self.version,
                "reason": str(error),
            }
            await self._coordinator.record(REFUSED, json.dumps(detail))
        if version.version - self.version > self._max_staleness:
            raise error

    def _was_refused_lately(self, version: VersionRecord) -> bool:
        elapsed_s = time.monotonic() - self._refused_at_s
        return version.version == self._refused and elapsed_s < RETRY_S
