"""`make bench`: every ratio against PyTorch's own beside its target, and what the lab itself costs."""

from benchmarks import (
    causes,
    checkpoint,
    cluster,
    collectives,
    compress,
    cp,
    dp,
    fsdp,
    link,
    mesh,
    over_tcp,
    pp,
    proof,
    recording,
    timeline,
    tp,
    transport,
    wire,
)

if __name__ == "__main__":
    for benchmark in (
        collectives,
        transport,
        over_tcp,
        wire,
        dp,
        fsdp,
        checkpoint,
        tp,
        cp,
        pp,
        mesh,
        causes,
        timeline,
        proof,
        link,
        compress,
        cluster,
        recording,
    ):
        print(f"\n{(benchmark.__doc__ or '').splitlines()[0]}\n", flush=True)
        benchmark.main()
