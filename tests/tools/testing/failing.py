"""Tests that fail on purpose, each in a different way, and some that pass; test_plugin.py runs this file by pytest."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

import distlab


@distlab.ranks(3)
def test_wrong(rank):
    print("rank", rank, "was here")
    values = [rank, 2]
    if rank == 1:
        assert values == [1, 3]
    dist.barrier()


@distlab.ranks(2)
def test_after_a_failure():
    dist.barrier()


@distlab.ranks(3)
def test_deadlock(rank):
    if rank == 1:
        dist.barrier()  # (b)
    else:
        time.sleep(0.1)
        dist.all_reduce(torch.ones(3))  # (a)


@distlab.ranks(2)
def test_message_never_arrives(rank):
    if rank == 0:
        dist.recv(torch.ones(3), src=1)


@distlab.ranks(2, backend="tcp")
def test_message_never_arrives_after_uneven_parts(rank):
    dist.reduce_scatter(torch.empty(1 + rank), [torch.ones(1), torch.ones(2)])
    if rank == 0:
        dist.recv(torch.ones(3), src=1)


@distlab.ranks(3)
def test_exits(rank):
    if rank == 2:
        os._exit(7)  # (c)
    dist.barrier()


@distlab.ranks(2)
def test_exits_with_0():
    os._exit(0)


@distlab.ranks(2)
def test_closes_its_output():
    sys.stdout.close()
    sys.stderr = None


@distlab.ranks(2)
def test_prints_after_closed_output():
    print("first", file=sys.stderr)
    print("second")


@distlab.ranks(2)
def test_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@distlab.ranks(2)
def test_mismatched_shapes(rank):
    dist.all_reduce(torch.ones(3 + rank))


@distlab.ranks(2, timeout_s=1)
def test_slow():
    time.sleep(30)


@distlab.ranks(2)
def test_argument_cannot_be_sent(capsys):
    pass


@distlab.ranks(2)
def test_is_skipped(rank):
    pytest.skip("not here")


def step_without_all_reduce(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        (model(inputs, targets) * share).backward()
    optimizer.step()


@distlab.ranks(2)
def test_differs_from_one_process():
    distlab.same_as_one_process(train_step=step_without_all_reduce)


@distlab.ranks()
def test_number_of_ranks_from_the_option(world_size):
    raise RuntimeError(f"{world_size} requested")
