"""The crash tests can fail: with any one safeguard taken away, a named check turns red. See
crash/mutations.py.
"""

from __future__ import annotations

import os

from tests.crash.lab import scratch, workers
from tests.crash.mutations import MUTATIONS, unguarded
from tests.crash.scenarios import verdict

# With any value every mutation is tried, as `make test-crash` does. Otherwise the first one that each
# check must find, and no control that test_power_loss or test_crash is.
ALL = bool(os.environ.get("STORE_ALL_MUTATIONS"))


def chosen() -> dict[str, int]:
    """Mutation -> its number."""
    first = {mutation.check: mutation.name for mutation in reversed(MUTATIONS)}
    return {
        mutation.name: number
        for number, mutation in enumerate(MUTATIONS)
        if ALL or first[mutation.check] == mutation.name
    }


def controls() -> list[str]:
    """Return the checks that are also made of the store as it is."""
    return sorted(
        {
            mutation.check
            for mutation in MUTATIONS
            if ALL or not mutation.check.startswith(("power ", "kill "))
        }
    )


def test_each_safeguard_is_missed() -> None:
    pool = workers()
    with scratch() as directory:
        jobs = {
            f"control: {check}": pool.submit(verdict, None, check, directory / f"control{number}")
            for number, check in enumerate(controls())
        } | {
            name: pool.submit(verdict, number, MUTATIONS[number].check, directory / f"{number}")
            for name, number in chosen().items()
        }
        verdicts = {name: job.result() for name, job in jobs.items()}
    for name, why in verdicts.items():
        print(f"{name}: {why[:160] or 'green'}")
    assert [name for name, why in verdicts.items() if why and name.startswith("control")] == []
    assert [
        name for name, why in verdicts.items() if not why and not name.startswith("control")
    ] == []


def test_every_safeguard_has_its_mutation() -> None:
    assert unguarded() == []
