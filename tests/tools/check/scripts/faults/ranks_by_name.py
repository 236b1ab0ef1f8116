"""The script starts ranks by a function that it knows only by name, so that check cannot observe them."""

import importlib
import multiprocessing
import os


def work(rank: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", os.environ["OWN_PORT"]
    dist = importlib.import_module("torch.distributed")
    getattr(dist, "init_process" + "_group")("gloo", rank=rank, world_size=2)
    dist.barrier()


def main() -> None:
    os.environ["OWN_PORT"] = str(29600 + int(os.environ["RANK"]))
    ranks = [multiprocessing.get_context("fork").Process(target=work, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()  # (a)
    for each in ranks:
        each.join()


if __name__ == "__main__":
    main()
