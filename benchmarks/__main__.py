"""`make bench`: every ratio against PyTorch's own beside its target, and what the lab itself costs."""

from benchmarks import (
    beside_torchrun,
    checkpoint,
    cluster,
    collectives,
    compress,
    cp,
    ledgers,
    link,
    pp,
    proof,
    steps,
)

if __name__ == "__main__":
    for benchmark in (
        collectives,
        steps,
        ledgers,
        checkpoint,
        cp,
        pp,
        proof,
        link,
        compress,
        cluster,
        beside_torchrun,
    ):
        print(f"\n{(benchmark.__doc__ or '').splitlines()[0]}\n", flush=True)
        benchmark.main()
