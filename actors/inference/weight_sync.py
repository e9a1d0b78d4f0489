"""One engine's weights: always the newest published ones that are whole, and a line in the store
about each load.

    weights = WeightSync(engine, layout, newest=..., record=..., turn=..., rendezvous=..., max_staleness=1)
    await weights.serve(version)          # returns with that version or a newer one, or with the old one if it is refused

Events, with a JSON object as detail; "digest" is of what the engine read:

    weights loaded    {"version": 7, "digest": "ab12...", "received": false, "pause_ms": 21.3, ...}   milliseconds by phase
    weights refused   {"version": 7, "published": "ab12...", "serving": 6, "reason": "..."}
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict

from actors.inference.vllm_policy import VLLMPolicy
from actors.inference.weight_files import WeightFileError
from actors.inference.weight_load import WeightLoad
from store import RunLayout, StoreError, VersionRecord, local_directory

LOADED, REFUSED = "weights loaded", "weights refused"
NOT_YET = -1  # the engine starts with the base model, of which nothing is published yet
RETRY_S = 5.0  # files may come late on a shared disk; damaged ones would be read again and again


class WeightSync:
    """Consumes published versions, one at a time. Waits for the storage and for the engine."""

    def __init__(
        self,
        engine: VLLMPolicy,
        layout: RunLayout,
        *,
        newest: Callable[[], Awaitable[VersionRecord | None]],
        record: Callable[[str, str], Awaitable[None]],
        turn: Callable[[], AbstractAsyncContextManager[None]],
        # None: weights come as files alone
        rendezvous: Callable[[], Awaitable[str | None]] | None,
        max_staleness: int,
    ) -> None:
        self.version = NOT_YET  # the newest one that was loaded
        self._engine, self._layout, self._max_staleness = engine, layout, max_staleness
        self._newest, self._record, self._turn, self._meeting_point = (
            newest,
            record,
            turn,
            rendezvous,
        )
        self._is_sent_weights = False  # the engine was told where the learner sends from
        self._one_load = asyncio.Lock()
        self._refused = NOT_YET
        self._refused_at_s = 0.0

    async def serve(self, version: VersionRecord) -> None:
        """Makes the engine serve `version` or a newer one; generation only pauses for the copy.

        Weights that are missing, damaged or not those that were published leave the engine as it
        is: it goes on with its old version, until the next one comes or another try succeeds.
        Raises WeightFileError or StoreError if that is of no use, as nothing the old version writes
        could be trained on; EngineLostError if the engine is gone.
        """
        while version.version > self.version:
            async with self._one_load:
                if version.version <= self.version or self._refused_lately(version):
                    return
                try:
                    await self._load(version)
                except (WeightFileError, StoreError) as error:
                    newest = await self._newest()
                    if newest is None or newest == version:
                        await self._refuse(version, error)
                        return
                    # the files were removed, because others moved on: so does this engine
                    version = newest

    async def _load(self, version: VersionRecord) -> None:
        load, fetch_ms = None, 0.0
        if self._is_sent_weights:
            async with self._turn():
                load = await self._engine.load_received(
                    version=version.version, digest=version.digest
                )
        if load is None:
            load, fetch_ms = await self._load_files(version)
        self.version = version.version
        phases = {
            name: round(value, 1) for name, value in asdict(load).items() if name.endswith("_ms")
        }
        detail = {"version": version.version, "digest": load.file_digest, "received": load.received}
        await self._record(LOADED, json.dumps({**detail, "fetch_ms": round(fetch_ms, 1), **phases}))
        if self._meeting_point is not None and (address := await self._meeting_point()) is not None:
            await self._engine.join_broadcast(address)
            self._is_sent_weights = True

    async def _load_files(self, version: VersionRecord) -> tuple[WeightLoad, float]:
        """Also how many milliseconds it took to fetch them."""
        started_s = time.perf_counter()
        # fetched if it is not here
        directory = await asyncio.to_thread(local_directory, self._layout, version.path)
        fetch_ms = (time.perf_counter() - started_s) * 1e3
        async with self._turn():
            load = await self._engine.load_weights(
                version=version.version, path=directory, digest=version.digest
            )
        return load, fetch_ms

    async def _refuse(self, version: VersionRecord, error: WeightFileError | StoreError) -> None:
        first, self._refused, self._refused_at_s = (
            version.version != self._refused,
            version.version,
            time.monotonic(),
        )
        if first:
            detail = {
                "version": version.version,
                "published": version.digest,
                "serving": self.version,
                "reason": str(error),
            }
            await self._record(REFUSED, json.dumps(detail))
        if version.version - self.version > self._max_staleness:
            raise error

    def _refused_lately(self, version: VersionRecord) -> bool:
        return version.version == self._refused and time.monotonic() - self._refused_at_s < RETRY_S
