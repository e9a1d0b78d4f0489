"""Run a share of a study's missing runs: one of the processes that `gigpo study --jobs` starts."""

import sys

from benchmarks.studies.runner import run_share

if __name__ == "__main__":
    name, seeds, job, jobs = sys.argv[1:]
    run_share(name, seeds=int(seeds), job=int(job), jobs=int(jobs))
