"""Python objects between ranks: gathered by all, broadcast, scattered, and gathered at one rank."""

from typing import Any

import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()

    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, {"rank": rank, "name": "x" * (rank + 1)})
    assert [o["rank"] for o in everyone] == list(range(n))

    config: list[Any] = [{"lr": 0.1, "layers": [8, 16]}, "run-7"] if rank == 0 else [None, None]
    dist.broadcast_object_list(config, src=0)
    assert config == [{"lr": 0.1, "layers": [8, 16]}, "run-7"]

    shards = [[f"file-{i}-{j}" for j in range(i + 1)] for i in range(n)] if rank == 0 else None
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, shards, src=0)
    assert len(mine[0]) == rank + 1

    report: list[Any] | None = [None] * n if rank == 0 else None
    dist.gather_object({"rank": rank, "files": len(mine[0])}, report, dst=0)
    if report is not None:
        print(f"files per rank: {[r['files'] for r in report]}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
