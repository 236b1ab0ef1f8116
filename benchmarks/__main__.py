"""`make bench`: every ratio against PyTorch's own beside its target, and what the lab itself costs."""

from benchmarks import (
    beside_torchrun,
    causes,
    checkpoint,
    cluster,
    collectives,
    compress,
    cp,
    ledgers,
    link,
    planned,
    pp,
    proof,
    recording,
    steps,
    timeline,
    transport,
    wire,
)

if __name__ == "__main__":
    for benchmark in (
        collectives,
        transport,
        wire,
        steps,
        ledgers,
        checkpoint,
        cp,
        pp,
        causes,
        timeline,
        proof,
        link,
        compress,
        cluster,
        recording,
        planned,
        beside_torchrun,
    ):
        print(f"\n{(benchmark.__doc__ or '').splitlines()[0]}\n", flush=True)
        benchmark.main()
